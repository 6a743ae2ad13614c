"""What caches share: attention of a step's tokens to the rows they are of, and a layout's devices put together."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.nn import KeyValues, Packed
from jaxscale.nn.flash import heads_over, heads_read_by
from jaxscale.parallel.context import Part, merge_over
from jaxscale.parallel.sharded import cut_over, sharded_op
from pallas_kernels.decode_attention import decode_attention

QUERIES = ("batch", None, "heads", "head_dim")
TOKENS = ("batch", None)


def attend_packed(
    q: Float[Array, "b s h d"],
    state: dict[str, Array],
    step: Packed,
    tables: Int[Array, "b rows p"],
    *,
    value_dim: int,
    first: Int[Array, ""] | int = 0,
    stride: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Part:
    """Every token's attention to what of its row is here, a group at a time; output and log-sum-exp in float32.

    Args:
      q: a step's queries.
      state: keys and values by page, of all layers and lanes: (pages, page, kv, d).
      step: whose the queries are.
      tables: the pages of each row, below 0 where one is not here.
      value_dim, first, stride, window, softcap, scale: those of `pallas_kernels.decode_attention`.
    """
    b, s, h, _ = q.shape
    whole = Part(jnp.zeros((b, s, h, value_dim), jnp.float32), jnp.full((b, s, h), -jnp.inf, jnp.float32))
    lane = jnp.arange(b)[:, None, None]
    for columns, rows in step.groups:
        pages = tables if rows is None else tables.at[lane[..., 0], rows].get(mode="fill", fill_value=-1)
        part = decode_attention(
            _flat(q.at[lane, columns].get(mode="fill", fill_value=0)),
            state["k"],
            state.get("v"),
            positions=_flat(step.positions.at[lane, columns].get(mode="fill", fill_value=-1)),
            tables=_flat(pages),
            first=first,
            stride=stride,
            window=window,
            softcap=softcap,
            scale=scale,
            value_dim=value_dim,
        )
        put = lambda all_, one, at=columns: all_.at[lane, at].set(one.reshape(*at.shape, *one.shape[2:]), mode="drop")  # noqa: E731
        whole = Part(*map(put, whole, part))
    return whole


def _flat(x: Array) -> Array:
    """Rows of all lanes as rows."""
    return x.reshape(-1, *x.shape[2:])


def over_cache(
    local: Callable[..., Part],
    q: Float[Array, "b s h d"],
    state: dict[str, Array],
    axes: tuple[str | None, ...],
    step: tuple[Packed, Array],
    along: str,
    name: str,
) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"]]:
    """`local(q, state, step, device)` of every device's own part of a cache, put together.

    Args:
      local: attention to what of the cache is here; `device` is this one's place among those that cut `along`.
      q: queries.
      state: arrays of these `axes`.
      step: whose the queries are, and the layer.
      along: the logical axis along which a row's tokens are cut.
      name: of the cache, for errors.

    Raises:
      LayoutError: heads and key heads are split over different mesh axes.
    """
    kv_heads = state["k"].shape[-2]
    (over, whole), pieces = heads_over(kv_heads, name), cut_over(along)
    groups = q.shape[2] // kv_heads
    names = list(state)
    leaves, tree = jax.tree.flatten(step)

    def read(q: Array, *rest: Array) -> tuple[Array, Array]:
        here = dict(zip(names, rest[: len(names)], strict=True))
        told, layer = jax.tree.unflatten(tree, rest[len(names) :])
        if whole:  # of this layer alone, for it is copied
            own = lambda x: heads_read_by(x, q.shape[2], groups, lax.axis_index(over), axis=x.ndim - 2)  # noqa: E731
            here = {n: own(lax.dynamic_index_in_dim(x, layer)) for n, x in here.items()}
            layer = jnp.zeros_like(layer)
        device = lax.axis_index(pieces) if pieces else jnp.int32(0)
        part = local(q, here, (told, layer), device)
        part = merge_over(part, pieces) if pieces else part
        return part.out.astype(q.dtype), part.lse

    of_step = [("batch", *[None] * (x.ndim - 1))[: x.ndim] for x in leaves]
    kept = tuple(None if kv_heads == 1 and a == "kv_heads" else a for a in axes)
    return sharded_op(
        read,
        q,
        *state.values(),
        *leaves,
        axes=(QUERIES, *[kept] * len(names), *of_step),
        out_axes=(QUERIES, QUERIES[:-1]),
        name=f"{name}'s operand",
    )


def append_to(
    local: Callable[..., dict[str, Array]],
    state: dict[str, Array],
    axes: tuple[str | None, ...],
    new: dict[str, Array],
    step: tuple[Packed, Array],
    along: str,
    name: str,
) -> dict[str, Array]:
    """`local(state, new, step, device)` on every device's own part of a cache; arguments as `over_cache`'s."""
    pieces = cut_over(along)
    heads = None if state["k"].shape[-2] == 1 else "kv_heads"
    kept = tuple(None if a == "kv_heads" else a for a in axes) if heads is None else axes
    leaves, tree = jax.tree.flatten(step)
    n = len(state)

    def write(*rest: Array) -> tuple[Array, ...]:
        here = dict(zip(state, rest[:n], strict=True))
        given = dict(zip(state, rest[n : 2 * n], strict=True))
        device = lax.axis_index(pieces) if pieces else jnp.int32(0)
        return tuple(local(here, given, jax.tree.unflatten(tree, rest[2 * n :]), device).values())

    of_new = ("batch", None, heads, "head_dim")
    of_step = [("batch", *[None] * (x.ndim - 1))[: x.ndim] for x in leaves]
    out = sharded_op(
        write,
        *state.values(),
        *(new[name] for name in state),
        *leaves,
        axes=(*[kept] * n, *[of_new] * n, *of_step),
        out_axes=(kept,) * n,
        name=f"{name}'s operand",
    )
    return dict(zip(state, out, strict=True))


def pages_of(state: dict[str, Array]) -> dict[str, Array]:
    """Of all layers and lanes one after another, (layers * lanes * pages, page, kv, d)."""
    return {n: x.reshape(-1, *x.shape[3:]) for n, x in state.items()}


def arrays(kept: KeyValues, *leading: int) -> dict[str, Array]:
    """Empty keys, and values where they are kept apart, of these leading sizes."""
    widths = {"k": kept.key_dim} | ({} if kept.shared else {"v": kept.value_dim})
    return {n: jnp.zeros((*leading, kept.kv_heads, d), kept.dtype) for n, d in widths.items()}


def bytes_of(kept: KeyValues, tokens: int) -> int:
    """What `arrays` of so many tokens take."""
    widths = kept.key_dim + (0 if kept.shared else kept.value_dim)
    return tokens * kept.kv_heads * widths * jnp.dtype(kept.dtype).itemsize
