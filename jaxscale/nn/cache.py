"""What layers keep of past tokens, and which of a step's tokens are whose.

A step's tokens stand in *lanes* (the batch dimension, cut over devices); a lane holds the tokens of one or many texts,
each of which has a *row* of the lane's cache. Decoding, chunks of prompts and mixtures of both are such steps, and none
has padding but what fills a lane up.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

State = Any


class Group(NamedTuple):
    """Rows of a lane that attend side by side, with at most q tokens each.

    Args:
      columns: where in its lane each token stands, int32; past the lane's end where there is none.
      rows: the cache row of each, int32; `None` is every row in order.
    """

    columns: Int[Array, "b r q"]
    rows: Int[Array, "b r"] | None = None


class Packed(NamedTuple):
    """Whose the tokens of a step are.

    Args:
      rows: of the cache, within the lane, int32; -1 where a token is padding.
      positions: place of each token in its text, int32, -1 of padding. A row's earlier ones have been appended before.
      groups: every token that is no padding is in one of them.
      tables: the pages of each row, int32, for caches that have pages.
    """

    rows: Int[Array, "b s"]
    positions: Int[Array, "b s"]
    groups: tuple[Group, ...]
    tables: Int[Array, "b rows p"] | None = None


class DecodeState(Protocol):
    """What a layer keeps of a text between tokens; a mixer's attribute `decode_state`. Hashable."""

    def reusable(self, cache: Cache) -> bool:
        """Whether a text that begins like another may go on from what is kept of that one, at the end of a page."""
        ...

    def init(self, cache: Cache, layers: int, lanes: int, rows: int, length: int, back: int) -> State:
        """An empty state of a stack of like layers, arrays by name whose first dimensions are `layers` and `lanes`.

        Args:
          cache: how keys and values are kept.
          layers, lanes, rows: how many, the rows of each lane.
          length: the most tokens of a row.
          back: a row may go on from as many tokens before its last one (speculation).
        """
        ...

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """The logical axes of one of its arrays; `None` where it does not say."""
        ...

    def bytes(self, cache: Cache, layers: int, lanes: int, rows: int, length: int, back: int) -> int:
        """What `init` of the same arguments takes, over all devices."""
        ...


class KeyValues(NamedTuple):
    """Keys and values of every token, for attention.

    Args:
      kv_heads: key heads.
      key_dim, value_dim: widths of a key and a value.
      dtype: of both.
      shared: values are the first widths of keys, and kept once.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    shared: bool = False

    def reusable(self, cache: Cache) -> bool:
        """See `DecodeState`."""
        return True

    def init(self, cache: Cache, layers: int, lanes: int, rows: int, length: int, back: int) -> State:
        """See `DecodeState`; whatever lies behind a row's last token is not looked at."""
        return cache.init(self, layers, lanes, rows, length)

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """See `DecodeState`; a single key head is whole everywhere."""
        return tuple(None if a == "kv_heads" and self.kv_heads == 1 else a for a in cache.axes)

    def bytes(self, cache: Cache, layers: int, lanes: int, rows: int, length: int, back: int) -> int:
        """See `DecodeState`."""
        return cache.bytes(self, layers, lanes, rows, length)


class StateArray(NamedTuple):
    """One array of a recurrent state, of one text and layer.

    Args:
      name: by which the layer reads and writes it.
      shape: its sizes.
      axes: a logical axis for each dimension, or `None`.
      dtype: of it.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = jnp.float32


class RecurrentState(NamedTuple):
    """A state of fixed size after a text's last token, for recurrences.

    It is kept for the last `back + 1` tokens, by their positions, so that a row may go on from any of them.

    Args:
      arrays: what it is made of, such as `(StateArray("h", (width,), ("mlp",)),)`.
      per_page: with a paged cache, keep one at the end of every page, so that texts that begin alike share it: as many
        times the memory as a row has pages. Else such texts are computed from their first token on.
    """

    arrays: tuple[StateArray, ...]
    per_page: bool = False

    def array(self, name: str) -> StateArray:
        """One of them."""
        return next(a for a in self.arrays if a.name == name)

    def reusable(self, cache: Cache) -> bool:
        """See `DecodeState`."""
        return self.per_page and cache.page is not None

    def init(self, cache: Cache, layers: int, lanes: int, rows: int, length: int, back: int) -> State:
        """See `DecodeState`: arrays (layers, lanes, rows or pages, back + 1, ...)."""
        leading = layers, lanes, self._places(cache, rows, length), back + 1
        return {a.name: jnp.zeros((*leading, *a.shape), a.dtype) for a in self.arrays}

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """See `DecodeState`."""
        return (None, "batch", "pages" if self.reusable(cache) else "cache_rows", None, *self.array(name).axes)

    def bytes(self, cache: Cache, layers: int, lanes: int, rows: int, length: int, back: int) -> int:
        """See `DecodeState`."""
        one = sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in self.arrays)
        return layers * lanes * self._places(cache, rows, length) * (back + 1) * one

    def _places(self, cache: Cache, rows: int, length: int) -> int:
        """How many states a lane keeps."""
        return cache.count(rows, length) if self.reusable(cache) else rows

    def place(self, cache: Cache, step: Packed, positions: Int[Array, "b s"]) -> Int[Array, "b s"]:
        """Where the states after these positions of each token's row are kept, of `_places`; -1 where nowhere."""
        if not self.reusable(cache):
            return jnp.where(positions < 0, -1, step.rows)
        assert step.tables is not None and cache.page is not None
        row = jnp.where(step.rows < 0, step.tables.shape[1], step.rows)
        which = jax.vmap(lambda table, row, entry: table.at[row, entry].get(mode="fill", fill_value=-1))
        return jnp.where(positions < 0, -1, which(step.tables, row, positions // cache.page))


class Cache(Protocol):
    """How keys and values are kept. A state is of a stack of like layers: arrays whose first dimension is `layers`.

    page: positions in a page; `None` where rows have no pages.
    axes: logical axes of each array of a state.
    """

    @property
    def axes(self) -> tuple[str | None, ...]: ...

    @property
    def page(self) -> int | None: ...

    def count(self, rows: int, length: int) -> int:
        """Pages of a lane, or its rows where they have no pages; arguments as those of `init`."""

    def init(self, kept: KeyValues, layers: int, lanes: int, rows: int, length: int) -> State:
        """An empty one.

        Args:
          kept: of one token and layer.
          layers, lanes, rows: how many, the rows of each lane.
          length: the most tokens of a row.
        """

    def append(
        self,
        state: State,
        layer: Int[Array, ""],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        step: Packed,
    ) -> State:
        """With a step's keys and values."""

    def attend(
        self,
        state: State,
        layer: Int[Array, ""],
        q: Float[Array, "b s h d"],
        step: Packed,
        *,
        value_dim: int,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"]]:
        """Causal attention of each token to its row, itself included: output in `q`'s dtype, log-sum-exp in float32.

        Args:
          value_dim: width of a value.
          window, softcap, scale: as in `jaxscale.nn.dot_product_attention`.
        """

    def bytes(self, kept: KeyValues, layers: int, lanes: int, rows: int, length: int) -> int:
        """What `init` of the same arguments takes, over all devices."""


@dataclasses.dataclass
class LayerCache:
    """A layer's cache while the layer is called, which leaves the new state behind.

    Attention calls `mix`; a recurrence asks for the state `before` its tokens, and hands in those `after` them.
    """

    how: Cache
    step: Packed
    state: State
    layer: Int[Array, ""]

    def mix(self, q: Array, k: Array, v: Array, **mask: Any) -> Float[Array, "b s h dv"]:
        """Appends keys and values, and attends."""
        self.state = self.how.append(self.state, self.layer, k, v, self.step)
        return self.how.attend(self.state, self.layer, q, self.step, value_dim=v.shape[-1], **mask)[0]

    def before(self, kept: RecurrentState, name: str) -> Float[Array, "b s ..."]:
        """The state of each token's text after the token before it: zero where it is the text's first, or padding.

        Args:
          kept: the layer's `decode_state`.
          name: of one of its arrays.
        """
        mine = lax.dynamic_index_in_dim(self.state[name], self.layer, keepdims=False)  # (lanes, places, back + 1, ...)
        positions = self.step.positions - 1
        place = kept.place(self.how, self.step, positions)
        found = jax.vmap(lambda x, at, slot: x[at, slot])(mine, jnp.maximum(place, 0), positions % mine.shape[2])
        return jnp.where((place >= 0).reshape(*place.shape, *(1,) * (found.ndim - 2)), found, 0)

    def after(self, kept: RecurrentState, name: str, values: Float[Array, "b s ..."]) -> None:
        """Keeps the states after the last tokens of each row, or of each of its pages.

        Args:
          kept, name: as for `before`.
          values: the state after each of a step's tokens; of padding, anything.
        """
        mine = lax.dynamic_index_in_dim(self.state[name], self.layer, keepdims=False)
        positions, slots = self.step.positions, mine.shape[2]
        place = kept.place(self.how, self.step, positions)
        # a row's tokens stand side by side, so that the one that takes this one's slot is `slots` columns behind
        later = jnp.pad(place[:, slots:], ((0, 0), (0, min(slots, place.shape[1]))), constant_values=-1)
        place = jnp.where((place >= 0) & (place != later), place, mine.shape[1])  # out of it, so that it is dropped
        put = jax.vmap(lambda x, at, slot, new: x.at[at, slot].set(new.astype(x.dtype), mode="drop"))
        mine = put(mine, place, positions % slots, values)
        self.state = {**self.state, name: lax.dynamic_update_index_in_dim(self.state[name], mine, self.layer, 0)}


@dataclasses.dataclass
class RunCache:
    """That of a run's layers: a state for each block of its group."""

    how: Cache
    step: Packed
    states: tuple[State, ...]

    def layer(self, states: tuple[State, ...], block: int, layer: Int[Array, ""]) -> LayerCache:
        """One layer's, of states on their way."""
        return LayerCache(self.how, self.step, states[block], layer)
