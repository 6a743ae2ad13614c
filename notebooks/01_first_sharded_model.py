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
# # A first sharded model
#
# **You name dimensions, a layout maps the names to devices, `jit` does the rest.** This notebook shows each part: a
# layer that says what its dimensions *are*, a layout that says where each name *lives*, a small Transformer trained on
# the source of Python's standard library. It needs no accelerator and no network, and takes under a minute on two
# cores.
#
# Eight devices first. They are simulated on this machine's CPU, so nothing below runs faster for being split; the
# programs are the ones that real devices would run.

# %%
import tempfile
from pathlib import Path

import jaxscale as js

js.simulate_devices(8)

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jaxscale.layout import abstract, describe, shardings_of
from jaxscale.layout.tensors import tensor_table

jax.devices()

# %% [markdown]
# ## A layer says what its dimensions are
#
# `named` puts a name on each dimension of a parameter, `constrain` on each dimension of an activation. No device and
# no mesh appears, and the layer is an ordinary Flax module.


# %%
class Layer(nnx.Module):
    def __init__(self, width, hidden, *, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(js.named(init, "embed", "mlp")(rngs.params(), (width, hidden)))
        self.down = nnx.Param(js.named(init, "mlp", "embed")(rngs.params(), (hidden, width)))

    def __call__(self, x):
        h = js.constrain(jax.nn.gelu(x @ self.up), "batch", "seq", "mlp")
        return js.constrain(x + h @ self.down, "batch", "seq", "embed")


def make():
    return Layer(64, 256, rngs=nnx.Rngs(0))


# %% [markdown]
# ## A layout says where each name lives
#
# A layout is a mesh, written as sizes, and rules from names to mesh axes. The default rules split `embed` over `fsdp`,
# `mlp`, `heads` and `vocab` over `tensor`, and `batch` over `data` and `fsdp`. `describe` shows the result
# before any array exists.

# %%
layout = js.Layout("data=2,fsdp=2,tensor=2")
graphdef, infos = abstract(make)
tensor_table(f"Layer, laid out {layout}", describe(infos, layout), why=True)

# %% [markdown]
# ## What is where
#
# The parameters are created sharded: each device makes its own shard. `x` is a batch of 16 rows of 32 positions. In the
# pictures a block is a shard of the array, and the numbers in it are the devices that hold it: a block with two numbers
# is replicated on two devices.

# %%
params = jax.jit(lambda: nnx.to_pure_dict(nnx.split(make())[1]), out_shardings=shardings_of(infos, layout))()
x = jax.random.normal(jax.random.key(1), (16, 32, 64))
x = jax.device_put(x, layout.sharding(("batch", "seq", "embed"), x.shape, kind="activations"))


# %%
def draw(axes, array, title, names):
    """The first two dimensions of an array, and the devices that hold each block of it."""
    rows, columns = array.shape[:2]
    blocks = {}
    for shard in array.addressable_shards:
        corners = tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True))[:2]
        blocks.setdefault(corners, []).append(shard.device.id)
    for i, (((top, bottom), (left, right)), devices) in enumerate(sorted(blocks.items())):
        colour = plt.cm.GnBu(0.15 + 0.6 * i / len(blocks))
        size = right - left, bottom - top
        axes.add_patch(plt.Rectangle((left, top), *size, facecolor=colour, edgecolor="white", linewidth=2))
        axes.text((left + right) / 2, (top + bottom) / 2, " ".join(map(str, devices)), ha="center", va="center")
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=(0, columns), yticks=(0, rows), title=title)
    axes.set_ylabel(f"{names[0]} ({rows})", labelpad=-4)
    axes.set_xlabel(f"{names[1]} ({columns})", labelpad=-8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def draw_all(params, x, layout):
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.7), layout="constrained")
    draw(axes[0], params["up"], "Layer.up", ("embed", "mlp"))
    draw(axes[1], params["down"], "Layer.down", ("mlp", "embed"))
    draw(axes[2], x, "a batch", ("batch", "seq"))
    figure.suptitle(f"which device holds which block: {layout}", fontsize=10)


draw_all(params, x, layout)

# %% [markdown]
# ## `jit` does the rest
#
# `with layout:` activates the layout; the partitioner inserts the communication. The result is that of one device.


# %%
def apply(params, x):
    return nnx.merge(graphdef, params)(x)


with layout:
    y = jax.jit(apply)(params, x)
alone = jax.jit(apply)(jax.device_get(params), np.asarray(x))
print("largest difference from one device:", float(np.max(np.abs(np.asarray(y) - np.asarray(alone)))))

# %% [markdown]
# ## A Transformer, trained
#
# The models of the library are written in the same way. `fit` trains one and leaves a run: a folder with its settings,
# a line of metrics per step, checkpoints and a picture. The text is the standard library that came with this Python.

# %%
settings = dict(
    model=js.models.TransformerConfig(depth=2, width=128, heads=4),
    data=js.data.python_stdlib(),
    steps=80,
    lr=4e-3,
    batch_size=8,
    seq_len=64,
    eval_batches=4,
)
runs = Path(tempfile.mkdtemp())
run = js.fit(**settings, layout=layout, run=runs / "2x2x2", quiet=True)
run.plot()

# %% [markdown]
# Eighty steps are enough for the shape of code, not for its meaning.

# %%
print(run.sample("def ", tokens=56, temperature=0.6))

# %% [markdown]
# How every tensor is sharded, and by which rule (weights of all layers are one tensor with a leading `layers`):

# %%
js.explain(run)

# %% [markdown]
# ## Another layout is another line
#
# Same model, same data; parameters now in four shards along `embed`, no plain data parallelism. The losses are those of
# the first run, to the rounding of float32.

# %%
other = js.Layout("fsdp=4,tensor=2")
again = js.fit(**settings, layout=other, run=runs / "4x2", quiet=True)

first, second = (np.array([row["loss"] for row in r.metrics()]) for r in (run, again))
for step in (1, 20, 40, 80):
    print(f"step {step:2}   {layout.mesh}: {first[step - 1]:.5f}   {other.mesh}: {second[step - 1]:.5f}")

# %%
params = jax.device_put(params, shardings_of(infos, other))
draw_all(params, jax.device_put(x, other.sharding(("batch", "seq", "embed"), kind="activations")), other)

# %% [markdown]
# ## Mistakes are found early
#
# Nothing is dropped or replicated silently: a name that does not exist, and a mesh that does not fit, are errors before
# anything is compiled, and each says what to do instead.

# %%
from jaxscale.errors import LayoutError

try:
    js.named(nnx.initializers.zeros, "embd", "mlp")
except LayoutError as error:
    print("a misspelt name:\n ", error)

try:
    describe(abstract(lambda: Layer(64, 255, rngs=nnx.Rngs(0)))[1], layout)
except LayoutError as error:
    print("\nsizes that do not divide:\n ", error)

try:
    js.fit(**settings, layout=js.Layout("data=16"), run=runs / "too-large", quiet=True)
except LayoutError as error:
    print("\na mesh larger than the machine:\n ", error)

# %% [markdown]
# Next: `make demo` trains a larger one from the command line, with a progress bar; `jaxscale explain` prints the table
# above for any configuration, before it is run.
