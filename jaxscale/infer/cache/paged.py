"""A cache whose rows are lists of pages, so that texts take what they need and may share what they have in common."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.infer.cache.rows import append_to, arrays, attend_packed, bytes_of, over_cache, pages_of
from jaxscale.nn import KeyValues, Packed
from jaxscale.parallel.context import Part

_AXES = (None, "batch", "pages", None, "kv_heads", "head_dim")
State = dict[str, Array]


@register(name="PagedCache")
@dataclasses.dataclass(frozen=True)
class Paged:
    """Keys and values by page and place in it, (layers, lanes, pages, page, heads, width) (Kwon et al. 2023, vLLM).

    `Packed.tables` says which pages are a row's: entry i holds its positions from `i * page`. `context` cuts the pages,
    and a row's are dealt out to its devices in turn (entry i is a page of device i modulo their number), so that every
    device attends to a like part of every row (Infinite-LLM, Lin et al. 2024).

    Args:
      page: positions in a page.
      pages: of a lane; `None` is enough for rows of full length.

    Raises:
      ConfigError: a size below 1.
    """

    page: int = 16
    pages: int | None = None

    axes = _AXES

    def __post_init__(self) -> None:
        for name in ("page", "pages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"PagedCache.{name} = {value!r}: must be a whole number of at least 1")

    def per_row(self, length: int) -> int:
        """Pages of a row of full length."""
        return -(-length // self.page)

    def count(self, rows: int, length: int) -> int:
        """Pages of a lane."""
        return rows * self.per_row(length) if self.pages is None else self.pages

    def init(self, kept: KeyValues, layers: int, lanes: int, rows: int, length: int) -> State:
        """See `jaxscale.nn.Cache`."""
        return arrays(kept, layers, lanes, self.count(rows, length), self.page)

    def bytes(self, kept: KeyValues, layers: int, lanes: int, rows: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return bytes_of(kept, layers * lanes * self.count(rows, length) * self.page)

    def append(
        self,
        state: State,
        layer: Int[Array, ""],
        k: Float[Array, "b s kv d"],
        v: Float[Array, "b s kv dv"],
        step: Packed,
    ) -> State:
        """See `jaxscale.nn.Cache`."""

        def local(here: State, new: State, told: tuple[Packed, Array], device: Array) -> State:
            step, layer = told
            assert step.tables is not None
            pages = here["k"].shape[2]

            def which(table: Array, rows: Array, positions: Array) -> Array:
                rows = jnp.where(rows < 0, len(table), rows)
                return table.at[rows, positions // self.page].get(mode="fill", fill_value=-1)

            page = jax.vmap(which)(step.tables, step.rows, step.positions) - device * pages
            page = jnp.where(page < 0, pages, page)  # padding, or another device's: dropped, as those past the end
            lanes, at = jnp.arange(here["k"].shape[1])[:, None], step.positions % self.page
            return {n: here[n].at[layer, lanes, page, at].set(new[n], mode="drop") for n in here}

        return append_to(local, state, _AXES, {"k": k, "v": v}, (step, layer), "pages", "the cache")

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
        whole = state["k"].shape[2]

        def local(q: Array, here: State, told: tuple[Packed, Array], device: Array) -> Part:
            step, layer = told
            lanes, pages = here["k"].shape[1:3]
            assert step.tables is not None
            devices = whole // pages
            tables = _dealt(step.tables, devices, device) - device * pages  # (lanes, rows, entries of this device)
            of_lane = (layer * lanes + jnp.arange(lanes)[:, None, None]) * pages
            tables = jnp.where((tables >= 0) & (tables < pages), of_lane + tables, -1)
            return attend_packed(
                q,
                pages_of(here),
                step,
                tables,
                first=device,
                stride=devices,
                value_dim=value_dim,
                window=window,
                softcap=softcap,
                scale=scale,
            )

        return over_cache(local, q, state, _AXES, (step, layer), "pages", "the cache")


def _dealt(tables: Int[Array, "b r p"], devices: int, device: Int[Array, ""]) -> Int[Array, "b r n"]:
    """Every `devices`-th entry of each table, from this device's first on."""
    if devices == 1:
        return tables
    short = -tables.shape[-1] % devices
    tables = jnp.pad(tables, ((0, 0), (0, 0), (0, short)), constant_values=-1)
    return tables.reshape(*tables.shape[:2], -1, devices)[..., device]
