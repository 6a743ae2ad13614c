"""Lookups in a sharded embedding table, with a gradient that is reduce-scattered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.layout import constrain, current, filled_shape, in_use, unfill
from jaxscale.parallel.ends import axis_size, local_rows, psum_float32
from jaxscale.parallel.reductions import sum_to
from jaxscale.parallel.sharded import cut_already, cut_over, free_and_manual, sharded_op, where_gradients_go

_OUTSIDE = -(2**30)
"""The row number of ids outside of the table: still negative after adding or subtracting other devices' rows."""
_TOKENS, _OUT = ("batch", "seq"), ("batch", "residual_seq", "embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sharded_lookup(
    table: Float[Array, "rows e"], ids: Int[Array, "b s"], axis: str, dtype: DTypeLike = jnp.float32
) -> Float[Array, "b s e"]:
    """Compute `table[ids]` of global arrays, sharded by the layout in force.

    A device looks up its own rows; if rows are sharded (Shoeybi et al. 2019, section 3) the results are summed over
    devices, by a reduce-scatter if the residual stream is sharded along its sequence. A table that is sharded along
    `embed` (FSDP) is gathered first, since the batch is sharded over the same devices. In the backward pass each device
    sums the cotangents of its tokens in float32, and one reduce-scatter sums them over devices by the rules for
    gradients; the partitioner would all-reduce the whole table. Inside a `shard_map` that shards the rows already, the
    table is this device's rows, and ids and the result are replicated.

    Args:
      table: logical axes (`axis`, "embed").
      ids: logical axes ("batch", "seq"), from 0 up to the number of rows; as for `jnp.take`, negative ids count from
        the last row, and an id that is still outside gives NaN and has no gradient.
      axis: logical axis of the rows, "vocab" or "positions".
      dtype: dtype of the result.

    Returns:
      logical axes ("batch", "residual_seq", "embed").

    Raises:
      LayoutError: a dimension that does not divide.
    """
    return _forward(table, ids, axis, dtype)[0]


def _forward(table: Array, ids: Array, axis: str, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    already, over, scattered = cut_already(axis), cut_over(axis), _scattered(axis)
    rows = _row_numbers(ids, table.shape[0] * axis_size(already))
    if scattered and (layout := current()) is not None:
        manual = free_and_manual()[1]
        layout.spec(_OUT, (*ids.shape, table.shape[1]), kind="activations", name="the residual stream", manual=manual)
    if filled_shape((axis, "embed"), table.shape) != table.shape and ids.size * axis_size(over) <= table.shape[0]:
        # for few tokens, sending their vectors is cheaper than resharding a table that is not sharded by rows
        stored = constrain(table.astype(dtype), axis, "embed", kind="params")
        vectors = constrain(_take_rows(stored, constrain(rows, None, None)), None, None, None)
        return constrain(vectors, *_OUT), (table, ids)
    rest = tuple(a for a in over if a not in scattered)

    def local(table: Array, rows: Array) -> Array:
        vectors = _take_rows(table, local_rows(rows, table.shape[0], over)).astype(dtype)
        if scattered:
            vectors = lax.psum_scatter(vectors, scattered, scatter_dimension=1, tiled=True)
        return lax.psum(vectors, rest) if rest else vectors

    vectors = sharded_op(
        local,
        in_use(table, (axis, "embed"), dtype),
        local_rows(rows, table.shape[0], already),
        axes=((axis, "embed"), _TOKENS),
        out_axes=_OUT if scattered else ("batch", "seq", "embed"),
        name="the lookup's operand",
    )
    vectors = psum_float32(vectors, already) if already else vectors
    return constrain(vectors, *_OUT), (table, ids)


def _backward(axis: str, dtype: DTypeLike, residuals: tuple[Array, Array], dx: Array) -> tuple[Array, None]:
    table, ids = residuals
    already = cut_already(axis)
    over, tokens = cut_over(axis), cut_over("batch", "seq")
    split = where_gradients_go((axis, "embed"), tokens)

    pieces = filled_shape((axis, "embed"), table.shape)[0] // axis_size(over)

    def local(rows: Array, dx: Array) -> Array:
        rows = local_rows(rows, pieces, over)
        rows = jnp.where(rows < 0, pieces, rows)  # rows of other devices are out of range, and dropped
        zeros = jnp.zeros((pieces, dx.shape[-1]), jnp.promote_types(table.dtype, jnp.float32))
        return sum_to(zeros.at[rows].add(dx.astype(zeros.dtype), mode="drop"), tokens, split, dim=1)

    dtable = sharded_op(
        local,
        local_rows(_row_numbers(ids, table.shape[0] * axis_size(already)), table.shape[0], already),
        dx,
        axes=(_TOKENS, ("batch", "seq", "embed")),
        out_axes=(axis, "embed"),
        out_kinds="grads" if split else "activations",
        name="the lookup's operand",
    )
    dtable = constrain(dtable.astype(table.dtype), axis, "embed", kind="grads")
    return unfill(dtable, table.shape, axis, "embed"), None


sharded_lookup.defvjp(_forward, _backward)


def _row_numbers(ids: Int[Array, "b s"], rows: int) -> Int[Array, "b s"]:
    """Return ids as row numbers from 0, or `_OUTSIDE`."""
    ids = jnp.where(ids < 0, ids.astype(jnp.int32) + rows, ids.astype(jnp.int32))
    return jnp.where((ids >= 0) & (ids < rows), ids, _OUTSIDE)


def _take_rows(table: Float[Array, "r e"], rows: Int[Array, "b s"]) -> Float[Array, "b s e"]:
    """Take rows of this device; 0 for rows of other devices, NaN for rows outside of the table."""
    mine = (rows >= 0) & (rows < table.shape[0])
    without = jnp.where(rows < _OUTSIDE // 2, jnp.nan, 0).astype(table.dtype)
    return jnp.where(mine[..., None], table[jnp.where(mine, rows, 0)], without[..., None])


def _scattered(axis: str) -> tuple[str, ...]:
    """Return the mesh axes that shard both the rows and, between blocks, the sequence: the sum is scattered there."""
    seq, residual, over = cut_over("seq"), cut_over("residual_seq"), cut_over(axis)
    inner = residual[len(seq) :]
    return inner if residual[: len(seq)] == seq and set(inner) <= set(over) else ()
