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
# A layer, a sharding rule, an optimizer and a kernel, written here from nothing. Each is then held to what the
# library's own are held to, by a line of `js.testing`: **sharded equals unsharded**, **stacked layers equal layers one
# by one**, **a kernel is as exact as a plain implementation**. After each comes a mistake that people make, and what
# is said of it. No accelerator and no network is needed.

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
# A feed-forward with a squared ReLU (So et al. 2021) times a gate. It says what its dimensions *are*: `Linear` takes
# names with sizes, `constrain` names an activation. It holds no device, no mesh and no `jit`; a Transformer takes it
# by reference, as it takes `SwiGLU`.


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
# Two steps of training on one device and on each layout, from one seed. Compared are losses, gradients and parameters,
# leaf by leaf; a number is the largest error as a share of what float32 is allowed (1e-5 of the leaf). It may be 1.

# %%
layouts = [js.Layout("data=2,tensor=4"), js.Layout("fsdp=8")]
found = js.testing.compare_layouts(model, layouts)
found.check()
found

# %% [markdown]
# **A mistake.** This one normalises its hidden width, by hand under `shard_map`, and forgets that a device has only
# its own piece of it: each divides by the size of a quarter. No shape is wrong and the loss falls; it is another model
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


found = js.testing.compare_layouts(dataclasses.replace(model, mlp=Forgetful), layouts[:1])
try:
    found.check()
except AssertionError as error:
    print("\n".join(str(error).splitlines()[:3]))
found

# %% [markdown]
# ## A sharding rule
#
# A rule says where a name lives. These are the default ones, but `mlp` and `vocab`, the largest dimensions, lie over
# `context` as well as `tensor`, at rest and in use, and the sequence is whole.

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
found = js.testing.compare_layouts(model, [layout])
found.check()
found

# %% [markdown]
# **Two mistakes.** A rule cannot make numbers wrong, only places: what does not fit is told before anything is
# compiled.

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
# Anything with `make(learning_rate, infos)`, which gives an optax transformation. This is signed momentum, each
# tensor's update as long as a share of the tensor itself (the trust ratio of LARS, You et al. 2017). First in optax's
# words:


# %%
@dataclasses.dataclass(frozen=True)
class SignedByOptax:
    momentum: float = 0.9

    def make(self, learning_rate, infos):
        signed = optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates))
        rate = optax.scale_by_learning_rate(learning_rate)
        return optax.chain(optax.trace(self.momentum), signed, optax.scale_by_trust_ratio(), rate)


small = [js.Layout("fsdp=4,tensor=2")]
found = js.testing.compare_optimizer(SignedByOptax(), small)
try:
    found.check()
except AssertionError as error:
    print("\n".join(str(error).splitlines()[:3]))
found

# %% [markdown]
# **The mistake** is an old one: the layers of a model are one stacked tensor, and optax takes the length of the whole
# stack. On any mesh it does the same, and it is wrong on all of them. What is defined per tensor is defined per layer,
# and `infos` say which dimension is which:


# %%
@js.config.register
@dataclasses.dataclass(frozen=True)
class Signed:
    """Signed momentum, as long as a share of each layer's tensor."""

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


found = js.testing.compare_optimizer(Signed(), small)
found.check()
found

# %% [markdown]
# ## A kernel
#
# The layer's product once more, in one pass over memory, in Pallas. A kernel has implementations; `dispatch` takes the
# best that the hardware at hand supports, says in words why not another, and never falls back from one that was named.
# The gradient is ours to write.

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


def backward(kept, g):
    gate, up, g32 = (x.astype(jnp.float32) for x in (*kept, g))
    relu = jnp.maximum(gate, 0)
    return (2 * relu * up * g32).astype(g.dtype), (relu * relu * g32).astype(g.dtype)


fused.defvjp(forward, backward)

# %% [markdown]
# `compare_op` asks for no tolerance: our error against float64 may be twice that of the plain implementation in the
# same dtype. The TPU's kernel runs in its interpreter here.


# %%
@jax.custom_vjp
def on_tpu(gate, up):
    return with_implementation(gate, up, "mosaic_tpu")


on_tpu.defvjp(lambda gate, up: (on_tpu(gate, up), (gate, up)), backward)


def pair(dtype, shape=(32, 256)):
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2)]


with interpreted():
    for dtype in (jnp.float32, jnp.bfloat16):
        found = js.testing.compare_op(on_tpu, squared_gate, *pair(dtype))
        found.check()
        display(found)

# %% [markdown]
# **Three mistakes**: arithmetic in 8 bits to save time, a gradient without its 2, and a shape that the kernel cannot
# cut.

# %%
from pallas_kernels.errors import KernelError


def rounded(gate, up):
    return squared_gate(gate.astype(jnp.float8_e4m3fn).astype(gate.dtype), up)


@jax.custom_vjp
def halved(gate, up):
    return squared_gate(gate, up)


def without_its_2(kept, g):
    by_gate, by_up = backward(kept, g)
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
# The partitioner cannot cut a kernel. `sharded_op` gives it the piece that each device holds, by the names of its
# dimensions; here, on a CPU, dispatch takes XLA's form. The layer, with the kernel in it, on the rule:


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
found = js.testing.compare_layouts(model, [layout])
found.check()
found
