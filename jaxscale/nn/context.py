"""`Context`: the inputs that all blocks of a forward pass share."""

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
from pallas_kernels.flash_attention.dropout import threefry

_ATTENTION = 0x61747464  # folded into a layer's key, so that other random numbers of the layer are not these


@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs that all layers share in a forward pass over a batch.

    Args:
      positions: what causal masks and windows compare, int32: the position of each token in its document, or one number
        for all tokens that attend to each other; `None` counts from the start of the row.
      segment_ids: document of each token within the row, int32, 0 for padding; `None` is one document per row.
      rotary: cosine and sine tables by `Rotary`.
      key: random key of this pass, for dropout; `None` is no dropout.
      order: position of each column in the row, int32, if an attention kernel needs columns in another order.
      rows: number of each row in the step's batch, int32, if these are some of its rows; `None` is all, in order.
      cache: the cache of past tokens (a `RunCache`, for one layer a `LayerCache`), or `None` in training.
      shared: what layers of one repeat of a pattern of blocks hand to later ones of it, by name; see `share`.
      layers: number of the model's layers, for statistics of each (see `jaxscale.nn.stats`); `None` has none of these.
      layer: the number of the layer that this context is for, if it is for one.
      inputs: an input of its own for each layer of the model (see `jaxscale.nn.per_layer`), or `None`.
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
    shared: dict[Any, Any] | None = None
    layers: int | None = None
    layer: Int[Array, ""] | int | None = None
    inputs: Float[Array, "b s layers p"] | None = None

    def at(self, layer: Int[Array, ""] | int) -> Context:
        """Return the context for one layer, which has its own number and random key.

        Args:
          layer: the layer's number in the model.
        """
        key = None if self.key is None else jax.random.fold_in(self.key, layer)
        return dataclasses.replace(self, key=key, layer=layer)

    def caching(self, cache: RunCache | LayerCache | None) -> Context:
        """Return the context with another cache.

        Args:
          cache: the cache, or `None`.
        """
        return self if cache is self.cache else dataclasses.replace(self, cache=cache)

    def sharing(self) -> Context:
        """Return the context for one repeat of a pattern of blocks, in which nothing is shared yet."""
        return dataclasses.replace(self, shared={})

    def share(self, name: str, value: Any, **of: int | None) -> None:
        """Hand a value to later layers of the repeat, in place of an earlier one of this name (see `Mixer.gives`).

        Later layers get the latest value, or with `of` that of the latest layer with the same `of`.

        Args:
          name: "memory" or "keys".
          value: for "memory", the output of a recurrence before its gate, (B, S, heads, value_dim); for "keys", keys
            and values, or with a cache the `LayerCache` that holds them.
          **of: what the layer has that others may not have, such as its window.
        """
        if self.shared is not None:
            self.shared[name] = value
            self.shared.update({(name, key, value_of): value for key, value_of in of.items()})

    def tokens(self) -> dict[str, Any]:
        """Return what an attention kernel's mask needs of the tokens, as its arguments `segment_ids` and `positions`.

        Within a document, tokens are in the order of their positions. So columns that are in their natural order say
        the same as positions, and with them a kernel knows before it runs which tiles a causal mask or a window hides.
        """
        said_by_columns = self.segment_ids is not None and self.order is None
        return dict(segment_ids=self.segment_ids, positions=None if said_by_columns else self.positions)

    def drops(self, rate: float, batch: int, heads: int) -> dict[str, Any]:
        """Return an attention kernel's arguments for dropout: nothing without a rate or a key.

        The seeds depend only on the layer's key, on each row's number in the step's batch and on the head.

        Args:
          rate: probability that a weight is dropped.
          batch: number of rows.
          heads: number of query heads.
        """
        if rate == 0.0 or self.key is None:
            return {}
        bits = jax.random.bits(jax.random.fold_in(self.key, _ATTENTION), (2,), jnp.uint32)
        first, second = jax.lax.bitcast_convert_type(bits, jnp.int32)
        rows = jnp.arange(batch, dtype=jnp.int32) if self.rows is None else self.rows.astype(jnp.int32)
        words = jnp.stack(threefry((first, second), rows[:, None], jnp.arange(heads, dtype=jnp.int32)), axis=-1)
        seeds = constrain(jax.lax.bitcast_convert_type(words, jnp.uint32), "batch", "heads", None)
        drops: dict[str, Any] = dict(dropout=rate, dropout_seeds=seeds)
        if self.order is not None:
            drops["dropout_places"] = jnp.broadcast_to(self.order, (batch, *self.order.shape))
        return drops

    def arrays(self) -> tuple[Any, ...]:
        """Return everything that can be traced, as a tree of arrays; the cache is not part of it."""
        return self.positions, self.segment_ids, tuple(self.rotary.values()), self.key, self.rows, self.order

    def holding(self, arrays: tuple[Any, ...]) -> Context:
        """Return the context with other arrays, and without a cache.

        Args:
          arrays: in the form that `arrays()` returns.
        """
        positions, segment_ids, tables, key, rows, order = arrays
        tables = dict(zip(self.rotary, tables, strict=True))
        return Context(positions, segment_ids, tables, key, rows=rows, order=order, layers=self.layers)


def dropout(
    x: Float[Array, "b s e"],
    rate: float,
    key: Array | None,
    rows: Int[Array, " b"] | None = None,
    order: Int[Array, "s"] | None = None,
) -> Float[Array, "b s e"]:
    """Set elements to zero with probability `rate` and scale the others (Srivastava et al. 2014).

    The random bits of a token depend only on the key, its row in the batch, its position in the row and the width, so
    they are the same for every layout and every division into micro-batches.

    Args:
      x: activations.
      rate: the probability.
      key: random key of this sub-layer; `None` is no dropout.
      rows: see `Context`.
      order: see `Context`.
    """
    if key is None or rate == 0.0:
        return x
    b, s, e = x.shape
    # One key per token: drawing in the natural order and reordering would send bits between devices.
    each = jax.vmap(jax.random.fold_in, (None, 0))
    keys = each(key, jnp.arange(b, dtype=jnp.int32) if rows is None else rows)
    keys = jax.vmap(each, (0, None))(keys, jnp.arange(s, dtype=jnp.int32) if order is None else order)
    keep = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, (e,))))(keys)
    keep = constrain(keep, "batch", "residual_seq", "embed")
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
