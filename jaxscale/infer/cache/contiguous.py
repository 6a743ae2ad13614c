"""A KV cache that reserves the longest length for each slot."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.infer.cache.paged import Paged
from jaxscale.infer.cache.shards import (
    append_to,
    arrays,
    attend_packed,
    attend_to,
    bytes_of,
    check_numbers,
    check_tokens,
    flat_pages,
    loaded,
    stored,
)
from jaxscale.nn import KeyValues, Packed
from jaxscale.parallel.context import Part

_AXES = (None, "batch", "cache_rows", "cache_seq", "kv_heads", "head_dim")
State = dict[str, Array]


@register(name="ContiguousCache")
@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Keys and values by slot and position: arrays (layers, batch, slots, length, heads, width).

    The mesh axis `context` shards the length: each device attends to its positions of every sequence, and outputs are
    merged by their log-sum-exps (row-wise softmax statistics, Dao et al. 2022; Infinite-LLM, Lin et al. 2024).

    Args:
      numbers: see `Paged`.
      ring: see `Paged`.

    Raises:
      ConfigError: another type of numbers, or a ring below 1.
    """

    numbers: str | None = None
    ring: int | None = None

    axes = _AXES
    page = None

    def __post_init__(self) -> None:
        check_numbers("ContiguousCache.numbers", self.numbers)
        check_tokens("ContiguousCache.ring", self.ring)

    def in_pages(self) -> Paged:
        """See `jaxscale.nn.Cache`."""
        return Paged(min(16, self.ring or 16), numbers=self.numbers)

    def count(self, slots: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return slots

    def init(self, key_values: KeyValues, layers: int, batch: int, slots: int, length: int) -> State:
        """See `jaxscale.nn.Cache`."""
        return arrays(key_values, self.numbers, layers, batch, slots, length)

    def bytes(self, key_values: KeyValues, layers: int, batch: int, slots: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return bytes_of(key_values, self.numbers, layers * batch * slots * length)

    def append(
        self,
        state: State,
        layer: Int[Array, ""],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        step: Packed,
    ) -> State:
        """See `jaxscale.nn.Cache`."""

        def local(shard: State, new: State, step: Packed, layer: Array, device: Array) -> State:
            batch_rows, length = jnp.arange(shard["k"].shape[1])[:, None], shard["k"].shape[3]
            at = step.positions - device * length
            at = jnp.where(at < 0, length, at)  # out of range for padding and other devices' positions: dropped
            return {n: shard[n].at[layer, batch_rows, step.slots, at].set(new[n], mode="drop") for n in shard}

        new = stored({n: x for n, x in (("k", k), ("v", v)) if n in state}, self.numbers)
        return append_to(local, state, _AXES, new, step, layer, "cache_seq", "the cache")

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
        """See `jaxscale.nn.Cache`."""

        def local(q: Array, shard: State, step: Packed, layer: Array, device: Array) -> Part:
            _, batch, slots = shard["k"].shape[:3]
            pages = (layer * batch + jnp.arange(batch)[:, None]) * slots + jnp.arange(slots)  # a slot is one page
            return attend_packed(
                q,
                flat_pages(shard),
                step,
                pages[..., None],
                first=device,
                value_dim=value_dim,
                window=window,
                softcap=softcap,
                scale=scale,
            )

        return attend_to(local, q, state, _AXES, step, layer, "cache_seq", "the cache")

    def read(
        self, state: State, layer: Int[Array, ""], step: Packed
    ) -> tuple[Float[Array, "b slots t kv d"], Float[Array, "b slots t kv dv"] | None]:
        """See `jaxscale.nn.Cache`."""
        return loaded(state, layer)
