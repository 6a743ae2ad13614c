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
# A large model is trained once; whatever is to be known of it is learned from small ones. Two questions have answers
# that transfer: *which learning rate* (under µP that of a small model holds for a wide one), and *how large, on how
# many tokens* (a law fitted on small runs, with its error on runs that it never saw). No accelerator and no network is
# needed.

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
# ## What a step moves
#
# Under standard initial values activations start at the same size in any model, wide or narrow. What one step of
# training moves them by does not stay the same. The *coordinate check* (Yang et al. 2022) trains a few steps at
# several widths and asks, for every module, how the size of a coordinate goes with the width: a slope of 0 is flat.

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
# One learning rate for all tensors moves a wide model by more than a narrow one. What is best for the one is then too
# much for the other, and a sweep at each size is what that costs.
#
# ## µP
#
# The cure is a factor for each tensor's initial values and learning rate, which follows from the *names* of its
# dimensions: `embed`, `mlp` and `heads` are width, `vocab` and `layers` are not. It is a field of the model.

# %%
mup = dataclasses.replace(run, model=dataclasses.replace(run.model, parametrisation=MuP(base_width=32)))
check = coordcheck(mup, (32, 128), steps=2, seeds=2)
show(check)

# %% [markdown]
# From a shell: `jaxscale coordcheck FILE`, whose exit code says whether it is flat. Whether the best learning rate
# then stays where it was, over four widths, is measured in `experiments/mup_transfer`.
#
# ## A sweep over sizes
#
# So one rate serves four widths. The rate stays what it is from the first step to the last, which makes every
# evaluation on the way the end of a run of its own: four runs are a table of twenty.

# %%
base = dataclasses.replace(mup, schedule=Constant(), steps=120, eval_every=20, eval_batches=16, batch_size=16)
folder = Path(tempfile.mkdtemp()) / "sizes"
Sweep(axes={"Transformer.width": [32, 64, 96, 128]}).run(folder, base, quiet=True)

sizes = js.runs(folder).set_index("run")
rows = []
for point in js.curves(folder, "eval_loss").itertuples():
    size, tokens = sizes.loc[point.run], point.step * base.batch_size * base.seq_len
    if point.step > 20:  # the first is of the start alone
        share = point.step / base.steps
        rows.append(dict(parameters=size.parameters, tokens=tokens, flops=size.flops * share, eval_loss=point.value))
print(len(rows), "rows, as", rows[0])

# %% [markdown]
# ## A law
#
# Chinchilla's (Hoffmann et al. 2022) says $L(N, D) = E + A / N^\alpha + B / D^\beta$ of the loss of $N$ parameters
# after $D$ tokens. It is fitted by a robust loss, with intervals from a bootstrap over the rows. A sweep's folder, or
# any CSV with these columns, is a table as well: `jaxscale laws fit SWEEP --law chinchilla`.

# %%
table = read_table(rows)
fit = Chinchilla().fit(table, samples=50)
fit

# %%
fit.law.picture(fit, table)

# %% [markdown]
# A fit through its own rows says little. What counts is how wrong it is on what it has not seen: the largest size, and
# the largest number of tokens, each left out of a fit of its own.

# %%
for column in ("parameters", "tokens"):
    found = held_out(Chinchilla(), table, column)
    print(f"without the largest {column:10} mean error {100 * found.mean['eval_loss']:.2f}% of {found.judged} rows")

# %% [markdown]
# ## What to train
#
# For a budget the law names the size and the tokens that lose least, each with its interval, and `beyond` says what of
# that lies outside of the runs. `E`, the loss that no model goes below, came out as nothing here: models this small
# are too far from it to see it. Twenty points of four tiny models show the way and no more; `experiments/scaling_law`
# has the study.

# %%
for times in (1, 10):
    best = optimum(fit, times * table["flops"].max())
    print(f"{best.parameters} parameters, {best.tokens} tokens: a loss of {best.loss}")
    for sentence in fit.beyond(parameters=best.parameters.value, tokens=best.tokens.value):
        print("  ", sentence)
