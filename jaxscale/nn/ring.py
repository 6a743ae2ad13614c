"""Rings: keys and values of the last tokens only, for layers with a window, so that their bytes do not grow.

A slot's ring is some pages of a cache with pages: entry e of its sequence is page e modulo their number, and a step's
tables list the entries from the first one in the window on. So a ring is read and written by any cache with pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxscale.layout import current

if TYPE_CHECKING:
    from jaxscale.nn.cache import Cache, KeyValues, Packed, State

_PREFIX = "ring_"
_AXES = (None, "batch", "pages", None, None, "kv_heads", "head_dim")


def ring_pages(cache: Cache, window: int | None, length: int, back: int) -> int | None:
    """Return the pages of a slot's ring; `None` where all tokens are stored, since a ring would not be smaller.

    The ring holds the window, as many tokens as a part of a step appends at once (`Cache.ring`), and those that may be
    taken back; one page more, since a window begins anywhere in a page.

    Args:
      cache: the kind of KV cache.
      window: of the layer.
      length: the most tokens of a sequence.
      back: how many tokens a sequence may be rolled back.
    """
    block = getattr(cache, "ring", None)
    if window is None or block is None:
        return None
    page, devices = cache.in_pages().page, _devices()
    assert page is not None
    pages = -(-(window + back + block) // page) + devices
    pages = -(-pages // devices) * devices
    return pages if pages * page < length else None


def init_ring(cache: Cache, key_values: KeyValues, layers: int, batch: int, slots: int, pages: int) -> State:
    """Return empty rings: arrays (layers, batch, pages, slots, page, kv_heads, width).

    Args:
      cache: the kind of KV cache.
      key_values: what is stored of a token.
      layers: the number of layers.
      batch: the number of batch rows.
      slots: sequences of each batch row.
      pages: from `ring_pages`.
    """
    paged = cache.in_pages()
    assert paged.page is not None
    flat = paged.init(key_values, layers, batch, slots, pages * paged.page)
    return {_PREFIX + n: x.reshape(layers, batch, pages, slots, *x.shape[3:]) for n, x in flat.items()}


def ring_axes(name: str) -> tuple[str | None, ...] | None:
    """Return the logical axes of an array of rings; `None` for other arrays.

    Args:
      name: the array's key in the state.
    """
    return _AXES if name.startswith(_PREFIX) else None


def ring_bytes(cache: Cache, key_values: KeyValues, layers: int, batch: int, slots: int, pages: int) -> int:
    """Return the bytes of `init_ring` with the same arguments, over all devices.

    Args:
      cache: the kind of KV cache.
      key_values: what is stored of a token.
      layers: the number of layers.
      batch: the number of batch rows.
      slots: sequences of each batch row.
      pages: from `ring_pages`.
    """
    paged = cache.in_pages()
    assert paged.page is not None
    return paged.bytes(key_values, layers, batch, slots, pages * paged.page)


def is_ring(state: State) -> bool:
    """Return whether a layer's state has rings.

    Args:
      state: arrays by name, or what a cache of another kind stores.
    """
    return isinstance(state, dict) and any(name.startswith(_PREFIX) for name in state)


def mix_in_ring(
    cache: Cache,
    state: State,
    layer: Int[Array, ""],
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s kv d"],
    v: Float[Array, "b s kv dv"],
    step: Packed,
    *,
    window: int,
    **mask: Any,
) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"], State]:
    """Append a step's keys and values to rings and attend to them, `cache.ring` tokens of each sequence at a time.

    Args:
      cache: the kind of KV cache.
      state: rings, and no other arrays.
      layer: the layer's index, int32 scalar.
      q: queries.
      k: keys.
      v: values; of shared ones (`KeyValues`) only the width is read.
      step: slot and position of each token.
      window: of the layer.
      **mask: `softcap` and `scale` of `Cache.attend`.

    Returns:
      the two results of `Cache.attend`, and the new state.
    """
    paged, block, shapes = cache.in_pages(), cache.ring, {n: x.shape for n, x in state.items()}
    assert block is not None and paged.page is not None
    pages, slots = next(iter(shapes.values()))[2:4]
    held = {n.removeprefix(_PREFIX): x.reshape(*x.shape[:2], pages * slots, *x.shape[4:]) for n, x in state.items()}
    out = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    lse = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    widest = max(group.columns.shape[-1] for group in step.groups)
    for start in range(0, widest, block):
        part = _in_ring(_part(step, start, block), window, paged.page, pages, slots)
        held = paged.append(held, layer, k, v, part)
        new, new_lse = paged.attend(held, layer, q, part, value_dim=v.shape[-1], window=window, **mask)
        mine = (part.positions >= 0)[..., None]
        out, lse = jnp.where(mine[..., None], new, out), jnp.where(mine, new_lse, lse)
    return out, lse, {_PREFIX + n: x.reshape(shapes[_PREFIX + n]) for n, x in held.items()}


def _part(step: Packed, start: int, block: int) -> Packed:
    """The tokens of a step from number `start` of each sequence on, `block` of each."""
    groups = tuple(
        group._replace(columns=group.columns[..., start : start + block])
        for group in step.groups
        if group.columns.shape[-1] > start
    )
    row, chosen = jnp.arange(step.positions.shape[0])[:, None, None], jnp.zeros(step.positions.shape, bool)
    for group in groups:
        chosen = chosen.at[row, group.columns].set(True, mode="drop")
    slots, positions = (jnp.where(chosen, x, -1) for x in (step.slots, step.positions))
    return step._replace(slots=slots, positions=positions, groups=groups)


def _in_ring(step: Packed, window: int, page: int, pages: int, slots: int) -> Packed:
    """A step whose positions count from the first page in the window of each slot's first token, with its tables."""
    devices, real = _devices(), step.positions >= 0
    slot = jnp.where(real, step.slots, slots)  # out of range: dropped
    most = jnp.iinfo(jnp.int32).max
    first = jax.vmap(lambda s, p: jnp.full(slots, most, jnp.int32).at[s].min(p, mode="drop"))(slot, step.positions)
    first = jnp.where(first == most, 0, first)
    base = jnp.maximum(first - window + 1, 0) // page // devices * devices  # so that entry i stays on device i modulo n
    entry = base[..., None] + jnp.arange(pages, dtype=jnp.int32)
    at = entry % devices * (pages // devices) + entry // devices % (pages // devices)
    tables = at * slots + jnp.arange(slots, dtype=jnp.int32)[:, None]
    behind = jax.vmap(lambda b, s: b.at[s].get(mode="fill", fill_value=0))(base, slot) * page
    return step._replace(positions=jnp.where(real, step.positions - behind, -1), tables=tables)


def _devices() -> int:
    """Over how many devices the pages of a sequence are sharded."""
    layout = current()
    return 1 if layout is None else layout.split("pages")
