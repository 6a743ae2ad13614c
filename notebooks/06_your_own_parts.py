# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own parts, and what accepts them
#
# A layer, a sharding rule, an optimizer and a kernel, written here from scratch. Each is then checked like the
# library's own, by a line of `js.testing`: **sharded equals unsharded**, **stacked layers equal layers one by one**,
# **a kernel is as exact as a plain implementation**. After each comes a common mistake, and its error message. No
# accelerator and no network is needed.

# %%
import dataclasses

import jaxscale as js

js.simulate_devices(8)

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from jaxscale.layout import PRESETS, STACKED, current, describe
from jaxscale.layout.tensors import tensor_table
from jaxscale.models import TransformerConfig
from jaxscale.nn import Linear
from jaxscale.parallel import sharded_op
from jaxscale.step import describe_model
from pallas_kernels.dispatch import Implementation, dispatch, interpreted

plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## A layer
#
# A feed-forward layer with a squared ReLU (So et al. 2021) as its gate. It says what its dimensions *are*: `Linear`
# takes names with sizes, `constrain` names an activation. It contains no device, no mesh and no `jit`; a Transformer
# takes the class as a setting, as it takes `SwiGLU`.


# %%
def squared_gate(gate, up):
    return jnp.square(jax.nn.relu(gate)) * up


@js.config.register
class SquaredGate(nnx.Module):
    """`down(relu(gate(x))**2 * up(x))`."""

    act = staticmethod(squared_gate)

    def __init__(self, width, hidden, *, bias=False, out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs):
        more = dict(bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate = Linear({"embed": width}, {"mlp": hidden}, **more)
        self.up = Linear({"embed": width}, {"mlp": hidden}, **more)
        self.down = Linear({"mlp": hidden}, {"embed": width}, scale=out_scale, **more)

    def __call__(self, x):
        h = type(self).act(self.gate(x), self.up(x))
        return self.down(js.constrain(h, "batch", "seq", "mlp"))


model = TransformerConfig(depth=2, vocab=64, width=32, heads=4, hidden=64, mlp=SquaredGate)

# %% [markdown]
# Two training steps on one device and on each layout, from one seed. Compared are losses, gradients and parameters,
# leaf by leaf; a number is the largest error as a share of the tolerance for float32 (1e-5 of the leaf). It may be up
# to 1.

# %%
layouts = [js.Layout("data=2,tensor=4"), js.Layout("fsdp=8")]
comparison = js.testing.compare_layouts(model, layouts)
comparison.check()
comparison

# %% [markdown]
# **A mistake.** This layer normalises its hidden activations by hand under `shard_map`, and ignores that a device has
# only its own shard: each normalises a quarter by itself. No shape is wrong and the loss falls, but it is another model
# on every mesh.


# %%
class Forgetful(SquaredGate):
    def __call__(self, x):
        def normalise(h):
            return h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-6)

        h = js.constrain(type(self).act(self.gate(x), self.up(x)), "batch", "seq", "mlp")
        if current() is not None:
            where = PartitionSpec(None, None, "tensor")
            normalise = jax.shard_map(normalise, in_specs=where, out_specs=where, axis_names={"tensor"})
        return self.down(normalise(h))


comparison = js.testing.compare_layouts(dataclasses.replace(model, mlp=Forgetful), layouts[:1])
try:
    comparison.check()
except AssertionError as error:
    print("\n".join(str(error).splitlines()[:3]))
comparison

# %% [markdown]
# ## A sharding rule
#
# A rule says over which mesh axes a name is sharded. These are the default rules, except that `mlp` and `vocab`, the
# largest dimensions, are sharded over `context` as well as `tensor`, at rest and in use, and the sequence is not.

# %%
usual = PRESETS["fsdp_tensor"]()
moved = {"mlp": ("tensor", "context"), "vocab": ("tensor", "context")}
mine = js.Rules(params={**usual.params, **moved}, activations={**usual.activations, **moved, "seq": None})
layout = js.Layout("fsdp=2,context=2,tensor=2", rules=mine)

figure, axes = plt.subplots(1, 2, figsize=(7, 2.2), layout="constrained")
for ax, title, where in zip(axes, ("the default rules", "mine"), (js.Layout(layout.mesh), layout), strict=True):
    js.layout.draw(where, ("embed", "mlp"), (32, 64), title=f"an up projection: {title}", ax=ax)

# %%
infos = describe_model(model)[1]
tensor_table("the first layers", [row for row in describe(infos, layout) if "mlp" in row.path or "embed" in row.path])

# %%
comparison = js.testing.compare_layouts(model, [layout])
comparison.check()
comparison

# %% [markdown]
# **Two mistakes.** A rule cannot make numbers wrong, only shardings: rules that do not fit are errors before anything
# is compiled.

# %%
from jaxscale.errors import LayoutError

try:
    js.Rules(params={"mpl": "tensor"})
except LayoutError as error:
    print(error)
try:
    describe(infos, js.Layout("fsdp=2,tensor=4", rules=js.Rules(params={"embed": ("fsdp", "tensor"), "mlp": "tensor"})))
except LayoutError as error:
    print(error)

# %% [markdown]
# ## An optimizer
#
# Anything with `make(learning_rate, infos)`, which returns an optax transformation. This one is signed momentum, where
# the norm of each tensor's update is a share of the tensor's own norm (the trust ratio of LARS, You et al. 2017). First
# with optax's parts:


# %%
@dataclasses.dataclass(frozen=True)
class SignedByOptax:
    momentum: float = 0.9

    def make(self, learning_rate, infos):
        signed = optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates))
        rate = optax.scale_by_learning_rate(learning_rate)
        return optax.chain(optax.trace(self.momentum), signed, optax.scale_by_trust_ratio(), rate)


small = [js.Layout("fsdp=4,tensor=2")]
comparison = js.testing.compare_optimizer(SignedByOptax(), small)
try:
    comparison.check()
except AssertionError as error:
    print("\n".join(str(error).splitlines()[:3]))
comparison

# %% [markdown]
# **The mistake** is a common one: the layers of a model are one stacked tensor, and optax takes the norm of the whole
# stack. It does the same on every mesh, and is wrong on all of them. A rule for each tensor has to apply to each
# layer's tensor, and `infos` say which dimension is which:


# %%
@js.config.register
@dataclasses.dataclass(frozen=True)
class Signed:
    """Signed momentum, with the norm of an update a share of the norm of each layer's tensor."""

    momentum: float = 0.9

    def make(self, learning_rate, infos):
        def length(x, info):
            own = tuple(i for i, axis in enumerate(info.axes) if axis not in STACKED)
            return jnp.sqrt(jnp.sum(jnp.square(x), axis=own, keepdims=True))

        def init(params):
            return jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params)

        def update(grads, state, params):
            count, trace = state
            trace = jax.tree.map(lambda t, g: self.momentum * t + g, trace, grads)
            rate = learning_rate(count)

            def one(t, p, info):
                sign = jnp.sign(t)
                size, own = length(sign, info), length(p, info)
                return -rate * sign * jnp.where((size > 0) & (own > 0), own / jnp.maximum(size, 1e-12), 1.0)

            return jax.tree.map(one, trace, params, infos), (count + 1, trace)

        return optax.GradientTransformation(init, update)


comparison = js.testing.compare_optimizer(Signed(), small)
comparison.check()
comparison

# %% [markdown]
# ## A kernel
#
# The layer's elementwise product again, in one pass over memory, in Pallas. An op has several implementations;
# `dispatch` takes the best that the present hardware supports, explains why it skipped others, and never replaces one
# that was requested by name. The gradient has to be written by hand.

# %%
ROWS, COLUMNS = 8, 128


def kernel(gate_ref, up_ref, out_ref):
    gate, up = gate_ref[...].astype(jnp.float32), up_ref[...].astype(jnp.float32)
    out_ref[...] = (jnp.square(jnp.maximum(gate, 0)) * up).astype(out_ref.dtype)


def supported(target, *, shape, dtype):
    if len(shape) != 2 or shape[0] % ROWS or shape[1] % COLUMNS:
        return f"it takes tiles of {ROWS} x {COLUMNS}, and the array is {shape}"
    return None


def run_pallas(target, gate, up, *, kernel=kernel, **case):
    block = pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        grid=(gate.shape[0] // ROWS, gate.shape[1] // COLUMNS),
        in_specs=[block, block],
        out_specs=block,
        interpret=target.tpu(),
    )(gate, up)


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), supported, run_pallas),
    Implementation("xla", (), lambda target, **case: None, lambda target, gate, up, **case: squared_gate(gate, up)),
)


@jax.custom_vjp
def fused(gate, up):
    return with_implementation(gate, up, None)


def with_implementation(gate, up, name):
    case = {"shape": gate.shape, "dtype": gate.dtype.name}
    return dispatch("squared_gate", IMPLEMENTATIONS, (gate, up), case, name)


def forward(gate, up):
    return fused(gate, up), (gate, up)


def backward(saved, g):
    gate, up, g32 = (x.astype(jnp.float32) for x in (*saved, g))
    relu = jnp.maximum(gate, 0)
    return (2 * relu * up * g32).astype(g.dtype), (relu * relu * g32).astype(g.dtype)


fused.defvjp(forward, backward)

# %% [markdown]
# `compare_op` needs no tolerance: the error relative to float64 may be twice that of the plain implementation in the
# same dtype. The kernel for TPUs runs in Pallas's interpreter here.


# %%
@jax.custom_vjp
def on_tpu(gate, up):
    return with_implementation(gate, up, "mosaic_tpu")


on_tpu.defvjp(lambda gate, up: (on_tpu(gate, up), (gate, up)), backward)


def pair(dtype, shape=(32, 256)):
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2)]


with interpreted():
    for dtype in (jnp.float32, jnp.bfloat16):
        comparison = js.testing.compare_op(on_tpu, squared_gate, *pair(dtype))
        comparison.check()
        display(comparison)

# %% [markdown]
# **Three mistakes**: arithmetic in 8 bits to save time, a gradient that lacks a factor of 2, and a shape that the
# kernel cannot tile.

# %%
from pallas_kernels.errors import KernelError


def rounded(gate, up):
    return squared_gate(gate.astype(jnp.float8_e4m3fn).astype(gate.dtype), up)


@jax.custom_vjp
def halved(gate, up):
    return squared_gate(gate, up)


def without_its_2(saved, g):
    by_gate, by_up = backward(saved, g)
    return by_gate / 2, by_up


halved.defvjp(lambda gate, up: (halved(gate, up), (gate, up)), without_its_2)

for wrong in (rounded, halved):
    try:
        js.testing.compare_op(wrong, squared_gate, *pair(jnp.bfloat16)).check()
    except AssertionError as error:
        print(f"{wrong.__name__}: {error}\n")
try:
    with interpreted():
        on_tpu(*pair(jnp.float32, (12, 100)))
except KernelError as error:
    print(error)

# %% [markdown]
# ## Together
#
# The partitioner cannot shard a kernel. `sharded_op` passes it the shard of each device, by the names of its
# dimensions; here, on a CPU, dispatch takes XLA's implementation. The layer, with the kernel in it, under our rule:


# %%
class Fused(SquaredGate):
    @staticmethod
    def act(gate, up):
        def local(gate, up):
            rows = (-1, gate.shape[-1])
            return fused(gate.reshape(rows), up.reshape(rows)).reshape(gate.shape)

        names = ("batch", "seq", "mlp")
        return sharded_op(local, gate, up, axes=(names, names), out_axes=names)


model = dataclasses.replace(model, mlp=Fused)
comparison = js.testing.compare_layouts(model, [layout])
comparison.check()
comparison
