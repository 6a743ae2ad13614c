"""Caches for generation: what layers keep of past tokens, and which sequence each of a step's tokens belongs to.

A step's tokens are arrays (batch, columns), and the batch dimension is sharded over devices. A batch row holds tokens
of one or several sequences, and each sequence has a *slot* of the cache, numbered within its batch row. Decoding,
chunks of prompts and mixtures of both are such steps; the only padding is what fills up a batch row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError
from jaxscale.nn.ring import init_ring, is_ring, mix_in_ring, ring_axes, ring_bytes, ring_pages

State = Any


class Group(NamedTuple):
    """Sequences of a batch row that attend in one call of the kernel, with at most q tokens each.

    Args:
      columns: the column of each token, int32 (batch, sequences, q); at or past the number of columns for padding.
      slots: the cache slot of each sequence, int32 (batch, sequences); `None` is every slot in order.
    """

    columns: Int[Array, "b r q"]
    slots: Int[Array, "b r"] | None = None


class Packed(NamedTuple):
    """The sequence and the position of each token of a step.

    Args:
      slots: the cache slot of each token, within its batch row, int32 (batch, columns); -1 for padding.
      positions: the position of each token in its sequence, int32 (batch, columns); -1 for padding. Earlier positions
        of a slot must have been appended to the cache by earlier steps or by this one.
      groups: how tokens are grouped for attention; every token that is not padding is in exactly one group.
      tables: the pages of each slot, int32 (batch, slots, pages), for caches with pages; else `None`.
    """

    slots: Int[Array, "b s"]
    positions: Int[Array, "b s"]
    groups: tuple[Group, ...]
    tables: Int[Array, "b slots p"] | None = None


class DecodeState(Protocol):
    """What a layer keeps of a sequence between tokens; a mixer's attribute `decode_state`. Hashable."""

    def reusable(self, cache: Cache) -> bool:
        """Return whether sequences that begin alike can share this state, up to the end of a page.

        Args:
          cache: the kind of KV cache.
        """
        ...

    def init(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> State:
        """Return the empty state of a stack of like layers: arrays by name, of shape (layers, batch, ...).

        Args:
          cache: the kind of KV cache.
          layers: the number of layers.
          batch: the number of batch rows.
          slots: sequences of each batch row.
          length: the most tokens of a sequence.
          back: how many tokens a sequence may be rolled back (speculative decoding).
        """
        ...

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """Return the logical axes of one of the arrays; `None` leaves its sharding to the partitioner.

        Args:
          cache: the kind of KV cache.
          name: the array's key in the state.
        """
        ...

    def bytes(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> int:
        """Return the bytes of `init` with the same arguments, over all devices.

        Args:
          cache: the kind of KV cache.
          layers: the number of layers.
          batch: the number of batch rows.
          slots: sequences of each batch row.
          length: the most tokens of a sequence.
          back: how many tokens a sequence may be rolled back.
        """
        ...


class KeyValues(NamedTuple):
    """Keys and values of every token, for attention.

    Args:
      kv_heads: key-value heads.
      key_dim: width of a key.
      value_dim: width of a value.
      dtype: of both.
      shared: values are the first `value_dim` widths of keys, and stored once (multi-head latent attention).
      window: how many latest tokens a query sees; a cache with `ring` then stores no others. `None` is all.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    shared: bool = False
    window: int | None = None

    def reusable(self, cache: Cache) -> bool:
        """See `DecodeState`; a ring has lost the beginning."""
        return self.window is None or getattr(cache, "ring", None) is None

    def init(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> State:
        """See `DecodeState`; `back` needs memory in rings only, since positions past the last token are masked."""
        pages = ring_pages(cache, self.window, length, back)
        if pages is not None:
            return init_ring(cache, self, layers, batch, slots, pages)
        return cache.init(self, layers, batch, slots, length)

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """See `DecodeState`; a single key-value head is replicated."""
        axes = ring_axes(name) or cache.axes
        return tuple(None if a == "kv_heads" and self.kv_heads == 1 else a for a in axes)

    def bytes(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> int:
        """See `DecodeState`."""
        pages = ring_pages(cache, self.window, length, back)
        if pages is not None:
            return ring_bytes(cache, self, layers, batch, slots, pages)
        return cache.bytes(self, layers, batch, slots, length)


class StateArray(NamedTuple):
    """One array of a recurrent state, for one sequence and layer.

    Args:
      name: by which the layer reads and writes it.
      shape: without layers, batch and slots.
      axes: the logical axis of each dimension of `shape`, or `None`.
      dtype: of the array.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = jnp.float32


class RecurrentState(NamedTuple):
    """A state of fixed size after a sequence's last token, for recurrences.

    The states of the last `back + 1` tokens are stored, by position modulo `back + 1`, so that a sequence can be rolled
    back to any of them.

    Args:
      arrays: its arrays, such as `(StateArray("h", (width,), ("mlp",)),)`.
      per_page: with a paged cache, store a state at the end of every page, so that sequences that begin alike share
        them; this takes as many times the memory as a sequence has pages. Without it, sequences that begin alike are
        each computed from the first token.
    """

    arrays: tuple[StateArray, ...]
    per_page: bool = False

    def array(self, name: str) -> StateArray:
        """Return the description of one array.

        Args:
          name: the array's name.
        """
        return next(a for a in self.arrays if a.name == name)

    def reusable(self, cache: Cache) -> bool:
        """See `DecodeState`."""
        return self.per_page and cache.page is not None

    def init(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> State:
        """See `DecodeState`: arrays (layers, batch, slots or pages, back + 1, ...)."""
        leading = layers, batch, self._count(cache, slots, length), back + 1
        return {a.name: jnp.zeros((*leading, *a.shape), a.dtype) for a in self.arrays}

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """See `DecodeState`."""
        return (None, "batch", "pages" if self.reusable(cache) else "cache_rows", None, *self.array(name).axes)

    def bytes(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> int:
        """See `DecodeState`."""
        one = sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in self.arrays)
        return layers * batch * self._count(cache, slots, length) * (back + 1) * one

    def _count(self, cache: Cache, slots: int, length: int) -> int:
        """States of a batch row: one for each page or each slot."""
        return cache.count(slots, length) if self.reusable(cache) else slots

    def index_of(self, cache: Cache, step: Packed, positions: Int[Array, "b s"]) -> Int[Array, "b s"]:
        """Return the page or slot that stores the state after a position of each token's sequence.

        Args:
          cache: the kind of KV cache.
          step: the slot of each token.
          positions: a position for each token, int32 (batch, columns).

        Returns:
          int32 (batch, columns), below the number of pages or slots; -1 where nothing is stored.
        """
        if not self.reusable(cache):
            return jnp.where(positions < 0, -1, step.slots)
        assert step.tables is not None and cache.page is not None
        slot = jnp.where(step.slots < 0, step.tables.shape[1], step.slots)
        page_at = jax.vmap(lambda table, slot, entry: table.at[slot, entry].get(mode="fill", fill_value=-1))
        return jnp.where(positions < 0, -1, page_at(step.tables, slot, positions // cache.page))


class Cache(Protocol):
    """A kind of KV cache. A state holds the keys and values of a stack of like layers, arrays (layers, batch, ...)."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical axes of each array of a state."""
        ...

    @property
    def page(self) -> int | None:
        """Positions in a page; `None` for a cache without pages."""
        ...

    @property
    def ring(self) -> int | None:
        """How many tokens a layer with a window stores besides its window (`jaxscale.nn.ring`); `None`: it stores all.

        As many tokens of a sequence are appended at once, so that more tokens make prompts faster.
        """
        ...

    def in_pages(self) -> Cache:
        """Return a cache with pages for the same numbers, in whose pages rings are stored."""
        ...

    def count(self, slots: int, length: int) -> int:
        """Return the pages of a batch row, or its slots for a cache without pages.

        Args:
          slots: sequences of each batch row.
          length: the most tokens of a sequence.
        """

    def init(self, key_values: KeyValues, layers: int, batch: int, slots: int, length: int) -> State:
        """Return an empty state.

        Args:
          key_values: what is stored of one token by one layer.
          layers: the number of layers.
          batch: the number of batch rows.
          slots: sequences of each batch row.
          length: the most tokens of a sequence.
        """

    def append(
        self,
        state: State,
        layer: Int[Array, ""],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        step: Packed,
    ) -> State:
        """Return the state with a step's keys and values written.

        Args:
          state: the state.
          layer: the layer's index in it, int32 scalar.
          k: keys (batch, columns, kv_heads, key_dim).
          v: values (batch, columns, kv_heads, value_dim).
          step: slot and position of each token.
        """

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
        """Causal attention of each token to the cached positions of its sequence, its own position included.

        Args:
          state: the state, with the step's own keys and values appended.
          layer: the layer's index in it, int32 scalar.
          q: queries (batch, columns, heads, key_dim).
          step: slot and position of each token.
          value_dim: width of a value.
          window: as in `jaxscale.nn.dot_product_attention`, like the next two.
          softcap: likewise.
          scale: likewise.

        Returns:
          outputs (batch, columns, heads, value_dim) in `q`'s dtype, and log-sum-exps (batch, columns, heads), float32.
        """

    def read(
        self, state: State, layer: Int[Array, ""], step: Packed
    ) -> tuple[Float[Array, "b slots t kv d"], Float[Array, "b slots t kv dv"] | None]:
        """Return all keys and values of every slot, by position, for attention that no kernel computes.

        Values that are the first widths of keys (`KeyValues.shared`) are `None`.

        Args:
          state: the state.
          layer: the layer's index in it, int32 scalar.
          step: the pages of each slot, for caches with pages.
        """
        ...

    def bytes(self, key_values: KeyValues, layers: int, batch: int, slots: int, length: int) -> int:
        """Return the bytes of `init` with the same arguments, over all devices.

        Args:
          key_values: what is stored of one token by one layer.
          layers: the number of layers.
          batch: the number of batch rows.
          slots: sequences of each batch row.
          length: the most tokens of a sequence.
        """


@dataclasses.dataclass
class LayerCache:
    """One layer's cache during a call of the layer, which replaces `state` by the new state.

    Attention calls `mix`; a recurrence reads the state `before` its tokens and writes those `after` them, or lets the
    cache `carry` a state that is too large to be had for each token.

    Args:
      cache: the kind of KV cache.
      step: slot and position of each token.
      state: the state of a stack of layers.
      layer: this layer's index in it, int32 scalar.
    """

    cache: Cache
    step: Packed
    state: State
    layer: Int[Array, ""]

    def mix(self, q: Array, k: Array, v: Array, *, return_lse: bool = False, **mask: Any) -> Any:
        """Append keys and values to the cache, and attend to it.

        Args:
          q: queries (batch, columns, heads, key_dim).
          k: keys (batch, columns, kv_heads, key_dim).
          v: values (batch, columns, kv_heads, value_dim).
          return_lse: return the log-sum-exp, too.
          **mask: `window`, `softcap` and `scale` of `Cache.attend`.

        Returns:
          the outputs of `Cache.attend`, or both of its results.
        """
        if is_ring(self.state):
            out, lse, self.state = mix_in_ring(self.cache, self.state, self.layer, q, k, v, self.step, **mask)
        else:
            self.state = self.cache.append(self.state, self.layer, k, v, self.step)
            out, lse = self.cache.attend(self.state, self.layer, q, self.step, value_dim=v.shape[-1], **mask)
        return (out, lse) if return_lse else out

    def mix_by(
        self, q: Any, k: Array, v: Array, run: Callable[[Any, Array, Array, Array], Array]
    ) -> Float[Array, "b s h dv"]:
        """Append keys and values to the cache, and let a function attend to all positions of each sequence.

        It reads the whole reserved length, for attention that no kernel computes.

        Args:
          q: queries (batch, columns, heads, width), or a tree of arrays (batch, columns, ...).
          k: keys (batch, columns, kv_heads, key_dim).
          v: values (batch, columns, kv_heads, value_dim); of shared ones (`KeyValues`) only the width is read.
          run: a function of queries (batch, n, q, ...) of n sequences, their keys and values (batch, n, length, ...),
            and how far each key is before each query, int32 (batch, n, q, length): negative for those after it, and
            for all of padding. It returns outputs (batch, n, q, heads, value_dim).

        Returns:
          the outputs, float32; zero for padding.
        """
        self.state = self.cache.append(self.state, self.layer, k, v, self.step)
        keys, values = self.cache.read(self.state, self.layer, self.step)
        values = keys[..., : v.shape[-1]] if values is None else values
        out, row = None, jnp.arange(k.shape[0])[:, None, None]
        for columns, slots in self.step.groups:
            mine = jax.tree.map(lambda q, at=columns: q.at[row, at].get(mode="fill", fill_value=0), q)
            places = self.step.positions.at[row, columns].get(mode="fill", fill_value=-1)[..., None]
            k, v = (x if slots is None else x[row[..., 0], slots] for x in (keys, values))
            y = run(mine, k, v, places - jnp.arange(keys.shape[2]))
            if out is None:
                out = jnp.zeros((*self.step.positions.shape, *y.shape[3:]), jnp.float32)
            out = out.at[row, columns].set(y, mode="drop")
        assert out is not None
        return out

    def before(self, recurrent: RecurrentState, name: str) -> Float[Array, "b s ..."]:
        """Return the state before each token: zero for the first of a sequence, and for padding.

        Args:
          recurrent: the layer's `decode_state`.
          name: of one of its arrays.
        """
        mine = lax.dynamic_index_in_dim(self.state[name], self.layer, keepdims=False)  # (batch, count, back + 1, ...)
        positions = self.step.positions - 1
        index = recurrent.index_of(self.cache, self.step, positions)
        states = jax.vmap(lambda x, at, i: x[at, i])(mine, jnp.maximum(index, 0), positions % mine.shape[2])
        return jnp.where((index >= 0).reshape(*index.shape, *(1,) * (states.ndim - 2)), states, 0)

    def after(self, recurrent: RecurrentState, name: str, values: Float[Array, "b s ..."]) -> None:
        """Store the states after the last tokens of each sequence, or of each of its pages.

        Args:
          recurrent: the layer's `decode_state`.
          name: of one of its arrays.
          values: the state after each of a step's tokens; ignored for padding.
        """
        mine = lax.dynamic_index_in_dim(self.state[name], self.layer, keepdims=False)
        positions, ring = self.step.positions, mine.shape[2]
        index = recurrent.index_of(self.cache, self.step, positions)
        # A sequence's tokens are in neighbouring columns: the one that overwrites this state is `ring` columns later.
        later = jnp.pad(index[:, ring:], ((0, 0), (0, min(ring, index.shape[1]))), constant_values=-1)
        index = jnp.where((index >= 0) & (index != later), index, mine.shape[1])  # out of range: dropped
        put = jax.vmap(lambda x, at, i, new: x.at[at, i].set(new.astype(x.dtype), mode="drop"))
        mine = put(mine, index, positions % ring, values)
        self.state = {**self.state, name: lax.dynamic_update_index_in_dim(self.state[name], mine, self.layer, 0)}

    def carry(
        self,
        recurrent: RecurrentState,
        name: str,
        tokens: tuple[Array, ...],
        run: Callable[..., tuple[Array, Array]],
    ) -> Float[Array, "b s ..."]:
        """Run a recurrence over the tokens of each sequence, from its state to the state after them.

        It needs one state for each sequence and not, as `before` and `after`, one for each token.

        Args:
          recurrent: the layer's `decode_state`.
          name: of one of its arrays.
          tokens: arrays (batch, columns, ...).
          run: a function of states (n, ...), a mask (n, q), and arrays (n, q, ...) of n sequences' next tokens, of
            which only those in the mask, the first ones of each row, are tokens. It returns outputs (n, q, ...) and
            the states after them.

        Returns:
          outputs (batch, columns, ...); zero for padding.

        Raises:
          ConfigError: the state is stored per page.
        """
        if recurrent.per_page:
            raise ConfigError(
                "a state that the cache carries (matrix_recurrence, convolution) is stored at the end of each sequence "
                "only; set per_page = False in the layer's RecurrentState"
            )
        mine = lax.dynamic_index_in_dim(self.state[name], self.layer, keepdims=False)  # (batch, slots, back + 1, ...)
        rows, columns = self.step.positions.shape
        ring = mine.shape[2]
        pick = jax.vmap(lambda x, at: x[at])
        put = jax.vmap(lambda x, at, new: x.at[at].set(new.astype(x.dtype), mode="drop"))
        put_state = jax.vmap(lambda x, slot, i, new: x.at[slot, i].set(new.astype(x.dtype), mode="drop"))
        out = None
        for group in self.step.groups:
            at = group.columns
            slots = jnp.broadcast_to(jnp.arange(at.shape[1]), at.shape[:2]) if group.slots is None else group.slots
            places = pick(self.step.positions, jnp.minimum(at, columns - 1))
            real = (at < columns) & (places >= 0)
            count = jnp.sum(real, -1)
            held = [pick(x, jnp.minimum(at, columns - 1)) for x in tokens]
            first = places[..., 0]
            state = jax.vmap(lambda x, slot, i: x[slot, i])(mine, slots, (first - 1) % ring)
            state = jnp.where((first > 0).reshape(*first.shape, *(1,) * (state.ndim - 2)), state, 0)

            def flat(x: Array) -> Array:
                return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # a state may be empty: no -1

            # The states after the last tokens are each stored (`back`): those tokens are run one by one.
            singles = min(ring, at.shape[2]) - 1
            early = real & (jnp.arange(at.shape[2]) < count[..., None] - singles)
            y, state = run(flat(state), flat(early), *map(flat, held))
            y = y.reshape(*at.shape, *y.shape[2:])
            if out is None:
                out = jnp.zeros((rows, columns, *y.shape[3:]), y.dtype)
            out = put(out, jnp.where(early, at, columns), y)
            for i in range(singles + 1):
                last = count - singles + i - 1  # the token after which this state is
                if i:
                    token = jnp.maximum(last, 0)[..., None]
                    one = [pick(flat(x), flat(token)) for x in held]
                    y, state = run(state, flat(last >= 0)[:, None], *one)
                    column = jnp.where(last >= 0, jnp.take_along_axis(at, token, -1)[..., 0], columns)
                    out = put(out, column, y.reshape(*last.shape, *y.shape[2:]))
                slot = jnp.where(last >= 0, slots, mine.shape[1])  # out of range: dropped
                mine = put_state(mine, slot, (first + last) % ring, state.reshape(*first.shape, *state.shape[1:]))
        assert out is not None
        self.state = {**self.state, name: lax.dynamic_update_index_in_dim(self.state[name], mine, self.layer, 0)}
        return out


@dataclasses.dataclass
class RunCache:
    """The cache of a run of blocks: a state for each block of its repeating group.

    Args:
      cache: the kind of KV cache.
      step: slot and position of each token.
      states: a state for each block of the group, over all repeats.
    """

    cache: Cache
    step: Packed
    states: tuple[State, ...]

    def layer(self, states: tuple[State, ...], block: int, layer: Int[Array, ""]) -> LayerCache:
        """Return one layer's cache.

        Args:
          states: the current states, as the scan over layers carries them.
          block: the block's index in the group.
          layer: the index of the repeat, int32 scalar.
        """
        return LayerCache(self.cache, self.step, states[block], layer)
