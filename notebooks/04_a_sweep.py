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
# *Which learning rate suits a small model, and is it another one when the model is wider?* A sweep is a table of
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
# A base run, and what differs from it: a list of values for each binding, by the name that a gin file has for it.
# Whatever is a setting of a run is an axis. `LogUniform(1e-3, 1e-1)` in place of a list would be one without end.

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
# That was the whole of it, before anything ran; every name and value has been checked, and each shape traced. Mistakes
# are a sentence:

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
# Where runs go is a value. `Vmapped` trains those of one shape together, under `vmap` over learning rates and seeds:
# here three at a time, each width compiled once. `Here()` is one after the other, `Pool(workers=4)` four processes,
# `SubMeshes()` a slice cut into small meshes, `Slurm()` a cluster. From a shell all of this is `jaxscale sweep FILE
# --run DIR`, with a live table.

# %%
folder = Path(tempfile.mkdtemp()) / "rates"
result = sweep.run(folder, base, quiet=True)
print("\n".join(sorted(p.name for p in folder.iterdir())))

# %% [markdown]
# A folder is all there is: the resolved text of the sweep, a journal, a run folder per trial, and the table. If the
# machine dies, the same line goes on with what is unfinished. Here nothing is, so nothing runs. Results are never
# written over: another sweep is refused that folder.

# %%
sweep.run(folder, base, quiet=True)
try:
    Sweep(axes={"train.lr": [1e-4]}).run(folder, base, quiet=True)
except js.errors.RunError as error:
    print(str(error).replace(str(folder.parent) + "/", ""))

# %% [markdown]
# ## Look
#
# `js.runs` reads run folders into a pandas table, a row a run, with every binding and the last of each metric.
# `js.curves` has the numbers of every step.

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
# At the lowest rate the wide model is close to its best, and the narrow one has hardly begun: they do not want the
# same rate, and three points a line cannot tell which one each wants. Notebook 05 makes that question go away. One run
# a point says little, too: `Sweep(..., seeds=3)` makes three of it, and the report below draws them as a band. The
# best row is a run like any other:

# %%
best = result.best()
print({name: best[name] for name in ("train.lr", "Transformer.width", "eval_loss")})
print(result.run().sample("def ", tokens=60, temperature=0.5))

# %% [markdown]
# ## Report
#
# `jaxscale report DIR` writes one page that needs nothing but itself: curves, parallel coordinates, the table of what
# differs, samples, hardware. Its pictures lie beside it.

# %%
page = report(folder)
print(page.name, f"{page.stat().st_size / 1024:.0f} KiB")
figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
ax.imshow(plt.imread(folder / "parallel.png"))
ax.set_axis_off()

# %% [markdown]
# ## Search
#
# A grid of two axes is six runs; of five it is thousands. A search is a value: `Random` draws points, `ASHA` trains
# many for few steps and goes on with the best, `OptunaSearch` learns from the results. Each asks for its next trial
# given all records, so that a killed one goes on as well.

# %%
random = Sweep(axes={"train.lr": LogUniform(1e-3, 1e-1), "Transformer.width": [32, 64, 128]}, search=Random(), runs=5)
display(table_of(Prepared(random, base)))
