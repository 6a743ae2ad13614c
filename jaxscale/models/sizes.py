"""Sizes of a transformer and of its feed-forward layers."""

from __future__ import annotations

import dataclasses

from jaxscale.nn import MixtureOfExperts, NoFeedForward, TimesWider


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A transformer's sizes.

    Args:
      width: width of the residual stream.
      heads: number of query heads.
      kv_heads: number of key heads.
      head_dim: width of a query and key.
      hidden: hidden width of the feed-forward layers.
      value_dim: width of a value.
      rotary_dim: width of the part of queries and keys that rotary positions rotate.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    value_dim: int
    rotary_dim: int


def gated(mlp: object) -> bool:
    """Return whether a feed-forward layer, or each of its experts, has a gate."""
    return getattr(mlp, "gated", False)


def hidden_width(mlp: object, hidden: int) -> int:
    """Return the hidden width of all experts that one token uses."""
    if isinstance(mlp, TimesWider):
        return mlp.times * hidden
    if not isinstance(mlp, MixtureOfExperts):
        return 0 if mlp is NoFeedForward else hidden
    one, shared = mlp.widths(hidden)
    return mlp.top_k * one + shared


def router_width(mlp: object) -> int:
    """Return the width of a router's scores, the number of experts; 0 for a layer without a router."""
    return mlp.experts if isinstance(mlp, MixtureOfExperts) else 0
