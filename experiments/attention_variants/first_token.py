"""How much of attention goes to a row's first token, in the trained runs of the sweep variants.gin.

    python experiments/attention_variants/first_token.py runs/variants

Attends again in plain products, layer by layer, over held-out rows; writes variants.json beside this file, with the
sweep's losses, and prints the README's table.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.models import TransformerConfig
from jaxscale.nn import dot_product_attention
from jaxscale.step.state import describe_model

ROWS, FROM = 64, 8
SETTINGS = ("attention_layer", "attention", "heads", "kv_heads", "head_dim")


@dataclasses.dataclass
class Watched:
    """`dot_product_attention` that also stores the mean weight of the first key, for queries from `FROM` on."""

    shares: list[float]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
        keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = jnp.einsum("bshd,bthd->bhst", q, keys) * scale
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf), axis=-1)
        self.shares.append(float(jnp.mean(weights[:, :, FROM:, 0])))
        return dot_product_attention(q, k, v, **options)


def shares(run: js.Run) -> list[float]:
    """Return the share of each layer: a row is one document here, so that it has one first token."""
    model = run.config.model
    assert isinstance(model, TransformerConfig)
    watched = Watched([])
    graphdef, _ = describe_model(dataclasses.replace(model, attention=watched, scan=False))
    source = run.config.data.source(run.config.tokenizer, seq_len=run.config.seq_len, split="heldout")
    nnx.merge(graphdef, run.params()).hidden(jnp.asarray(source.rows(np.arange(ROWS))["tokens"]))
    return watched.shares


def main(folder: str) -> None:
    """Read the sweep's table and runs."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    with open(pathlib.Path(folder) / "results.csv") as file:
        for row in csv.DictReader(file):
            settings = tuple(row[f"Transformer.{name}"] for name in SETTINGS)
            run = js.load(pathlib.Path(folder) / row["run"])
            softmax = "Sigmoid" not in row["Transformer.attention"]
            groups.setdefault(settings, []).append(
                {
                    "seed": int(row["train.seed"]),
                    "parameters": int(row["parameters"]),
                    "flops": float(row["flops"]),
                    "eval_loss": float(row["eval_loss"]),
                    "first_token": shares(run) if softmax else None,
                }
            )
    results: list[dict[str, Any]] = [
        dict(zip(SETTINGS, settings, strict=True)) | {"runs": runs} for settings, runs in groups.items()
    ]
    (pathlib.Path(__file__).parent / "variants.json").write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        losses = [r["eval_loss"] for r in result["runs"]]
        first = [statistics.fmean(s) for s in zip(*(r["first_token"] or () for r in result["runs"]), strict=True)]
        cells = " | ".join(f"{x:.3f}" for x in (*losses, statistics.fmean(losses)))
        one, name = result["runs"][0], ", ".join(result[setting] for setting in SETTINGS)
        sizes = f"{one['parameters']:,} | {one['flops']:.3g}"
        print(f"| {name} | {sizes} | {cells} | {', '.join(f'{x:.3f}' for x in first)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
