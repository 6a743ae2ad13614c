"""One device's part of context-parallel attention: kernel calls on its chunks, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxscale.layout.tensors import Tree
from jaxscale.parallel.context.merge import Part, merge, nothing
from jaxscale.parallel.context.order import DIAGONAL, FULL, Chunks, Slot, Visit, visits
from pallas_kernels.flash_attention import flash_attention, gradients


@dataclasses.dataclass(frozen=True)
class Ring:
    """Devices that send arrays to the next one, for use inside `shard_map`.

    Args:
      axes: mesh axes, outermost first.
      size: devices of a ring.
      inner: number of interleaved rings: each of `inner` neighbours along `axes` is in another ring. 1 is one ring.
    """

    axes: tuple[str, ...]
    size: int
    inner: int = 1

    def index(self) -> Int[Array, ""]:
        """Return this device's place in its ring."""
        return lax.axis_index(self.axes) // self.inner

    def shift(self, tree: Tree, by: int) -> Tree:
        """Send every array of `tree` to the device that is `by` places ahead."""
        pairs = [
            (i * self.inner + j, (i + by) % self.size * self.inner + j)
            for i in range(self.size)
            for j in range(self.inner)
        ]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree) if by % self.size else tree


class Tokens(NamedTuple):
    """Segment ids and positions of some tokens, for the mask, and what dropout needs of them.

    Args:
      segments: int32 (B, length), or `None`.
      positions: int32 (B, length), or `None`.
      places: int32 (B, length), the place of each token in the whole row, for dropout, or `None`.
      seeds: uint32 (B, H, 2), of these queries' heads, for dropout; `None` for keys or without dropout.
    """

    segments: Int[Array, "b s"] | None = None
    positions: Int[Array, "b s"] | None = None
    places: Int[Array, "b s"] | None = None
    seeds: UInt32[Array, "b h 2"] | None = None

    def of_keys(self) -> Tokens:
        """Return these tokens as keys, which need no seeds."""
        return self._replace(seeds=None)


class Keys(NamedTuple):
    """Keys, values and their tokens."""

    k: Float[Array, "b t kv d"]
    v: Float[Array, "b t kv dv"]
    tokens: Tokens


class Queries(NamedTuple):
    """Queries and their tokens."""

    q: Float[Array, "b s h d"]
    tokens: Tokens


class Cotangent(NamedTuple):
    """Inputs of the backward pass: the output's cotangent, the float32 log-sum-exp, and sum(out * dout), float32."""

    dout: Float[Array, "b s h dv"]
    lse: Float[Array, "b s h"]
    delta: Float[Array, "b s h"]


class KeyGradients(NamedTuple):
    """Cotangents of keys and values, which are summed in float32."""

    dk: Float[Array, "b t kv d"]
    dv: Float[Array, "b t kv dv"]


@dataclasses.dataclass(frozen=True)
class Attend:
    """Static settings of context-parallel attention.

    Args:
      causal: see `pallas_kernels.flash_attention.flash_attention`, as for the arguments below.
      window: latest positions that a query attends to, or `None`.
      softcap: soft cap on the scores, or `None`.
      scale: factor on the scores, or `None`.
      deterministic: see `flash_attention`.
      implementation: see `flash_attention`.
      each: chunks per device: 2 in zigzag order, else 1.
      return_lse: return the output in q's dtype, and its log-sum-exp.
      dropout: probability that a weight is dropped.
    """

    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None
    deterministic: bool
    implementation: str | None
    each: int
    return_lse: bool = False
    dropout: float = 0.0

    def result(self, part: Part) -> Any:
        """Return what the attention returns: the output, or with `return_lse` also the log-sum-exp."""
        return tuple(part) if self.return_lse else part.out

    @property
    def options(self) -> dict[str, Any]:
        """The kernel's options other than the mask."""
        return dict(
            softcap=self.softcap, scale=self.scale, deterministic=self.deterministic, implementation=self.implementation
        )

    def tokens(
        self,
        segments: Array | None,
        positions: Array | None,
        places: Array | None = None,
        seeds: Array | None = None,
    ) -> Tokens:
        """Return the segment ids and positions that the mask depends on, and what dropout needs.

        Within a segment, tokens are in the order of their positions, so the causal mask does not need positions. A
        window does, since it depends on distances. Without segments, positions can be in any order.

        Args:
          segments: int32 (B, length), or `None`.
          positions: int32 (B, length), or `None`.
          places: see `Tokens`.
          seeds: see `Tokens`.
        """
        needed = self.window is not None or (self.causal and segments is None)
        return Tokens(segments, positions if needed else None, places, seeds)

    def visits(self, ring: int, length: int, tokens: Tokens) -> tuple[Visit, ...]:
        """Return `jaxscale.parallel.context.visits` for `length` tokens per device.

        Args:
          ring: devices of the ring.
          length: tokens per device.
          tokens: from `Attend.tokens`.
        """
        in_order = tokens.positions is None or tokens.segments is not None
        chunks = Chunks(ring, self.each, length // self.each)
        return visits(chunks, causal=self.causal, window=self.window, in_order=in_order)

    def forward(self, queries: Queries, keys: Keys, slots: tuple[Slot, ...], device: Array, part: Part | None) -> Part:
        """Attend to a device's keys, and merge the result with `part`; float32.

        Args:
          queries: the queries of a device.
          keys: the keys that the visit is about.
          slots: the slots of the visit.
          device: place in the ring of the device that owns the queries.
          part: attention to other keys, or `None`.
        """
        for slot in slots:
            at = _Product(slot, device, self.each)

            def attend(at: _Product = at) -> Part:
                q, k, v = at.q(queries.q), at.k(keys.k), at.k(keys.v)
                out, lse = flash_attention(q, k, v, return_lse=True, **self._kernel_options(queries, keys, at))
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
        self,
        queries: Queries,
        keys: Keys,
        cotangent: Cotangent,
        slots: tuple[Slot, ...],
        device: Array,
        *,
        dq: Float[Array, "b s h d"] | None = None,
        dkeys: KeyGradients | None = None,
    ) -> tuple[Float[Array, "b s h d"], KeyGradients]:
        """Return the terms of the queries' and keys' cotangents from products of these queries and keys; float32.

        Terms so far, `dq` or `dkeys`, are added to in place, so that no second array of that size exists.

        Args:
          queries: see `forward`.
          keys: see `forward`.
          cotangent: the cotangents of the queries' outputs.
          slots: see `forward`.
          device: see `forward`.
          dq: terms so far of the queries' cotangents, float32; `None` is zero.
          dkeys: terms so far of the keys' cotangents; `None` is zero.
        """
        so_far, arrays = (dq, *(dkeys or (None, None))), (queries.q, keys.k, keys.v)
        sums = tuple(
            jnp.zeros(x.shape, jnp.float32) if one is None else one for one, x in zip(so_far, arrays, strict=True)
        )
        for slot in slots:
            at = _Product(slot, device, self.each)

            def add(sums: tuple[Array, ...], at: _Product = at) -> tuple[Array, ...]:
                dout, lse, delta = (at.q(x) for x in cotangent)
                q, k, v = at.q(queries.q), at.k(keys.k), at.k(keys.v)
                options = self._kernel_options(queries, keys, at)
                dq, dk, dv = gradients(q, k, v, jnp.zeros_like(dout), lse, dout, dlse=-delta, **options)
                return (
                    at.put_q(sums[0], at.q(sums[0]) + dq),
                    at.put_k(sums[1], at.k(sums[1]) + dk),
                    at.put_k(sums[2], at.k(sums[2]) + dv),
                )

            sums = at.if_on(add, sums)
        dq, dk, dv = sums
        return dq, KeyGradients(dk, dv)

    def _kernel_options(self, queries: Queries, keys: Keys, at: _Product) -> dict[str, Any]:
        """Return the kernel's options for one product."""
        options = self.options
        mine, theirs = queries.tokens, keys.tokens
        if mine.segments is not None and theirs.segments is not None:
            options["segment_ids"] = at.q(mine.segments), at.k(theirs.segments)
        if mine.places is not None and theirs.places is not None:
            places = at.q(mine.places), at.k(theirs.places)
            options |= {"dropout": self.dropout, "dropout_seeds": mine.seeds, "dropout_places": places}
        has_positions = mine.positions is not None and theirs.positions is not None
        # Positions can be further apart than columns, so that a window can mask more than the slot's mask.
        if at.slot.mask == FULL and (self.window is None or not has_positions):
            return options
        options |= {"causal": self.causal, "window": self.window}
        if mine.positions is not None and theirs.positions is not None:
            options["positions"] = at.q(mine.positions), at.k(theirs.positions)
        elif at.slot.mask != DIAGONAL:
            b, length = queries.q.shape[0], queries.q.shape[1] // self.each
            place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (b, length))
            options["positions"] = place + at.away * length, place
        return options


class _Product:
    """A slot for one device."""

    def __init__(self, slot: Slot, device: Array, each: int):
        self.slot, self.device = slot, device
        self._pieces = 1 if slot.whole else each
        self._q, self._k, self.away = (self._mine(table) for table in (slot.q, slot.k, slot.away))

    def _mine(self, table: np.ndarray | Array) -> int | Array:
        if isinstance(table, np.ndarray) and (table == table[0]).all():
            return int(table[0])  # known before tracing
        return jnp.asarray(table)[self.device]

    def q(self, x: Array) -> Array:
        """Select the chunk of queries from an array of all of the device's tokens."""
        return self._cut(x, self._q)

    def k(self, x: Array) -> Array:
        """Select the chunk of keys from an array of all tokens of the keys' device."""
        return self._cut(x, self._k)

    def put_q(self, x: Array, new: Array) -> Array:
        """Return `x` with `new` in place of `q(x)`."""
        return self._put(x, new, self._q)

    def put_k(self, x: Array, new: Array) -> Array:
        """Return `x` with `new` in place of `k(x)`."""
        return self._put(x, new, self._k)

    def _cut(self, x: Array, chunk: int | Array) -> Array:
        length = x.shape[1] // self._pieces
        return x if self._pieces == 1 else lax.dynamic_slice_in_dim(x, chunk * length, length, axis=1)

    def _put(self, x: Array, new: Array, chunk: int | Array) -> Array:
        return new if self._pieces == 1 else lax.dynamic_update_slice_in_dim(x, new, chunk * new.shape[1], axis=1)

    def if_on(self, work: Callable[[Tree], Tree], x: Tree) -> Tree:
        """Return `work(x)` on devices that have this product, else `x`; `work` must not contain collectives."""
        if self.slot.always:
            return work(x)
        return lax.cond(jnp.asarray(self.slot.on)[self.device], work, lambda x: x, x)
