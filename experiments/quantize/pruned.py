"""Held-out loss of one model with weights left out: python experiments/quantize/pruned.py RUN.

One pass over the calibration rows collects the statistics of all layers of the model as it is; `jaxscale quantize`
instead computes those of a layer after the layers before it are rounded. Writes pruned.jsonl, whose rows are not
computed again, and prints a table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compare import batches_of, nats_of

import jaxscale as js
from jaxscale.convert.calibration import Calibration, observable, widest_of
from jaxscale.convert.calibration import batches_of as calibration_batches
from jaxscale.convert.recipes import BlockPruning, Inputs, LowRank, Recipe
from jaxscale.layout.tensors import path_name
from jaxscale.nn import as_weight
from jaxscale.step.state import describe_model
from jaxscale.step.stored import is_weight

ROWS, BATCH = 64, 16


def recipes() -> list[Recipe]:
    """Return the recipes that are compared."""
    single = [BlockPruning(share=share, taylor=taylor) for share in (0.6, 0.7, 0.8) for taylor in (False, True)]
    blocks = [BlockPruning(share=0.3, group=4, outputs=4, taylor=taylor) for taylor in (False, True)]
    return [*(LowRank(rank=rank) for rank in (64, 32)), *single, BlockPruning(share=0.9), *blocks]


def statistics(run: js.Run) -> list[dict[str, Inputs]]:
    """Return the statistics of the inputs of each layer's matrices, by their paths in the model.

    Args:
      run: a run of a model with one run of equal blocks.
    """
    infos = describe_model(run.config.model)[1]
    graphdef, _ = describe_model(observable(run.config.model))
    rows = calibration_batches(run.config, None, ROWS, BATCH, widest_of(infos))
    calibration = Calibration(graphdef, infos, rows, None)
    params = run.params()
    (name,), (of_run,) = list(infos["runs"]), list(params["runs"].values())
    names = [path_name(p) for p, i in jax.tree_util.tree_leaves_with_path(infos["runs"][name]) if i.contracted]
    calibration.begin({k: v for k, v in params.items() if k != "runs"})
    out = []
    for layer in range(run.config.model.depth):
        one = jax.tree.map(lambda x, n=layer: x[n : n + 1], of_run)
        inputs = calibration.inputs(0, layer, one, names)
        out.append({f"runs/{name}/{path}": own for path, own in inputs.items()})
        calibration.advance(0, layer, one)
    return out


def main(path: str) -> None:
    """Measure every recipe."""
    run = js.load(path)
    infos, params = describe_model(run.config.model)[1], run.params()
    batches, nats, layers = batches_of(run), nats_of(run.config.model), statistics(run)

    def row(name: str, weights: Any) -> dict[str, Any]:
        few = [w for w in jax.tree.leaves(weights, is_leaf=is_weight) if is_weight(w)]
        size = sum(x.nbytes for w in few for x in jax.tree.leaves(w))
        dense = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, weights)
        sums = [nats(dense, b) for b in batches]
        return {"recipe": name, "loss": float(sum(n for n, _ in sums) / sum(w for _, w in sums)), "bytes": size}

    plain = sum(4 * i.size for i in jax.tree.leaves(infos) if i.contracted and "vocab" not in i.axes)
    file = Path(__file__).parent / "pruned.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = rows or [row("none", params) | {"bytes": plain}]
    for recipe in recipes():
        if all(row["recipe"] != repr(recipe) for row in rows):

            def made(info: Any, kernel: Any, recipe: Recipe = recipe) -> Any:
                if info.contracted is None or not recipe.format.covers(info):
                    return kernel
                each = [recipe.quantize(kernel[n], info.contracted, of[info.path]) for n, of in enumerate(layers)]
                return jax.tree.map(lambda *x: jnp.stack(x), *each)

            rows.append(row(repr(recipe), jax.tree.map(made, infos, params)))
            file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    print("| recipe | bits of a weight | held-out loss | gap |\n|---|---|---|---|")
    for r in rows:
        gap = r["loss"] - rows[0]["loss"]
        print(f"| `{r['recipe']}` | {32 * r['bytes'] / plain:.2f} | {r['loss']:.4f} | {gap:+.4f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
