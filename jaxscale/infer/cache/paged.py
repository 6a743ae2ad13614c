"""A paged KV cache: sequences take pages as they grow, and share the pages of a common beginning."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.config import register
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

_AXES = (None, "batch", "pages", None, "kv_heads", "head_dim")
State = dict[str, Array]


@register(name="PagedCache")
@dataclasses.dataclass(frozen=True)
class Paged:
    """Keys and values by page: arrays (layers, batch, pages, page, heads, width) (Kwon et al. 2023, vLLM).

    `Packed.tables` lists the pages of each slot: entry i holds its positions from `i * page`. The mesh axis `context`
    shards the pages, and entry i is a page of device i modulo the number of devices, so that every device attends to a
    like part of every sequence (Infinite-LLM, Lin et al. 2024).

    Args:
      page: positions in a page.
      pages: pages of each batch row; `None` is enough for every slot to reach the full length.
      numbers: "int8" or "fp8" (e4m3) stores keys and values in 8 bits, with a float32 scale for each token and head;
        `None` stores them in the type of the computation.
      ring: with a number, layers with a window store only the window and this many tokens of a sequence more, whatever
        its length; sequences that begin alike are then computed each from the first token. `None` stores all tokens.

    Raises:
      ConfigError: a size below 1, or another type of numbers.
    """

    page: int = 16
    pages: int | None = None
    numbers: str | None = None
    ring: int | None = None

    axes = _AXES

    def __post_init__(self) -> None:
        check_numbers("PagedCache.numbers", self.numbers)
        for name in ("page", "pages", "ring"):
            check_tokens(f"PagedCache.{name}", getattr(self, name))

    def in_pages(self) -> Paged:
        """See `jaxscale.nn.Cache`."""
        return Paged(self.page, numbers=self.numbers)

    def per_slot(self, length: int) -> int:
        """Return the pages of one sequence.

        Args:
          length: its tokens.
        """
        return -(-length // self.page)

    def count(self, slots: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return slots * self.per_slot(length) if self.pages is None else self.pages

    def init(self, key_values: KeyValues, layers: int, batch: int, slots: int, length: int) -> State:
        """See `jaxscale.nn.Cache`."""
        return arrays(key_values, self.numbers, layers, batch, self.count(slots, length), self.page)

    def bytes(self, key_values: KeyValues, layers: int, batch: int, slots: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return bytes_of(key_values, self.numbers, layers * batch * self.count(slots, length) * self.page)

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
            assert step.tables is not None
            pages = shard["k"].shape[2]

            def page_of(table: Array, slots: Array, positions: Array) -> Array:
                slots = jnp.where(slots < 0, len(table), slots)
                return table.at[slots, positions // self.page].get(mode="fill", fill_value=-1)

            page = jax.vmap(page_of)(step.tables, step.slots, step.positions) - device * pages
            page = jnp.where(page < 0, pages, page)  # out of range for padding and other devices' pages: dropped
            batch_rows, at = jnp.arange(shard["k"].shape[1])[:, None], step.positions % self.page
            return {n: shard[n].at[layer, batch_rows, page, at].set(new[n], mode="drop") for n in shard}

        new = stored({n: x for n, x in (("k", k), ("v", v)) if n in state}, self.numbers)
        return append_to(local, state, _AXES, new, step, layer, "pages", "the cache")

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
        total = state["k"].shape[2]

        def local(q: Array, shard: State, step: Packed, layer: Array, device: Array) -> Part:
            batch, pages = shard["k"].shape[1:3]
            assert step.tables is not None
            devices = total // pages
            tables = _own_entries(step.tables, devices, device) - device * pages  # (batch, slots, entries)
            offset = (layer * batch + jnp.arange(batch)[:, None, None]) * pages
            tables = jnp.where((tables >= 0) & (tables < pages), offset + tables, -1)
            return attend_packed(
                q,
                flat_pages(shard),
                step,
                tables,
                first=device,
                stride=devices,
                value_dim=value_dim,
                window=window,
                softcap=softcap,
                scale=scale,
            )

        return attend_to(local, q, state, _AXES, step, layer, "pages", "the cache")

    def read(
        self, state: State, layer: Int[Array, ""], step: Packed
    ) -> tuple[Float[Array, "b slots t kv d"], Float[Array, "b slots t kv dv"] | None]:
        """See `jaxscale.nn.Cache`; anything at positions of entries without a page."""
        assert step.tables is not None
        tables = jnp.maximum(step.tables, 0)

        def by_position(x: Array) -> Array:
            pages = jax.vmap(lambda x, at: x[at])(x, tables)
            return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])

        k, v = loaded(state, layer)
        return by_position(k), None if v is None else by_position(v)


def _own_entries(tables: Int[Array, "b r p"], devices: int, device: Int[Array, ""]) -> Int[Array, "b r n"]:
    """The entries of each table that are on this device: every `devices`-th one."""
    if devices == 1:
        return tables
    padding = -tables.shape[-1] % devices
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, padding)), constant_values=-1)
    return tables.reshape(*tables.shape[:2], -1, devices)[..., device]
