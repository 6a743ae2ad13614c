"""Blocks of a single sub-layer: the values of `Block.mixer` and `Block.mlp` that leave the other one out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.cache import RecurrentState
from jaxscale.nn.context import Context
from jaxscale.nn.mixer import Mixer
from jaxscale.nn.mlp import FeedForward


class _AddsNothing(nnx.Module):
    """In a mixer's place: adds zeros to the residual stream, and stores nothing of a sequence."""

    def __init__(self) -> None:
        self.decode_state = RecurrentState((), per_page=True)

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        return jnp.zeros_like(x)


@register
@dataclasses.dataclass(frozen=True)
class NoMixer(Mixer):
    """A block without a mixer and its norms: the feed-forward layer alone, as in Nemotron-H (NVIDIA 2025)."""

    widens = True
    any_order = True

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        if config.parallel:
            raise ConfigError(
                "NoMixer() leaves out a block's first sub-layer, and with Transformer.parallel = True both are one; "
                "set Transformer.parallel = False"
            )
        if any(b.mixer == self and b.mlp is NoFeedForward for b in config.blocks):
            raise ConfigError(
                "a block of Transformer.blocks has NoMixer() and NoFeedForward, and does nothing; remove it, or set "
                "its mixer or mlp"
            )

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        return {}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `Mixer`."""
        return _AddsNothing()


@register
class NoFeedForward(FeedForward):
    """A block without a feed-forward layer and its norms: the mixer alone; arguments as `FeedForward`."""

    def __init__(self, width: int, hidden: int, **options: Any):
        self.overlap = False

    def __call__(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        """Return zeros."""
        return jnp.zeros_like(x)
