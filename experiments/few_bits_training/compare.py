"""Train the demo's model with products in 8 bits and in bfloat16, and compare losses.

    JAX_PLATFORMS=cpu .venv/bin/python experiments/few_bits_training/compare.py [RECIPE ...]

Writes results/RECIPE.json and, with the table that it prints, results/losses.png beside this file. A recipe that has
results is not run again; without a name, all recipes are.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxscale as js
from jaxscale.nn import MXFP8, Fp8, Int8, ProductRule
from jaxscale.optim import AdamW, AdamW8bit, EightBit

HERE = pathlib.Path(__file__).parent / "results"
STEPS, LAST = 150, 30
RECIPES = {
    "bfloat16": None,
    "bfloat16_seed_1": None,
    "int8": Int8(),
    "int8_all": Int8(kernel_gradient=True),
    "fp8": Fp8(),
    "mxfp8": MXFP8(),
    "fp8_delayed": Fp8(scaling="delayed"),
    "states_fp8": None,
    "states_fp8_expanded": None,
    "states_dynamic": None,
    "int8_head": (ProductRule("head", Int8()), ProductRule("*", Int8())),
    "fp8_head": (ProductRule("head", Fp8()), ProductRule("*", Fp8())),
}


STATES = {"states_fp8": "fp8", "states_fp8_expanded": "fp8_expanded", "states_dynamic": "dynamic"}
"""Formats of AdamW's two moments, of all parameters."""


def measure(name: str) -> dict[str, object]:
    """Train by a recipe, and return the training losses and the held-out loss."""
    products, seed = RECIPES[name], int(name.endswith("seed_1"))
    storage = EightBit(format=STATES.get(name, "dynamic"), keep=(), min_size=0)
    optimizer = AdamW8bit(storage=storage) if name in STATES else AdamW()
    model = js.models.Transformer.Config(depth=4, width=128, heads=4, dtype="bfloat16", products=products)
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run = js.fit(
            model=model, optimizer=optimizer, data=js.data.python_stdlib(), steps=STEPS, batch_size=8, seq_len=64,
            lr=4e-3, seed=seed, eval_every=STEPS, checkpoint_every=STEPS, prompt=None, run=f"{folder}/run", quiet=True,
        )  # fmt: skip
        rows = [r for r in run.metrics() if "loss" in r]
        held_out = [r["eval_loss"] for r in run.metrics() if "eval_loss" in r][-1]
    return {"losses": [r["loss"] for r in rows], "held_out": held_out, "seconds": time.time() - began}


def main() -> None:
    """Measure what is missing, draw the picture and print the table."""
    for name in sys.argv[1:] or RECIPES:
        path = HERE / f"{name}.json"
        if not path.exists():
            commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
            versions = {"commit": commit.strip(), "date": datetime.date.today().isoformat(), "jax": jax.__version__}
            path.write_text(json.dumps(measure(name) | versions, indent=1) + "\n")
    results = {n: json.loads((HERE / f"{n}.json").read_text()) for n in RECIPES if (HERE / f"{n}.json").exists()}
    if "bfloat16" not in results:
        return
    last = {name: np.mean(one["losses"][-LAST:]) for name, one in results.items()}
    base = results["bfloat16"]
    _, axes = plt.subplots(figsize=(7, 4))
    print(
        f"| products | last {LAST} training losses | over bfloat16 | held-out | over bfloat16 |\n|---|---|---|---|---|"
    )
    for name, one in results.items():
        more, held = 100 * (last[name] / last["bfloat16"] - 1), 100 * (one["held_out"] / base["held_out"] - 1)
        print(f"| {name} | {last[name]:.4f} | {more:+.2f}% | {one['held_out']:.4f} | {held:+.2f}% |")
        smooth = np.convolve(one["losses"], np.ones(10) / 10, "valid")
        axes.plot(np.arange(len(smooth)) + 10, smooth, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte, mean of 10 steps)", yscale="log")
    axes.legend()
    plt.tight_layout()
    plt.savefig(HERE / "losses.png", dpi=110)


if __name__ == "__main__":
    main()
