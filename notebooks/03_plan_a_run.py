# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Plan a run before paying for it
#
# From a model and a budget to a layout, for hardware that is not here. Everything is computed from names, rules and
# data sheets: no accelerator, no compiler, no devices. Where the hardware's compiler is installed (`make install
# EXTRAS=plot,tpu`), `plan_for` compiles the step as well and shows both. The eight simulated devices are for the run
# at the end, whose steps are measured.

# %%
import dataclasses
import logging
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import jaxscale as js

js.simulate_devices(8)
logging.getLogger("pallas_kernels").setLevel(logging.ERROR)  # no notes on kernels that need another version of JAX

from jaxscale.hardware import topology
from jaxscale.models import llama3_8b
from jaxscale.nn import POLICIES, flash_attention
from jaxscale.plan import Space, as_gin, plan_for, search
from jaxscale.plan.planner import groups

plt.rcParams["figure.dpi"] = 75

config = js.TrainConfig(
    model=llama3_8b(attention=flash_attention, memory="attention_only"),
    layout=js.Layout("fsdp=-1"),
    batch_size=256,
    seq_len=8192,
)
plan = plan_for(config, "v5p:4x4x4", tokens=1e12, price=4.2, compile="never")
plan

# %% [markdown]
# The price is per chip and hour; insert yours. Every figure of the hardware is in a file, with its source:

# %%
chip = topology("v5p:4x4x4").chip
for name in ("flops", "bandwidth", "links"):
    print(f"{name}: {chip.sources[name]}")

# %% [markdown]
# ## The roofline
#
# The time of an operation is the longer of its arithmetic and its memory traffic. Right of the ridge arithmetic limits
# it, left of the ridge memory does. A dot is one kind of operation, all layers and passes together; its area is its
# time.

# %%
peak = chip.rate("bfloat16")


def time_of(op):
    return max(op.flops / peak, op.bytes / chip.bandwidth)


ridge = peak / chip.bandwidth
figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
intensities = [1, ridge, 1e5]
ax.loglog(intensities, [min(peak, i * chip.bandwidth) / 1e12 for i in intensities], color="k", linewidth=1)
ax.axvline(ridge, color="k", linewidth=0.5, linestyle=":")
for op in sorted(plan.work.ops, key=time_of, reverse=True):
    intensity = max(op.flops / op.bytes, 2)  # operations without arithmetic are drawn at 2
    rate = min(peak, intensity * chip.bandwidth) / 1e12
    ax.scatter(intensity, rate, s=400 * time_of(op), alpha=0.5, label=f"{op.name}, {time_of(op):.2f} s")
figure.legend(loc="outside right center", frameon=False, fontsize=8, markerscale=0.4)
ax.set(xlabel="FLOPs for each byte of memory", ylabel="TFLOP/s a chip can reach", title="v5p", ylim=(2, 2e3))
ax.grid(alpha=0.25)

# %% [markdown]
# ## Memory
#
# The peak memory of a chip under each memory policy: bars that reach beyond the line do not fit.

# %%
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
displayed = ("parameters and optimizer state", "gradients", "activations", "head's gradient")
colors = ["#4292c6", "#8fce9b", "#f4c27a", "#c994c7", "#d9d9d9"]
for row, policy in enumerate(POLICIES):
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, memory=policy))
    memory = groups(plan_for(changed, "v5p:4x4x4", compile="never").memory)
    sizes = [memory.pop(name, 0) for name in displayed]
    left = 0.0
    for size, color in zip([*sizes, sum(memory.values())], colors, strict=True):
        ax.barh(row, size / 2**30, left=left, color=color)
        left += size / 2**30
    print(f"{policy:17} {left:6.1f} GiB")
ax.axvline(chip.capacity / 2**30, color="k", linewidth=1)
ax.set(yticks=range(len(POLICIES)), yticklabels=list(POLICIES), xlabel="GiB on a chip")
ax.invert_yaxis()
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colors]
ax.legend(handles, [*displayed, "all else"], frameon=False, fontsize=8)

# %% [markdown]
# ## Time, by layout
#
# The same step on other meshes. Tensor parallelism sends activations that layers wait for; FSDP sends weights while
# layers compute; a pipeline has idle time.

# %%
meshes = {
    "fsdp=64": None,
    "data=4,fsdp=16": None,
    "fsdp=16,tensor=4": None,
    "fsdp=8,tensor=8": None,
    "pipeline=4,fsdp=16": "lockstep:16",
}
parts = {"compute": "arithmetic", "memory": "memory", "exposed": "exposed communication", "bubble": "idle"}
figure, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
for row, (mesh, schedule) in enumerate(meshes.items()):
    layout = js.Layout(mesh, pipeline=schedule, sequence_sharded="tensor" in mesh)
    step = plan_for(dataclasses.replace(config, layout=layout), "v5p:4x4x4", compile="never").step
    left = 0.0
    for part, color in zip(parts, ("#4292c6", "#c6dbef", "#e6550d", "#bdbdbd"), strict=True):
        ax.barh(row, getattr(step, part), left=left, color=color)
        left += getattr(step, part)
    print(f"{mesh:20} {step.total:5.2f} s   MFU {step.mfu:.0%}")
ax.set(yticks=range(len(meshes)), yticklabels=list(meshes), xlabel="seconds a step")
ax.invert_yaxis()
ax.legend(parts.values(), frameon=False, fontsize=8, loc="upper right")

# %% [markdown]
# ## A search
#
# `search` tries every mesh that the model allows, with every memory policy and number of micro-batches, and finds the
# fastest that fits; here only a part of that space, to be quick. `jaxscale plan --search` tries all of it, schedules
# included, and compiles the best candidates.

# %%
policies = ("none", "dots", "attention_only", "full")
space = Space(axes=("data", "fsdp", "tensor"), policies=policies, accumulate=(1, 4))
result = search(config, "v5p:4x4x4", space=space, compile="never", within=1.3, tokens=1e12, price=4.2)
figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
ax.margins(y=0.3)
ax.plot([f.bytes / 2**30 for f in result.front], [f.step.total for f in result.front], "o-", markersize=4)
for f in result.front:
    words = f"{f.candidate.policy}, {f.candidate.config.accumulate} parts"
    style = dict(fontsize=8, rotation=30, xytext=(3, 3), textcoords="offset points")
    ax.annotate(words, (f.bytes / 2**30, f.step.total), **style)
ax.axvline(chip.capacity / 2**30, color="k", linewidth=1)
ax.set(xlabel="GiB on a chip", ylabel="seconds a step")
ax.grid(alpha=0.25)
print(f"{result.considered} candidates, {result.worked_out} worked out; the fastest: {result.winner.config.layout}")

# %% [markdown]
# ## A budget
#
# The same model and tokens on other hardware of 64 devices.

# %%
print("hardware    step     tokens/s  MFU     days  device-hours")
for name in ("v5p:4x4x4", "v6e:8x8", "h100:8x8", "h200:8x8", "b200:8x8"):
    other = plan_for(config, name, tokens=1e12, compile="never")
    step, budget = other.step, other.budget
    fits = "" if other.fits else "   does not fit"
    print(
        f"{name:10} {step.total:5.2f} s {step.tokens_per_second:10,.0f}  {step.mfu:.0%}  {budget.days:6.1f}"
        f"  {budget.device_hours:12,.0f}{fits}"
    )

# %% [markdown]
# For chips whose efficiency was never fitted to measurements these times are lower bounds: see the last line of each
# plan, and `experiments/planner_accuracy` for the error of plans of published runs.
#
# The result is a file that `jaxscale train` reads unchanged:

# %%
print("\n".join(as_gin(result.winner.config).splitlines()[:12]), "\n…")

# %% [markdown]
# ## Measured and predicted
#
# For a run with a profile (`jaxscale train ... --profile 4:7`), `jaxscale plan RUN --measured` shows the time of its
# steps in the terms of the plan. Here it is a small model on the simulated devices, next to the plan for a CPU that
# `jaxscale microbench` measured, which is another CPU. The devices share a few cores, so collectives mostly wait for
# other devices: that is the exposed time. No plan predicts idle time.

# %%
small = js.models.TransformerConfig(depth=2, width=128, heads=2, vocab=256)
run = js.fit(
    model=small,
    layout=js.Layout("data=2,fsdp=2,tensor=2"),
    batch_size=16,
    seq_len=128,
    steps=8,
    eval_batches=0,
    profile=(4, 7),
    run=Path(tempfile.mkdtemp()) / "run",
    quiet=True,
)
js.plan.measured(run, "cpu:8")

# %% [markdown]
# An impossible request is an error of one sentence:

# %%
for change, where in (({}, "v5q:4x4x4"), ({"layout": js.Layout("pipeline=64")}, "v5p:4x4x4")):
    try:
        plan_for(dataclasses.replace(config, **change), where, compile="never")
    except js.errors.JaxscaleError as e:
        print(e)
