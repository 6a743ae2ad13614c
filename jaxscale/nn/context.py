"""What every block of a model is told besides its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.layout import constrain
from jaxscale.nn.cache import LayerCache, RunCache
from jaxscale.nn.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class Context:
    """One forward pass over a batch: what all layers share, worked out once.

    Args:
      positions: each token's place in its document, int32; `None` counts from the start of the row.
      segment_ids: each token's document within the row, int32, 0 for padding; `None` is one document a row.
      rotary: cosine and sine tables by `Rotary`.
      key: randomness of this pass (dropout), or `None` for none.
      order: each column's natural place in the row, int32, where an attention wants another order than that.
      rows: each row's number in the step's batch, int32, of which these may be some; `None` is all of them in order.
      cache: keys and values of past tokens (a `RunCache`, for one layer a `LayerCache`), or `None` while training.
    """

    positions: Int[Array, "b s"] | None = None
    segment_ids: Int[Array, "b s"] | None = None
    rotary: Mapping[Rotary, tuple[Float[Array, "b s d"], Float[Array, "b s d"]]] = dataclasses.field(
        default_factory=dict
    )
    key: Array | None = None
    order: Int[Array, "s"] | None = None
    rows: Int[Array, " b"] | None = None
    cache: RunCache | LayerCache | None = None

    def at(self, layer: Int[Array, ""] | int) -> Context:
        """The same for one layer, with a key of its own."""
        if self.key is None:
            return self
        return dataclasses.replace(self, key=jax.random.fold_in(self.key, layer))

    def caching(self, cache: RunCache | LayerCache | None) -> Context:
        """The same with that cache."""
        return self if cache is self.cache else dataclasses.replace(self, cache=cache)

    def arrays(self) -> tuple[Any, ...]:
        """Everything here that may be traced, as a tree of arrays."""
        return self.positions, self.segment_ids, tuple(self.rotary.values()), self.key, self.rows, self.order

    def holding(self, arrays: tuple[Any, ...]) -> Context:
        """The same with other arrays, in the form of `arrays()`."""
        positions, segment_ids, tables, key, rows, order = arrays
        tables = dict(zip(self.rotary, tables, strict=True))
        return Context(positions, segment_ids, tables, key, rows=rows, order=order)


def dropout(
    x: Float[Array, "b s e"],
    rate: float,
    key: Array | None,
    rows: Int[Array, " b"] | None = None,
    order: Int[Array, "s"] | None = None,
) -> Float[Array, "b s e"]:
    """Zeroes elements with probability `rate` and scales the rest (Srivastava et al. 2014); no key, no dropout.

    The bits of a token depend on the key, its row's number in the batch, its natural place and the width alone: not on
    the layout, nor on the micro-batches in which the batch is worked off.

    Args:
      x: activations.
      rate: the probability.
      key: of this sub-layer.
      rows, order: as in `Context`.
    """
    if key is None or rate == 0.0:
        return x
    b, s, e = x.shape
    # A key for each token: to draw in the natural order and arrange the bits would move them between devices.
    each = jax.vmap(jax.random.fold_in, (None, 0))
    keys = each(key, jnp.arange(b, dtype=jnp.int32) if rows is None else rows)
    keys = jax.vmap(each, (0, None))(keys, jnp.arange(s, dtype=jnp.int32) if order is None else order)
    keep = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, (e,))))(keys)
    keep = constrain(keep, "batch", "residual_seq", "embed")
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
