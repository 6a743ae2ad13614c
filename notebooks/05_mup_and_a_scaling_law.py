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
# # µP, and a scaling law
#
# A large model is trained once; its settings have to be found with small models. Two answers transfer: *which learning
# rate* (under µP the rate of a small model is right for a wide one), and *how large, on how many tokens* (a law fitted
# to small runs, with its error on held-out runs). No accelerator and no network is needed.

# %%
import dataclasses
import tempfile
from pathlib import Path

import jaxscale as js

js.simulate_devices(8)

import matplotlib.pyplot as plt

from jaxscale.nn import GELU
from jaxscale.optim import Constant, MuP
from jaxscale.plan.coordcheck import coordcheck
from jaxscale.plan.laws import Chinchilla, held_out, optimum, read_table
from jaxscale.sweep import Sweep

plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## How far a step moves activations
#
# With standard initial values activations start at the same size in any model, wide or narrow. How far one training
# step moves them depends on the width. The *coordinate check* (Yang et al. 2022) trains a few steps at several widths
# and measures, for every module, how the size of a coordinate grows with the width: a slope of 0 is flat.

# %%
run = js.TrainConfig(
    model=js.models.TransformerConfig(depth=1, width=32, head_dim=16, mlp=GELU),
    data=js.data.python_stdlib(),
    layout=None,
    batch_size=8,
    seq_len=32,
    lr=5e-3,
)
pictures = Path(tempfile.mkdtemp())


def show(check):
    path = check.draw(pictures / "check.png")
    _, ax = plt.subplots(figsize=(12, 3.6), layout="constrained")
    ax.imshow(plt.imread(path))
    ax.set_axis_off()
    print(check.verdict)


standard = coordcheck(run, (32, 128), steps=2, seeds=2)
show(standard)

# %% [markdown]
# One learning rate for all tensors moves a wide model further than a narrow one. The best rate of the narrow model is
# then too large for the wide one, and each size needs a sweep of its own.
#
# ## µP
#
# µP multiplies each tensor's initial values and learning rate by a factor that follows from the *names* of its
# dimensions: `embed`, `mlp` and `heads` grow with the width, `vocab` and `layers` do not. It is a field of the model.

# %%
mup = dataclasses.replace(run, model=dataclasses.replace(run.model, parametrisation=MuP(base_width=32)))
check = coordcheck(mup, (32, 128), steps=2, seeds=2)
show(check)

# %% [markdown]
# From a shell: `jaxscale coordcheck FILE`, whose exit code says whether it is flat. `experiments/mup_transfer` measures
# whether the best learning rate is then the same at four widths.
#
# ## A sweep over sizes
#
# So one rate serves four widths. The rate is constant from the first step to the last, so every evaluation during a run
# counts as the end of a shorter run: four runs make a table of twenty.

# %%
base = dataclasses.replace(mup, schedule=Constant(), steps=120, eval_every=20, eval_batches=16, batch_size=16)
folder = Path(tempfile.mkdtemp()) / "sizes"
Sweep(axes={"Transformer.width": [32, 64, 96, 128]}).run(folder, base, quiet=True)

sizes = js.runs(folder).set_index("run")
rows = []
for point in js.curves(folder, "eval_loss").itertuples():
    size, tokens = sizes.loc[point.run], point.step * base.batch_size * base.seq_len
    if point.step > 20:  # the first evaluation is too early
        share = point.step / base.steps
        rows.append(dict(parameters=size.parameters, tokens=tokens, flops=size.flops * share, eval_loss=point.value))
print(len(rows), "rows, as", rows[0])

# %% [markdown]
# ## A law
#
# Chinchilla's law (Hoffmann et al. 2022) is $L(N, D) = E + A / N^\alpha + B / D^\beta$ for the loss of $N$ parameters
# after $D$ tokens. It is fitted with a robust loss; intervals are from a bootstrap over the rows. A sweep's folder, or
# any CSV with these columns, is a table as well: `jaxscale laws fit SWEEP --law chinchilla`.

# %%
table = read_table(rows)
fit = Chinchilla().fit(table, samples=50)
fit

# %%
fit.law.picture(fit, table)

# %% [markdown]
# The error on the fitted rows says little. What counts is the error on held-out rows: those with the largest size, and
# those with the most tokens, each left out of a separate fit.

# %%
for column in ("parameters", "tokens"):
    score = held_out(Chinchilla(), table, column)
    print(f"without the largest {column:10} mean error {100 * score.mean['eval_loss']:.2f}% of {score.judged} rows")

# %% [markdown]
# ## What to train
#
# For a budget the law gives the size and the tokens with the lowest loss, each with its interval, and `beyond` says
# which of them lie outside the runs. The floor `E` came out as zero here: models this small are too far from it to
# determine it. Twenty points of four tiny models only show the method; `experiments/scaling_law` has the study.

# %%
for times in (1, 10):
    best = optimum(fit, times * table["flops"].max())
    print(f"{best.parameters} parameters, {best.tokens} tokens: a loss of {best.loss}")
    for sentence in fit.beyond(parameters=best.parameters.value, tokens=best.tokens.value):
        print("  ", sentence)
