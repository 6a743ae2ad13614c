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
# # Seven ways to use eight devices
#
# A training step can be sharded along its batch, its weights, its sequence, its depth. Here each way is drawn, then
# combined with others, then trained: **the loss is the same on every layout**. No accelerator and no network is needed.

# %%
import inspect

import jaxscale as js

js.simulate_devices(8)

import jax
import matplotlib.pyplot as plt
import numpy as np

from jaxscale.layout import SCHEDULES, Layout, draw, simulate
from jaxscale.layout.table import draw_figure
from jaxscale.nn import RingAttention
from jaxscale.plan.collectives import collectives, sent_by_axis
from jaxscale.step import batch_sharding, blueprint_of, jit_step, make_loss_and_grads, make_step

plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## One weight and one batch
#
# On the left a weight, on the right a batch as it passes between layers. A block is a shard, the numbers in it are the
# devices that hold it. Every device computes with its shards and receives what else it needs.
#
# | mesh axis | shards | sends |
# |---|---|---|
# | `data` | the batch | gradients, once a step |
# | `fsdp` | the batch; weights at rest | weights, as each layer needs them; gradients |
# | `tensor` | weights in use | activations, twice a layer and pass |
# | `tensor`, sequence too | the same, and the sequence between layers | the same bytes, in two halves |
# | `context` | the sequence | keys and values, around a ring |
# | `expert` | the batch; experts | tokens, to their experts and back |
# | `pipeline` | depth | activations, to the next stage |

# %%
MATRIX, BATCH = (("embed", "mlp"), (64, 256)), (("batch", "seq"), (16, 64))
between = ("batch", "residual_seq"), BATCH[1]
ways = {
    "data": (Layout("data=8"), MATRIX, BATCH),
    "fsdp": (Layout("fsdp=8"), MATRIX, BATCH),
    "tensor": (Layout("tensor=8"), MATRIX, BATCH),
    "tensor, sequence too": (Layout("tensor=8", sequence_sharded=True), MATRIX, between),
    "context": (Layout("context=8"), MATRIX, BATCH),
    "expert": (Layout("expert=8"), (("experts", "embed"), (8, 64)), BATCH),
    "pipeline": (Layout("pipeline=8"), (("layers", "embed"), (8, 64)), BATCH),
}
figure, axes = plt.subplots(len(ways), 2, figsize=(6, 1.75 * len(ways)), layout="constrained")
for (name, (layout, weight, batch)), (left, right) in zip(ways.items(), axes, strict=True):
    draw(layout, *weight, title=f"{name}: a weight", ax=left)
    draw(layout, *batch, kind="activations", title="a batch", ax=right)

# %% [markdown]
# The weight of `expert` is one matrix of each of 8 experts, that of `pipeline` one of each of 8 layers. With
# `pipeline` every stage processes the whole batch, one micro-batch at a time.
#
# ## Products
#
# Any product of them is a line of text:

# %%
mixed = {
    "fsdp=2,context=2,tensor=2": MATRIX,
    "pipeline=2,data=2,tensor=2": (("layers", "mlp"), (8, 256)),
}
figure, axes = plt.subplots(len(mixed), 2, figsize=(6, 1.9 * len(mixed)), layout="constrained")
for (mesh, weight), (left, right) in zip(mixed.items(), axes, strict=True):
    draw(Layout(mesh), *weight, title=mesh, ax=left)
    draw(Layout(mesh), *BATCH, kind="activations", title="a batch", ax=right)

# %% [markdown]
# ## Pipeline schedules
#
# Stages wait for each other: the *bubble* is the share of time that they are idle. A schedule is a table of stages and
# ticks; numbers are micro-batches. GPipe keeps the activations of all micro-batches until the backward passes begin.
# 1F1B has the same bubble and keeps at most as many as there are stages. Interleaving gives each stage several chunks
# of the model (`3.1` is micro-batch 3 in chunk 1), and divides the idle time by their number. Zero-bubble fills gaps
# with weight gradients, for which no stage waits. Columns are ticks, whatever their duration: a whole backward pass
# takes twice as long as a forward pass.

# %%
STAGES, MICRO = 3, 6
tables = {name: SCHEDULES[name](STAGES, MICRO) for name in ("gpipe", "1f1b", "interleaved", "zb-h1")}
for table in tables.values():
    picture = draw_figure(table)
    picture.set_dpi(75)
    display(picture)

# %%
print("schedule      bubble   most micro-batches a stage holds")
for name, table in tables.items():
    simulated = simulate(table)
    print(f"{name:12} {simulated.bubble:7.3f}   {max(simulated.stash) / table.chunks:g}")
print(f"\nGPipe's formula, (K - 1) / (M + K - 1) = {(STAGES - 1) / (MICRO + STAGES - 1):.3f}")

# %% [markdown]
# More micro-batches make the bubble smaller too.

# %%
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
many = [3, 6, 9, 12, 18, 24]
for name in tables:
    ax.plot(many, [simulate(SCHEDULES[name](STAGES, m)).bubble for m in many], "o-", markersize=4, label=name)
ax.lines[1].set(linestyle="--", marker="x")  # 1F1B lies on GPipe
ax.set(xlabel=f"micro-batches, on {STAGES} stages", ylabel="bubble", ylim=0, xticks=many)
ax.legend(frameon=False)
ax.grid(alpha=0.25)
# %% [markdown]
# ## One model, three layouts, one loss
#
# A small Transformer learns 16 rows of Python's own source. The step is `jit` of a pure function; only the line with
# the layout changes.

# %%
ROWS, TOKENS = 16, 32
text = np.frombuffer(inspect.getsource(inspect).encode(), np.uint8)[: ROWS * TOKENS + 1].astype(np.int32)
batch = {
    "tokens": text[:-1].reshape(ROWS, TOKENS),
    "targets": text[1:].reshape(ROWS, TOKENS),
    "weights": np.ones((ROWS, TOKENS), np.float32),
}
model = js.models.TransformerConfig(depth=4, width=32, heads=2, vocab=128, attention=RingAttention())


def train(layout, steps=20):
    """Return the losses and the compiled step."""
    config = js.TrainConfig(model=model, layout=layout, batch_size=ROWS, seq_len=TOKENS, steps=steps, lr=1e-2)
    blueprint, rate = blueprint_of(config)
    where = batch_sharding(layout, ROWS, TOKENS)
    step = jit_step(make_step(make_loss_and_grads(blueprint), blueprint.tx, rate), blueprint, where)
    losses = []
    with layout:
        state, rows = blueprint.init(seed=0), jax.device_put(batch, where)
        compiled = step.lower(state, rows).compile()
        for _ in range(steps):
            state, metrics = compiled(state, rows)
            losses.append(float(metrics["loss"]))
    return np.array(losses), compiled


layouts = [
    Layout("data=2,fsdp=4"),
    Layout("fsdp=2,tensor=2,context=2", sequence_sharded=True),
    Layout("pipeline=4,data=2", pipeline="1f1b:4"),
]
runs = [train(layout) for layout in layouts]

# %%
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for (losses, _), layout, width, color in zip(runs, layouts, (8, 4, 1), ("#c6dbef", "#4292c6", "k"), strict=True):
    ax.plot(range(1, 21), losses, linewidth=width, color=color, label=layout.mesh)
ax.set(xlabel="step", ylabel="nats per byte", xticks=range(0, 21, 5))
ax.legend(frameon=False)
ax.grid(alpha=0.25)
for (losses, _), layout in zip(runs, layouts, strict=True):
    print(f"{layout.mesh:27} {losses[0]:.5f} … {losses[-1]:.5f}")
    assert np.allclose(losses, runs[0][0], rtol=1e-4)

# %% [markdown]
# ## What the steps send
#
# From the compiled programs: bytes that a device sends in one step, by mesh axes (for a pipeline an upper bound: as if
# every phase ran at every tick). These are programs for a CPU; those for a TPU send fewer bytes in sums.
# `experiments/parallelism` has Llama 3 8B and Mixtral 8x7B, compiled for 64 TPU chips.

# %%
for (_, compiled), layout in zip(runs, layouts, strict=True):
    listed = collectives(compiled, layout.sizes)
    lines = [layout.mesh]
    for axes, sent in sorted(sent_by_axis(listed).items()):
        kinds = sorted({c.kind for c in listed if c.axes == axes})
        if sent > 1024:
            lines.append(f"  {' x '.join(axes):16} {sent / 1024:5.0f} KiB   {', '.join(kinds)}")
    print("\n".join(lines))
