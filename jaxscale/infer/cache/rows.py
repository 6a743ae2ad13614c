"""Attention of a few tokens to rows of kept keys, plainly: every cache's truth, and what it does without a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.errors import LayoutError
from jaxscale.nn import Group, Kept, Packed
from jaxscale.nn.flash import heads_read_by
from jaxscale.parallel.context import Part, merge_over
from jaxscale.parallel.sharded import cut_over, sharded_op

QUERIES = ("batch", None, "heads", "head_dim")
TOKENS = ("batch", None)


def attend_rows(
    q: Float[Array, "r q h d"],
    k: Float[Array, "r t kv d"],
    v: Float[Array, "r t kv dv"],
    at: Int[Array, "r q"],
    kept_at: Int[Array, "#r t"],
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> Part:
    """Causal attention of each row's queries to its keys; output and log-sum-exp in float32.

    Args:
      q, k, v: the number of query heads is a multiple of that of key heads.
      at, kept_at: positions of queries and keys; a query at -1 sees none.
      window, softcap, scale: as in `jaxscale.nn.dot_product_attention`.
    """
    r, s, h, d = q.shape
    kv = k.shape[2]
    scores = jnp.einsum("rqkgd,rtkd->rkgqt", q.reshape(r, s, kv, h // kv, d), k, preferred_element_type=jnp.float32)
    scores = scores * (1 / math.sqrt(d) if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    behind = at[:, :, None] - kept_at[:, None, :]
    seen = (behind >= 0) & (at >= 0)[:, :, None]
    if window is not None:
        seen &= behind < window
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum("rkgqt,rtkd->rqkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    by_query = lambda x: jnp.moveaxis(x, 3, 1).reshape(r, s, h)  # noqa: E731
    some = by_query(total)
    out = out.reshape(r, s, h, -1) / jnp.where(some > 0, some, 1)[..., None]
    return Part(out, jnp.where(some > 0, by_query(top[..., 0]) + jnp.log(jnp.where(some > 0, some, 1)), -jnp.inf))


def attend_packed(q: Float[Array, "b s h d"], step: Packed, width: int, rows: Callable[..., Part]) -> Part:
    """Every token's attention, a group at a time.

    Args:
      q: a step's queries.
      step: whose they are.
      width: of a value.
      rows: `(q (r, n, h, d), at (r, n), rows (r,) or None, lane) -> Part`, of one lane's group.
    """

    def lane(q: Array, positions: Array, groups: tuple[Group, ...], lane: Array) -> Part:
        s, h, _ = q.shape
        whole = Part(jnp.zeros((s, h, width), jnp.float32), jnp.full((s, h), -jnp.inf, jnp.float32))
        for group in groups:
            take = lambda x, fill, columns=group.columns: x.at[columns].get(mode="fill", fill_value=fill)  # noqa: E731
            part = rows(take(q, 0), take(positions, -1), group.rows, lane)
            whole = jax.tree.map(lambda a, b, c=group.columns: a.at[c].set(b, mode="drop"), whole, part)
        return whole

    return jax.vmap(lane)(q, step.positions, step.groups, jnp.arange(q.shape[0]))


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
      LayoutError: heads are split so that a device's read no whole key heads.
    """
    kv_heads = state["k"].shape[-2]
    over, pieces = cut_over("heads"), cut_over(along)
    same = over == cut_over("kv_heads") or kv_heads == 1
    if not same and cut_over("kv_heads"):
        raise LayoutError(
            f"{name}'s layout splits 'heads' over {over} and 'kv_heads' over {cut_over('kv_heads')}; give both the "
            "same rule, or 'kv_heads' none"
        )
    groups = q.shape[2] // kv_heads
    names = list(state)
    leaves, tree = jax.tree.flatten(step)

    def read(q: Array, *rest: Array) -> tuple[Array, Array]:
        here = dict(zip(names, rest[: len(names)], strict=True))
        if not same:
            own = lambda x: heads_read_by(x, q.shape[2], groups, lax.axis_index(over), name, axis=x.ndim - 2)  # noqa: E731
            here = {n: own(x) for n, x in here.items()}
        device = lax.axis_index(pieces) if pieces else jnp.int32(0)
        part = local(q, here, jax.tree.unflatten(tree, rest[len(names) :]), device)
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


def values_of(state: dict[str, Array], value_dim: int) -> Float[Array, "... dv"]:
    """The values of a state: kept beside the keys, or the first widths of them."""
    return state["v"] if "v" in state else state["k"][..., :value_dim]


def arrays(kept: Kept, *leading: int) -> dict[str, Array]:
    """Empty keys, and values where they are kept apart, of these leading sizes."""
    widths = {"k": kept.key_dim} | ({} if kept.shared else {"v": kept.value_dim})
    return {n: jnp.zeros((*leading, kept.kv_heads, d), kept.dtype) for n, d in widths.items()}


def bytes_of(kept: Kept, tokens: int) -> int:
    """What `arrays` of so many tokens take."""
    widths = kept.key_dim + (0 if kept.shared else kept.value_dim)
    return tokens * kept.kv_heads * widths * jnp.dtype(kept.dtype).itemsize
