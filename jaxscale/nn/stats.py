"""Statistics of a forward pass that layers return beside their output: float32 scalars by name; most layers have none.

A block returns them, a run of blocks sums them over its layers, and a model over its runs, so a pipeline stage has the
sum of its own layers. "loss" is what the layers add to the training loss; "layers" counts the layers with statistics;
the others are meaningful as an average over those layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Stats = dict[str, Float[Array, ""]]


def total(parts: Iterable[Stats]) -> Stats:
    """Sum statistics by name."""
    out: Stats = {}
    for part in parts:
        out |= {k: out[k] + v if k in out else v for k, v in part.items()}
    return out


def none_of(stats: Stats) -> Stats:
    """Return zeros by the same names: the statistics of a layer that is skipped."""
    return jax.tree.map(jnp.zeros_like, stats)


def over_layers(stacked: dict[str, Float[Array, " l"]]) -> Stats:
    """Sum the statistics that a scan returned for each layer."""
    return jax.tree.map(lambda v: jnp.sum(v, axis=0), stacked)


def auxiliary_loss(stats: Stats) -> Float[Array, ""]:
    """Return what the layers add to the training loss.

    Args:
      stats: the model's statistics.
    """
    return stats.get("loss", jnp.zeros([], jnp.float32))


def metrics(stats: Stats) -> dict[str, Float[Array, ""]]:
    """Return averages over the layers with statistics, by metric name (`moe_load_balance`).

    Args:
      stats: the model's statistics.
    """
    return {f"moe_{k}": v / stats["layers"] for k, v in stats.items() if k not in ("loss", "layers")}
