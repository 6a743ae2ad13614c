"""One device's share of attention: products of its chunks, by the kernel, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.parallel.context.merge import Part, merge, nothing
from jaxscale.parallel.context.order import DIAGONAL, FULL, Chunks, Slot, Visit, visits
from pallas_kernels.flash_attention import flash_attention, gradients


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices that pass arrays on, for use inside `shard_map`.

    Args:
      axes: mesh axes, outermost first.
      size: devices of the ring.
      inner: of every so many neighbours along `axes`, each is in a ring of its own (1: one ring holds all).
    """

    axes: tuple[str, ...]
    size: int
    inner: int = 1

    def index(self) -> Int[Array, ""]:
        """This device's place in its ring."""
        return lax.axis_index(self.axes) // self.inner

    def shift(self, tree: Any, by: int) -> Any:
        """Every array of `tree` to the device `by` places further."""
        pairs = [
            (i * self.inner + j, (i + by) % self.size * self.inner + j)
            for i in range(self.size)
            for j in range(self.inner)
        ]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree) if by % self.size else tree


class Tokens(NamedTuple):
    """The part of a mask that is data, of some tokens: int32 (B, length), or `None`."""

    segments: Int[Array, "b s"] | None = None
    positions: Int[Array, "b s"] | None = None


class Keys(NamedTuple):
    """What travels round a ring of keys."""

    k: Float[Array, "b t kv d"]
    v: Float[Array, "b t kv dv"]
    tokens: Tokens


class Queries(NamedTuple):
    """What attends."""

    q: Float[Array, "b s h d"]
    tokens: Tokens


class Cotangent(NamedTuple):
    """What a query's gradient needs besides: its output's, and its log-sum-exp and sum(out * dout), float32."""

    dout: Float[Array, "b s h dv"]
    lse: Float[Array, "b s h"]
    delta: Float[Array, "b s h"]


class KeyGradients(NamedTuple):
    """Cotangents of keys and values, float32 while they are summed."""

    dk: Float[Array, "b t kv d"]
    dv: Float[Array, "b t kv dv"]


@dataclasses.dataclass(frozen=True)
class Attend:
    """All that is known of an attention before tracing, besides shapes.

    Args:
      causal, window, softcap, scale, deterministic, implementation: those of the kernel.
      each: chunks that a device holds: 2 in zigzag order, else 1.
    """

    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None
    deterministic: bool
    implementation: str | None
    each: int

    @property
    def options(self) -> dict[str, Any]:
        """Of the kernel, whatever the mask."""
        return dict(
            softcap=self.softcap, scale=self.scale, deterministic=self.deterministic, implementation=self.implementation
        )

    def tokens(self, segments: Array | None, positions: Array | None) -> Tokens:
        """As much of the tokens as masks depend on.

        Within a segment, tokens stand in the order of their positions, so of causality these say nothing new; the
        distance that a window asks about they may, and without segments anything is possible.
        """
        needed = self.window is not None or (self.causal and segments is None)
        return Tokens(segments, positions if needed else None)

    def visits(self, ring: int, length: int, tokens: Tokens) -> tuple[Visit, ...]:
        """As `order.visits`, for a device's `length` tokens."""
        in_order = tokens.positions is None or tokens.segments is not None
        chunks = Chunks(ring, self.each, length // self.each)
        return visits(chunks, causal=self.causal, window=self.window, in_order=in_order)

    def forward(self, queries: Queries, keys: Keys, slots: tuple[Slot, ...], device: Array, part: Part | None) -> Part:
        """`part` and what these keys add to it, float32.

        Args:
          queries, keys: a device's, and those of the device that the visit is about.
          slots: of the visit.
          device: place in the ring of the device that owns the queries.
          part: attention to other keys, if any.
        """
        for slot in slots:
            at = _Product(slot, device, self.each)

            def attend(at: _Product = at) -> Part:
                q, k, v = at.q(queries.q), at.k(keys.k), at.k(keys.v)
                out, lse = flash_attention(q, k, v, return_lse=True, **self._told(queries, keys, at))
                return Part(out.astype(jnp.float32), lse)

            if part is None and slot.whole and slot.always:
                part = attend()
                continue

            def add(part: Part, at: _Product = at, attend: Callable[[], Part] = attend) -> Part:
                merged = merge(Part(*(at.q(x) for x in part)), attend())
                return Part(*(at.put_q(x, new) for x, new in zip(part, merged, strict=True)))

            part = at.if_on(add, nothing(queries.q, keys.v.shape[-1]) if part is None else part)
        assert part is not None
        return part

    def backward(
        self, queries: Queries, keys: Keys, given: Cotangent, slots: tuple[Slot, ...], device: Array
    ) -> tuple[Float[Array, "b s h d"], KeyGradients]:
        """What these keys add to the queries' cotangent, and these queries to the keys'; float32.

        Args:
          queries, keys, slots, device: as for `forward`.
          given: of the queries.
        """
        found = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries.q, keys.k, keys.v))
        for slot in slots:
            at = _Product(slot, device, self.each)

            def add(found: tuple[Array, ...], at: _Product = at) -> tuple[Array, ...]:
                dout, lse, delta = (at.q(x) for x in given)
                q, k, v = at.q(queries.q), at.k(keys.k), at.k(keys.v)
                told = self._told(queries, keys, at)
                dq, dk, dv = gradients(q, k, v, jnp.zeros_like(dout), lse, dout, dlse=-delta, **told)
                return (
                    at.put_q(found[0], at.q(found[0]) + dq),
                    at.put_k(found[1], at.k(found[1]) + dk),
                    at.put_k(found[2], at.k(found[2]) + dv),
                )

            found = at.if_on(add, found)
        dq, dk, dv = found
        return dq, KeyGradients(dk, dv)

    def _told(self, queries: Queries, keys: Keys, at: _Product) -> dict[str, Any]:
        """The kernel's options for one product."""
        told = self.options
        mine, theirs = queries.tokens, keys.tokens
        if mine.segments is not None and theirs.segments is not None:
            told["segment_ids"] = at.q(mine.segments), at.k(theirs.segments)
        given = mine.positions is not None and theirs.positions is not None
        # Positions that are given may lie further apart than their indices: a window sees less, if anything.
        if at.slot.mask == FULL and (self.window is None or not given):
            return told
        told |= {"causal": self.causal, "window": self.window}
        if mine.positions is not None and theirs.positions is not None:
            told["positions"] = at.q(mine.positions), at.k(theirs.positions)
        elif at.slot.mask != DIAGONAL:
            b, length = queries.q.shape[0], queries.q.shape[1] // self.each
            place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (b, length))
            told["positions"] = place + at.away * length, place
        return told


class _Product:
    """A slot as one device sees it."""

    def __init__(self, slot: Slot, device: Array, each: int):
        self.slot, self.device = slot, device
        self._pieces = 1 if slot.whole else each
        self._q, self._k, self.away = (self._mine(table) for table in (slot.q, slot.k, slot.away))

    def _mine(self, table: Any) -> Any:
        if isinstance(table, np.ndarray) and (table == table[0]).all():
            return int(table[0])  # known before tracing
        return jnp.asarray(table)[self.device]

    def q(self, x: Array) -> Array:
        """Of the queries' tokens, those concerned."""
        return self._cut(x, self._q)

    def k(self, x: Array) -> Array:
        """Of the keys' tokens, those concerned."""
        return self._cut(x, self._k)

    def put_q(self, x: Array, new: Array) -> Array:
        """`x` with `new` in the place of `q(x)`."""
        return self._put(x, new, self._q)

    def put_k(self, x: Array, new: Array) -> Array:
        """`x` with `new` in the place of `k(x)`."""
        return self._put(x, new, self._k)

    def _cut(self, x: Array, chunk: Any) -> Array:
        length = x.shape[1] // self._pieces
        return x if self._pieces == 1 else lax.dynamic_slice_in_dim(x, chunk * length, length, axis=1)

    def _put(self, x: Array, new: Array, chunk: Any) -> Array:
        return new if self._pieces == 1 else lax.dynamic_update_slice_in_dim(x, new, chunk * new.shape[1], axis=1)

    def if_on(self, work: Callable[[Any], Any], x: Any) -> Any:
        """`work(x)` on devices that have this product. No collective may stand in it: not all devices do."""
        if self.slot.always:
            return work(x)
        return lax.cond(jnp.asarray(self.slot.on)[self.device], work, lambda x: x, x)
