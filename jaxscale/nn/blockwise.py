"""Blockwise quantisation of all operations of a layer (BCT): attention, feed-forward, norms; weights are a recipe's.

Every operation reads and writes integers with a power of two for each block of consecutive numbers of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.dense_weights import ChangedWeights
from jaxscale.nn.mlp import FeedForward, SwiGLU
from jaxscale.nn.norms import RMSNorm


def round_blocks(x: Float[Array, "... n"], bits: int, size: int) -> Float[Array, "... n"]:
    """Round the last dimension to integers with a power of two for each block; gradients pass straight through.

    The power of two is the smallest by which no number of the block is clipped. The last block may be shorter.

    Args:
      x: an array of any float dtype.
      bits: of an integer, which is symmetric around 0.
      size: consecutive numbers that share a power of two.

    Returns:
      the rounded numbers, in the dtype and shape of `x`.
    """
    n, top = x.shape[-1], 2 ** (bits - 1) - 1
    blocks = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -n % size)])
    blocks = blocks.reshape(*x.shape[:-1], -1, size)
    part, power = jnp.frexp(jnp.max(jnp.abs(blocks), -1, keepdims=True) / top)
    scale = jnp.ldexp(jnp.float32(1), jnp.where(part == 0.5, power - 1, power))
    rounded = jnp.clip(jnp.round(blocks / scale), -top, top) * scale
    rounded = rounded.reshape(*x.shape[:-1], -1)[..., :n].astype(x.dtype)
    return x + jax.lax.stop_gradient(rounded - x)


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """The integers of an operation that is quantised by blocks.

    Args:
      bits: of an integer, 2 to 8.
      size: consecutive numbers of a token that share a power of two.

    Raises:
      ConfigError: a setting out of its range.
    """

    bits: int = 8
    size: int = 32

    def __post_init__(self) -> None:
        for name, low, high in (("bits", 2, 8), ("size", 1, 2**31)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                choice = "from 2 to 8" if name == "bits" else "of at least 1"
                raise ConfigError(f"{type(self).__name__}.{name} = {value!r}: must be a whole number {choice}")

    def rounded(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Return `round_blocks` of an array."""
        return round_blocks(x, self.bits, self.size)


@register
@dataclasses.dataclass(frozen=True)
class BlockwiseAttention(Blockwise, ChangedWeights):
    """Attention with queries, keys, values, softmax and result quantised by blocks (Dong et al. 2023, BCT).

    The blocks of the softmax are consecutive keys of a row, so that a document in the middle of a row is rounded in
    other blocks than at its start. KV caches do not compute it.

    Args:
      bits: see `Blockwise`.
      size: see `Blockwise`.
    """

    def change(self, weights: Float[Array, "... t"]) -> Float[Array, "... t"]:
        """See `ChangedWeights`."""
        return self.rounded(weights)

    def __call__(
        self, q: Float[Array, "b s h d"], k: Float[Array, "b t kv d"], v: Float[Array, "b t kv dv"], **mask: Any
    ) -> Float[Array, "b s h dv"]:
        """Compute attention; see `jaxscale.nn.dot_product_attention` for the arguments."""
        return self.rounded(super().__call__(self.rounded(q), self.rounded(k), self.rounded(v), **mask))


@register
@dataclasses.dataclass(frozen=True)
class BlockwiseFeedForward(Blockwise):
    """A feed-forward layer whose activation function reads and writes numbers that are quantised by blocks (BCT).

    Args:
      bits: see `Blockwise`.
      size: see `Blockwise`.
      layer: the feed-forward layer, such as `GELU` or `SwiGLU`.

    Raises:
      ConfigError: `layer` is no `FeedForward`, or a setting is out of its range.
    """

    layer: type[FeedForward] = SwiGLU

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.layer, type) and issubclass(self.layer, FeedForward)):
            raise ConfigError(
                f"BlockwiseFeedForward.layer = {self.layer!r}: must be a dense feed-forward layer, such as @SwiGLU"
            )

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate."""
        return self.layer.gated

    def __call__(self, width: int, hidden: int, **options: Any) -> FeedForward:
        """Make the layer; see `FeedForward` for the arguments."""
        return _feed_forward(self)(width, hidden, **options)


@functools.cache
def _feed_forward(value: BlockwiseFeedForward) -> type[FeedForward]:
    """The layer's class with rounding; cached, because a program is compiled again for another class."""
    layer, rounded = value.layer, value.rounded

    class Rounded(layer):  # type: ignore[misc, valid-type]
        @staticmethod
        def activation(x: Array) -> Array:
            return rounded(layer.activation(rounded(x)))

        @classmethod
        def combine(cls, gate: Array, up: Array) -> Array:
            return rounded(layer.combine(rounded(gate), rounded(up)))

    Rounded.__name__ = Rounded.__qualname__ = f"Blockwise{layer.__name__}"
    return Rounded


@register
@dataclasses.dataclass(frozen=True)
class BlockwiseNorm(Blockwise):
    """A norm that reads and writes numbers which are quantised by blocks (BCT).

    Args:
      bits: see `Blockwise`.
      size: see `Blockwise`.
      norm: the norm, such as `RMSNorm` or `LayerNorm`.
    """

    norm: Callable[..., nnx.Module] = RMSNorm

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.norm, type) and issubclass(self.norm, nnx.Module)):
            raise ConfigError(f"BlockwiseNorm.norm = {self.norm!r}: must be a norm, such as @RMSNorm")

    def __call__(self, width: int, **options: Any) -> nnx.Module:
        """Make the norm; see `RMSNorm` for the arguments."""
        return _norm(self)(width, **options)


@functools.cache
def _norm(value: BlockwiseNorm) -> Callable[..., nnx.Module]:
    norm: Any = value.norm

    class Rounded(norm):
        def __call__(self, x: Array) -> Array:
            return value.rounded(super().__call__(value.rounded(x)))

    Rounded.__name__ = Rounded.__qualname__ = f"Blockwise{norm.__name__}"
    return Rounded
