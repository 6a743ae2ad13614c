"""What layers report of a forward pass besides their output: float32 scalars by name, an empty dict for most.

A block returns them, a run sums them over its layers, a model over its runs; so a slice of the layers has the sum of
its own, and the sum of those is the model's. "loss" is what the layers add to the training loss; "layers" counts those
that report; the rest means something as an average over them.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Stats = dict[str, Float[Array, ""]]


def total(parts: Iterable[Stats]) -> Stats:
    """The sum by name."""
    out: Stats = {}
    for part in parts:
        out |= {k: out[k] + v if k in out else v for k, v in part.items()}
    return out


def none_of(stats: Stats) -> Stats:
    """Zeros by those names: what a layer that is passed over reports."""
    return jax.tree.map(jnp.zeros_like, stats)


def over_layers(stacked: dict[str, Float[Array, " l"]]) -> Stats:
    """The sum of what a scan returned of each layer."""
    return jax.tree.map(lambda v: jnp.sum(v, axis=0), stacked)


def auxiliary_loss(stats: Stats) -> Float[Array, ""]:
    """What the layers add to the training loss."""
    return stats.get("loss", jnp.zeros([], jnp.float32))


def metrics(stats: Stats) -> dict[str, Float[Array, ""]]:
    """Averages over the layers that report, as training's metrics are called."""
    return {f"moe_{k}": v / stats["layers"] for k, v in stats.items() if k not in ("loss", "layers")}
