"""Attention over a sequence that the layout cuts: `Transformer.attention = @RingAttention()`.

| value | moves | a device sends, per layer, forward and backward |
|---|---|---|
| `RingAttention` | keys and values, one way round | (P - 1) parts of each; and of their float32 gradients |
| `TokenRingAttention` | queries one way, outputs the other | (P - 1) parts of each; cotangents with the queries |
| `UlyssesAttention` | all four, by all-to-all | (P - 1) / P of a part of each; the same |
| `GatherAttention` | keys and values, to everybody | (P - 1) parts of each; twice, and the gradients' scatter |

Each is an `AttentionKernel`, and flash attention where nothing cuts `seq`. Tokens come in the order that `order` says:
the model arranges them once, before the first layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import LayoutError
from jaxscale.layout import current
from jaxscale.nn.flash import flash_attention, key_heads_read, over_devices, refuse_split
from jaxscale.parallel.context import (
    Attend,
    Ring,
    gather_attention,
    ring_attention,
    token_ring_attention,
    ulysses_attention,
    zigzag,
)
from jaxscale.parallel.sharded import cut_over


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """What the four have in common.

    Args:
      zigzag: cut a sequence so that a causal mask gives every device the same work; its length is then a multiple of
        twice the ring.
      deterministic, implementation: those of `pallas_kernels.flash_attention.flash_attention`.
    """

    _over: ClassVar[Callable[..., Array]]
    """The same of one device's part, inside `shard_map`."""

    zigzag: bool = True
    deterministic: bool = False
    implementation: str | None = None

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """The natural place of each token, in the order in which this wants them; `None` is the natural order.

        Raises:
          LayoutError: the sequence does not divide.
        """
        ring = self._ring()
        if ring is None or self._each(ring) == 1:
            return None
        self._check_length(seq_len, ring)
        return zigzag(seq_len, ring.size)

    def __call__(
        self,
        q: Float[Array, "b s h d"],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        *,
        causal: bool = True,
        segment_ids: Int[Array, "b s"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Float[Array, "b s h dv"]:
        """What `dot_product_attention` computes, of tokens in the order of `order`.

        With `segment_ids`, the tokens of a segment stand in the order of their positions, as packing leaves them, and
        so does padding, whose positions are its places in the row. With `positions` alone nothing is known of the
        order, and no product of chunks is passed over.

        Raises:
          LayoutError: a sequence or heads that do not divide, or other keys than queries.
          KernelError: what the kernel cannot do.
        """
        name, ring = type(self).__name__, self._ring()
        if ring is None:
            return flash_attention(
                q, k, v, causal=causal, segment_ids=segment_ids, positions=positions, window=window, softcap=softcap,
                scale=scale, deterministic=self.deterministic, implementation=self.implementation,
            )  # fmt: skip
        if q.shape[1] != k.shape[1]:
            raise LayoutError(
                f"{name} cuts one sequence into queries and keys alike, and was given {q.shape[1]} queries and "
                f"{k.shape[1]} keys; use a mesh without {' and '.join(ring.axes)}, or attention=dot_product_attention"
            )
        self.check(q.shape[1], q.shape[2], k.shape[2])
        attend = Attend(causal, window, softcap, scale, self.deterministic, self.implementation, each=self._each(ring))

        def local(q: Array, k: Array, v: Array, segments: Array | None, positions: Array | None) -> Array:
            return self._over(q, k, v, attend.tokens(segments, positions), ring, attend)

        return over_devices(local, q, k, v, segment_ids, positions, keys="seq", name=name)

    def _ring(self) -> Ring | None:
        """The devices that the layout in force cuts a sequence over, if any."""
        layout = current()
        if layout is None:
            return None
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if around := [m for m in layout.resolved_rules.target("activations", "seq") if m in manual]:
            raise LayoutError(
                f"{type(self).__name__} was called inside a shard_map over '{around[0]}', which splits 'seq'; call it "
                "outside, or the functions of jaxscale.parallel.context there"
            )
        over = cut_over("seq")
        return Ring(over, math.prod(layout.sizes[m] for m in over)) if over else None

    def _each(self, ring: Ring) -> int:
        return 2 if self.zigzag and ring.size > 1 else 1

    def unit(self) -> int:
        """Of what a sequence's length has to be a multiple under the layout in force."""
        ring = self._ring()
        return 1 if ring is None else math.lcm(ring.size * ring.inner, ring.size * self._each(ring))

    def check(self, seq_len: int, heads: int, kv_heads: int) -> None:
        """See `CheckedKernel`: a sequence or heads that do not divide."""
        if (ring := self._ring()) is not None:
            refuse_split(type(self).__name__, "head_dim")
            self._check_length(seq_len, ring)
            self._check_heads(heads, kv_heads, ring)

    def _check_length(self, seq_len: int, ring: Ring) -> None:
        unit, layout = self.unit(), current()
        if seq_len % unit:
            nearest = unit if layout is None else math.lcm(unit, layout.split("residual_seq"))
            below, above = seq_len // nearest * nearest, -(-seq_len // nearest) * nearest
            zig = " in zigzag order" if self._each(ring) == 2 else ""
            plain = seq_len % (ring.size * ring.inner) == 0
            raise LayoutError(
                f"{type(self).__name__} cuts a sequence of {seq_len} over {ring.size * ring.inner} devices{zig}, which "
                f"needs a multiple of {unit}; the nearest is {f'{below} or {above}' if below else above}"
                + (", or set zigzag=False" if plain else "")
            )

    def _check_heads(self, heads: int, kv_heads: int, ring: Ring) -> None:
        """Raises where there are too few for what this does."""


@register
@dataclasses.dataclass(frozen=True)
class RingAttention(ContextParallel):
    """Keys and values go round (`jaxscale.parallel.context.ring_attention`).

    Args:
      zigzag: cut a sequence so that a causal mask gives every device the same work; its length is then a multiple of
        twice the ring.
      deterministic, implementation: those of `pallas_kernels.flash_attention.flash_attention`.
    """

    _over = staticmethod(ring_attention)


@register
@dataclasses.dataclass(frozen=True)
class TokenRingAttention(ContextParallel):
    """Queries go round, and what they found returns (`jaxscale.parallel.context.token_ring_attention`).

    Args: those of `RingAttention`.
    """

    _over = staticmethod(token_ring_attention)


@register
@dataclasses.dataclass(frozen=True)
class GatherAttention(ContextParallel):
    """Every device gathers all keys and values (`jaxscale.parallel.context.gather_attention`).

    Args: those of `RingAttention`.
    """

    _over = staticmethod(gather_attention)


@register
@dataclasses.dataclass(frozen=True)
class UlyssesAttention(ContextParallel):
    """Every device gets whole sequences of a few heads (`jaxscale.parallel.context.ulysses_attention`).

    Args:
      ring: into so many groups the devices are split; each makes an all-to-all, and together they are a ring. 1 is
        the all-to-all alone, for which heads have to be as many as devices.
      zigzag, deterministic, implementation: those of `RingAttention`; `zigzag` is about the ring.
    """

    _over = staticmethod(ulysses_attention)

    ring: int = 1

    def _ring(self) -> Ring | None:
        ring = super()._ring()
        if ring is None:
            return None
        if self.ring < 1 or ring.size % self.ring:
            fit = min((d for d in range(1, ring.size + 1) if ring.size % d == 0), key=lambda d: abs(d - self.ring))
            raise LayoutError(
                f"UlyssesAttention.ring = {self.ring} does not divide the {ring.size} devices of "
                f"{' and '.join(ring.axes)}; the nearest that does is {fit}"
            )
        return Ring(ring.axes, self.ring, ring.size // self.ring)

    def _check_heads(self, heads: int, kv_heads: int, ring: Ring) -> None:
        layout = current()
        assert layout is not None
        cut = layout.split("heads")
        mine = heads // cut, key_heads_read(heads // cut, heads // kv_heads)
        if all(n % ring.inner == 0 for n in mine):
            return
        devices = ring.size * ring.inner
        fit = next(d for d in range(ring.inner, 0, -1) if devices % d == 0 and all(n % d == 0 for n in mine))
        tensor = f"{' x '.join(cut_over('heads'))}={cut} and " if cut > 1 else ""
        raise LayoutError(
            f"UlyssesAttention(ring={self.ring}) cuts {heads} heads and {kv_heads} key heads over {tensor}{ring.inner} "
            f"devices of {' and '.join(ring.axes)}, which does not divide; ring={devices // fit} makes a ring of "
            f"{devices // fit} groups, each with an all-to-all of {fit}"
        )
