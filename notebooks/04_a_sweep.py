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
# # A sweep, from a question to a figure
#
# *Which learning rate is best for a small model, and does a wider model need another one?* A sweep is a table of
# bindings, a search that chooses rows of it, and a runner that trains them; its results are a folder. No accelerator
# and no network is needed, and the corpus is the standard library that came with this Python.

# %%
import tempfile
from pathlib import Path

import jaxscale as js

js.simulate_devices(8)

import matplotlib.pyplot as plt

from jaxscale.sweep import LogUniform, Prepared, Random, Sweep, Vmapped
from jaxscale.sweep.comparing.report import report
from jaxscale.sweep.dry import table_of

plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## Design
#
# A base run, and what differs from it: a list of values for each binding, by its name in a gin file. Every setting of a
# run can be an axis. `LogUniform(1e-3, 1e-1)` instead of a list is a continuous axis.

# %%
base = js.TrainConfig(
    model=js.models.TransformerConfig(depth=1, width=32, heads=1, hidden=64),
    layout=None,
    data=js.data.python_stdlib(),
    steps=60,
    batch_size=8,
    seq_len=32,
    eval_batches=4,
)
sweep = Sweep(axes={"Transformer.width": [32, 128], "train.lr": [1e-3, 1e-2, 1e-1]}, runner=Vmapped())
display(table_of(Prepared(sweep, base)))

# %% [markdown]
# This is the whole sweep, before anything runs; every name and value has been checked, and each shape traced. A mistake
# is an error of one sentence:

# %%
from jaxscale.errors import ConfigError

for axes in ({"train.rl": [1e-3]}, {"train.lr": []}, {"Transformer.width": ["wide"]}):
    try:
        Prepared(Sweep(axes=axes), base)
    except ConfigError as error:
        print(error)

# %% [markdown]
# ## Run
#
# The runner decides where runs are trained. `Vmapped` trains runs with the same shapes together, under `vmap` over
# learning rates and seeds: here three at a time, each width compiled once. `Here()` trains one after the other,
# `Pool(workers=4)` in four processes, `SubMeshes()` on small meshes of a slice, `Slurm()` on a cluster. From a shell
# all of this is `jaxscale sweep FILE --run DIR`, with a live table.

# %%
folder = Path(tempfile.mkdtemp()) / "rates"
result = sweep.run(folder, base, quiet=True)
print("\n".join(sorted(p.name for p in folder.iterdir())))

# %% [markdown]
# A sweep is a folder: its resolved gin text, a journal, a run folder per trial, and the table. If the machine dies, the
# same call continues the unfinished trials. Here all are finished, so nothing runs. Results are never overwritten:
# another sweep in the same folder is an error.

# %%
sweep.run(folder, base, quiet=True)
try:
    Sweep(axes={"train.lr": [1e-4]}).run(folder, base, quiet=True)
except js.errors.RunError as error:
    print(str(error).replace(str(folder.parent) + "/", ""))

# %% [markdown]
# ## Look
#
# `js.runs` reads run folders into a pandas table, a row per run, with every binding and the last value of each metric.
# `js.curves` has the values of every step.

# %%
table = js.runs(folder)
table[["run", "train.lr", "Transformer.width", "parameters", "loss", "eval_loss", "step_seconds"]]

# %%
steps = js.curves(folder, "loss").merge(table[["run", "train.lr", "Transformer.width"]], on="run")
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for width, colour in zip((32, 128), ("#3d7ea6", "#d1495b"), strict=True):
    some = table[table["Transformer.width"] == width].sort_values("train.lr")
    left.plot(some["train.lr"], some["eval_loss"], "o-", color=colour, label=f"width {width}")
    for rate, style in zip((1e-3, 1e-2, 1e-1), (":", "-", "--"), strict=True):
        one = steps[(steps["Transformer.width"] == width) & (steps["train.lr"] == rate)]
        right.plot(one["step"], one["value"], style, color=colour, linewidth=1, label=f"width {width}, {rate:g}")
left.set(xscale="log", xlabel="learning rate", ylabel="held-out nats per byte", title="after 60 steps")
right.set(xlabel="step", ylabel="training loss", title="on the way")
for ax in (left, right):
    ax.grid(alpha=0.25)
    ax.legend(frameon=False, fontsize=8)

# %% [markdown]
# At the lowest rate the wide model is close to its best, and the narrow one has hardly begun: they need different
# rates, and three points a line cannot tell which ones. Notebook 05 shows how to avoid that question. One run a point
# says little, too: with `Sweep(..., seeds=3)` there are three, and the report below draws them as a band. The best row
# is a run like any other:

# %%
best = result.best()
print({name: best[name] for name in ("train.lr", "Transformer.width", "eval_loss")})
print(result.run().sample("def ", tokens=60, temperature=0.5))

# %% [markdown]
# ## Report
#
# `jaxscale report DIR` writes one self-contained page: curves, parallel coordinates, the table of differing settings,
# samples, hardware. The pictures are also separate files next to it.

# %%
page = report(folder)
print(page.name, f"{page.stat().st_size / 1024:.0f} KiB")
figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
ax.imshow(plt.imread(folder / "parallel.png"))
ax.set_axis_off()

# %% [markdown]
# ## Search
#
# A grid of two axes has six runs; one of five axes has thousands. Other searches: `Random` draws points, `ASHA` trains
# many trials for few steps and continues the best, `OptunaSearch` learns from the results. Each chooses its next trial
# from the records of all trials, so that a killed search continues as well.

# %%
random = Sweep(axes={"train.lr": LogUniform(1e-3, 1e-1), "Transformer.width": [32, 64, 128]}, search=Random(), runs=5)
display(table_of(Prepared(random, base)))
