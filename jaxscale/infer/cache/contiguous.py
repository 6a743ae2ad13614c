"""A cache whose rows are as long as the longest text may become."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.infer.cache.rows import append_to, arrays, attend_packed, bytes_of, over_cache, pages_of
from jaxscale.nn import KeyValues, Packed
from jaxscale.parallel.context import Part

_AXES = (None, "batch", "cache_rows", "cache_seq", "kv_heads", "head_dim")
State = dict[str, Array]


@register(name="ContiguousCache")
@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Keys and values by row and position, (layers, lanes, rows, length, heads, width).

    `context` cuts the length: each device attends to its stretch of every row, and outputs are put together by their
    log-sum-exps (row-wise softmax statistics, Dao et al. 2022; Infinite-LLM, Lin et al. 2024).
    """

    axes = _AXES
    page = None

    def count(self, rows: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return rows

    def init(self, kept: KeyValues, layers: int, lanes: int, rows: int, length: int) -> State:
        """See `jaxscale.nn.Cache`."""
        return arrays(kept, layers, lanes, rows, length)

    def bytes(self, kept: KeyValues, layers: int, lanes: int, rows: int, length: int) -> int:
        """See `jaxscale.nn.Cache`."""
        return bytes_of(kept, layers * lanes * rows * length)

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
            lanes, length = jnp.arange(here["k"].shape[1])[:, None], here["k"].shape[3]
            at = step.positions - device * length
            at = jnp.where(at < 0, length, at)  # padding, or another device's: dropped, as those past the end
            return {n: here[n].at[layer, lanes, step.rows, at].set(new[n], mode="drop") for n in here}

        return append_to(local, state, _AXES, {"k": k, "v": v}, (step, layer), "cache_seq", "the cache")

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

        def local(q: Array, here: State, told: tuple[Packed, Array], device: Array) -> Part:
            step, layer = told
            _, lanes, rows = here["k"].shape[:3]
            pages = (layer * lanes + jnp.arange(lanes)[:, None]) * rows + jnp.arange(rows)  # a row is a page
            return attend_packed(
                q,
                pages_of(here),
                step,
                pages[..., None],
                first=device,
                value_dim=value_dim,
                window=window,
                softcap=softcap,
                scale=scale,
            )

        return over_cache(local, q, state, _AXES, (step, layer), "cache_seq", "the cache")
