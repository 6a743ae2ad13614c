"""Statistics of a forward pass that layers return beside their output: float32 by name; most layers have none.

A mixer or feed-forward layer that reports has an attribute `reports`, the prefix of its numbers' names in the training
log ("moe"), and returns its output and statistics: "loss" is what it adds to the training loss, "layers" is 1, the
others are meaningful as an average over the layers with that prefix. All are means over the tokens that are not
padding, on all devices. A block returns those of its two sub-layers, a run of blocks sums them over its layers, and a
model over its runs, so a pipeline stage has the sum of its own layers.

A statistic whose name begins with `BY_LAYER` is not a scalar but a vector of sums over tokens. A block makes it a row
of a matrix of all layers in which the other rows are 0, so that the sums above have a row for each layer. Such a matrix
is stored flat, since pipelines take arrays of three dimensions between stages for the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError

Stats = dict[str, Float[Array, "..."]]

BY_LAYER = "by_layer/"
"""Beginning of the names of statistics that have a row for each layer."""

TABLES = "jaxscale.by_layer"
"""Key of a step's metrics under which the statistics by layer are, a dict of float32 (layers, n) by name."""


def reports(layer: nnx.Module) -> str | None:
    """Return the prefix of the names of a layer's statistics; `None` for a layer that returns its output alone.

    Args:
      layer: a mixer or a feed-forward layer.
    """
    return getattr(layer, "reports", None)


def of_layer(
    layer: nnx.Module, stats: Stats, number: Int[Array, ""] | int | None = None, layers: int | None = None
) -> Stats:
    """Return what a layer reports by names that tell its numbers from those of other kinds of layers: "moe/dropped".

    Each vector of `BY_LAYER` becomes a row of a matrix of zeros, flat, whose name ends with the length of a row.

    Args:
      layer: the layer.
      stats: what it returned.
      number: the number of its block in the model.
      layers: the model's number of blocks; `None` drops the vectors.

    Raises:
      ConfigError: the layer's `reports` is not a prefix, or numbers come without "layers".
    """
    prefix, name, out = reports(layer), type(layer).__name__, {}
    numbers = [key for key in stats if key != "loss" and not key.startswith(BY_LAYER)]
    if numbers and not isinstance(prefix, str):
        raise ConfigError(f"{name}.reports = {prefix!r}: must be text that its numbers' names in the log begin with")
    if numbers and "layers" not in numbers:
        raise ConfigError(f"{name} reports '{numbers[0]}' without 'layers'; also report \"layers\": jnp.ones([])")
    for name, value in stats.items():
        if not name.startswith(BY_LAYER):
            out[name if name == "loss" else f"{prefix}/{name}"] = value
        elif number is not None and layers is not None:
            here = jnp.arange(layers) == number
            out[f"{name}/{value.size}"] = jnp.where(here[:, None], value, 0.0).reshape(-1)
    return out


def total(parts: Iterable[Stats]) -> Stats:
    """Sum statistics by name."""
    out: Stats = {}
    for part in parts:
        out |= {k: out[k] + v if k in out else v for k, v in part.items()}
    return out


def none_of(stats: Stats) -> Stats:
    """Return zeros by the same names: the statistics of a layer that is skipped."""
    return jax.tree.map(jnp.zeros_like, stats)


def over_layers(stacked: dict[str, Float[Array, "l ..."]]) -> Stats:
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
    named = {k: k.split("/") for k in stats if k != "loss" and not k.startswith(BY_LAYER)}
    return {f"{of}_{name}": stats[k] / stats[f"{of}/layers"] for k, (of, name) in named.items() if name != "layers"}


def tables(terms: Mapping[str, Any]) -> dict[str, dict[str, Float[Array, "l n"]]]:
    """Return the statistics by layer as an entry of a step's metrics; none if there are none.

    Args:
      terms: an objective's terms, summed over the batch, with the model's statistics as "stats".
    """
    stats = terms.get("stats")
    if not isinstance(stats, Mapping):  # an objective's own
        return {}
    matrices = {}
    for key, value in stats.items():
        if key.startswith(BY_LAYER):
            name, _, length = key.removeprefix(BY_LAYER).rpartition("/")
            matrices[name] = value.reshape(-1, int(length))
    return {TABLES: matrices} if matrices else {}
