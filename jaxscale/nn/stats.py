"""Statistics of a forward pass that layers return beside their output: float32 scalars by name; most layers have none.

A mixer or feed-forward layer that reports has an attribute `reports`, the prefix of its numbers' names in the training
log ("moe"), and returns its output and statistics: "loss" is what it adds to the training loss, "layers" is 1, the
others are meaningful as an average over the layers with that prefix. All are means over the tokens that are not
padding, on all devices. A block returns those of its two sub-layers, a run of blocks sums them over its layers, and a
model over its runs, so a pipeline stage has the sum of its own layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Stats = dict[str, Float[Array, ""]]


def reports(layer: nnx.Module) -> str | None:
    """Return the prefix of the names of a layer's statistics; `None` for a layer that returns its output alone.

    Args:
      layer: a mixer or a feed-forward layer.
    """
    return getattr(layer, "reports", None)


def of_layer(layer: nnx.Module, stats: Stats) -> Stats:
    """Return what a layer reports by names that tell its numbers from those of other kinds of layers: "moe/dropped".

    Args:
      layer: the layer.
      stats: what it returned.
    """
    return {k if k == "loss" else f"{reports(layer)}/{k}": v for k, v in stats.items()}


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
    """Return averages over the layers of a kind, by metric name (`moe_load_balance`).

    Args:
      stats: the model's statistics.
    """
    named = {k: k.split("/") for k in stats if k != "loss"}
    return {f"{of}_{name}": stats[k] / stats[f"{of}/layers"] for k, (of, name) in named.items() if name != "layers"}
