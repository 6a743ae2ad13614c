"""Attention over a sequence that the layout shards: `Transformer.attention = @RingAttention()`.

P devices share a sequence; a part is one device's shard of an array.

| value | communicates | each device sends, per layer, forward; backward |
|---|---|---|
| `RingAttention` | keys and values, around a ring | (P - 1) parts of each; as many, and their float32 gradients |
| `TokenRingAttention` | queries one way around, outputs the other | (P - 1) parts of each; with cotangents |
| `UlyssesAttention` | queries, keys, values and outputs, by all-to-all | (P - 1) / P of a part of each; the same |
| `GatherAttention` | keys and values, by all-gather | (P - 1) parts of each; as many, and their float32 gradients |

Each is an `AttentionKernel`, and is flash attention where the layout does not shard `seq`. Tokens must be in the order
that `order` returns: the model reorders them once, before the first layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

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
    """Base class of the four context-parallel attentions.

    Args:
      zigzag: shard the sequence so that with a causal mask every device has the same work; its length must then be a
        multiple of twice the devices.
      deterministic: see `pallas_kernels.flash_attention.flash_attention`.
      implementation: see `pallas_kernels.flash_attention.flash_attention`.
    """

    _over: ClassVar[Callable[..., Array]]
    """The attention of one device, inside `shard_map`."""

    zigzag: bool = True
    deterministic: bool = False
    implementation: str | None = None

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """See `ContextKernel`.

        Raises:
          LayoutError: the length is not a multiple of `unit()`.
        """
        ring = self._ring()
        if ring is None or self._each(ring) == 1:
            return None
        self._check_length(seq_len, ring)
        return zigzag(seq_len, ring.size * ring.inner)

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
        return_lse: bool = False,
        dropout: float = 0.0,
        dropout_seeds: UInt32[Array, "b h 2"] | None = None,
        dropout_places: Int[Array, "b s"] | None = None,
    ) -> Any:
        """Compute `dot_product_attention` of tokens in the order of `order`.

        With `segment_ids`, the tokens of a segment must be in the order of their positions, as packing leaves them, and
        so must padding, whose positions are its columns. With `positions` and no `segment_ids` any order is allowed,
        and no product of chunks is skipped.

        Raises:
          LayoutError: a sequence length or heads that the devices do not divide, or different numbers of queries and
            keys.
          KernelError: arguments that the kernel does not support.
        """
        name, ring = type(self).__name__, self._ring()
        if ring is None:
            return flash_attention(
                q, k, v, causal=causal, segment_ids=segment_ids, positions=positions, window=window, softcap=softcap,
                scale=scale, return_lse=return_lse, deterministic=self.deterministic,
                implementation=self.implementation, dropout=dropout, dropout_seeds=dropout_seeds,
                dropout_places=dropout_places,
            )  # fmt: skip
        if q.shape[1] != k.shape[1]:
            raise LayoutError(
                f"{name} needs as many keys as queries, and there are {q.shape[1]} queries and {k.shape[1]} keys; use "
                f"a mesh without {' and '.join(ring.axes)}, or attention=dot_product_attention"
            )
        self.check(q.shape[1], q.shape[2], k.shape[2])
        kernel = self.deterministic, self.implementation
        attend = Attend(
            causal, window, softcap, scale, *kernel, each=self._each(ring), return_lse=return_lse, dropout=dropout
        )

        def local(
            q: Array, k: Array, v: Array, segments: Any, positions: Any, seeds: Any = None, places: Any = None
        ) -> Any:
            return self._over(q, k, v, attend.tokens(segments, positions, places, seeds), ring, attend)

        drop: tuple[Any, Any] = None, None
        if dropout:
            drop = dropout_seeds, dropout_places
            if dropout_places is None:
                order = self.order(q.shape[1])
                places = np.arange(q.shape[1]) if order is None else order
                drop = dropout_seeds, jnp.broadcast_to(jnp.asarray(places, jnp.int32), q.shape[:2])
        tokens = segment_ids, positions
        return over_devices(local, q, k, v, *tokens, *drop, keys="seq", name=name, return_lse=return_lse)

    def _ring(self) -> Ring | None:
        """Return the devices that the layout in force shards a sequence over, or `None`."""
        layout = current()
        if layout is None:
            return None
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if around := [m for m in layout.resolved_rules.target("activations", "seq") if m in manual]:
            raise LayoutError(
                f"{type(self).__name__} was called inside a shard_map over '{around[0]}', which shards 'seq'; call it "
                "outside of the shard_map, or use the functions of jaxscale.parallel.context inside"
            )
        over = cut_over("seq")
        return Ring(over, math.prod(layout.sizes[m] for m in over)) if over else None

    def _each(self, ring: Ring) -> int:
        return 2 if self.zigzag and ring.size > 1 else 1

    def unit(self) -> int:
        """See `ContextKernel`."""
        ring = self._ring()
        return 1 if ring is None else ring.size * ring.inner * self._each(ring)

    def check(self, seq_len: int, heads: int, kv_heads: int) -> None:
        """See `CheckedKernel`: the devices must divide the sequence and the heads."""
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
                f"{type(self).__name__} shards a sequence of {seq_len} over {ring.size * ring.inner} devices{zig}, "
                f"which needs a multiple of {unit}; the nearest is {f'{below} or {above}' if below else above}"
                + (", or set zigzag=False" if plain else "")
            )

    def _check_heads(self, heads: int, kv_heads: int, ring: Ring) -> None:
        """Raise `LayoutError` if the devices do not divide the heads; only Ulysses attention shards them."""


@register
@dataclasses.dataclass(frozen=True)
class RingAttention(ContextParallel):
    """Ring attention: keys and values travel around a ring (`jaxscale.parallel.context.ring_attention`).

    Args:
      zigzag: shard the sequence so that with a causal mask every device has the same work; its length must then be a
        multiple of twice the devices.
      deterministic: see `pallas_kernels.flash_attention.flash_attention`.
      implementation: see `pallas_kernels.flash_attention.flash_attention`.
    """

    _over = staticmethod(ring_attention)


@register
@dataclasses.dataclass(frozen=True)
class TokenRingAttention(ContextParallel):
    """Queries travel around a ring, and their outputs return (`jaxscale.parallel.context.token_ring_attention`).

    Args:
      zigzag: see `RingAttention`.
      deterministic: see `pallas_kernels.flash_attention.flash_attention`.
      implementation: see `pallas_kernels.flash_attention.flash_attention`.
    """

    _over = staticmethod(token_ring_attention)


@register
@dataclasses.dataclass(frozen=True)
class GatherAttention(ContextParallel):
    """Every device gathers all keys and values (`jaxscale.parallel.context.gather_attention`).

    Args:
      zigzag: see `RingAttention`.
      deterministic: see `pallas_kernels.flash_attention.flash_attention`.
      implementation: see `pallas_kernels.flash_attention.flash_attention`.
    """

    _over = staticmethod(gather_attention)


@register
@dataclasses.dataclass(frozen=True)
class UlyssesAttention(ContextParallel):
    """Every device gets whole sequences of some heads by all-to-all (`jaxscale.parallel.context.ulysses_attention`).

    Args:
      zigzag: see `RingAttention`; with `ring` = 1 it has no effect.
      deterministic: see `pallas_kernels.flash_attention.flash_attention`.
      implementation: see `pallas_kernels.flash_attention.flash_attention`.
      ring: number of groups of devices: an all-to-all within each group, and ring attention between groups. With 1,
        the all-to-all is over all devices, which must divide the heads.
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
            f"UlyssesAttention(ring={self.ring}) shards {heads} heads and {kv_heads} key heads over "
            f"{tensor}{ring.inner} devices of {' and '.join(ring.axes)}, which does not divide; ring={devices // fit} "
            f"makes a ring of {devices // fit} groups, each with an all-to-all of {fit} devices"
        )
