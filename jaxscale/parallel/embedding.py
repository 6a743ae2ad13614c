"""Looking rows up in a table that the layout cuts, with a gradient that is summed straight to where it goes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.layout import constrain, current, filled_shape, in_use, unfill
from jaxscale.parallel.ends import axis_size, psum_float32, rows_from_ours
from jaxscale.parallel.reductions import sum_to
from jaxscale.parallel.sharded import cut_already, cut_over, free_and_manual, sharded_op, where_gradients_go

_OUTSIDE = -(2**30)
"""A place that is still negative when the rows of other devices are taken off or added."""
_TOKENS, _OUT = ("batch", "seq"), ("batch", "residual_seq", "embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sharded_lookup(
    table: Float[Array, "rows e"], ids: Int[Array, "b s"], axis: str, dtype: Any = jnp.float32
) -> Float[Array, "b s e"]:
    """`table[ids]`, of global arrays cut as the layout in force says.

    A device looks up the rows it has; where rows are cut (Shoeybi et al. 2019, section 3) the devices' results are
    summed, straight into pieces where the residual stream is split along its sequence. A table split along `embed`
    (FSDP) is gathered first, since the batch wants the same devices. Backwards each device adds its tokens up in
    float32 and one reduce-scatter takes the sums to where the rules for gradients say; left to the partitioner that is
    an all-reduce of the whole table. Inside a `shard_map` that cuts the rows already, the table is this device's rows;
    ids and the result are what all devices hold.

    Args:
      table: named (`axis`, "embed").
      ids: named ("batch", "seq"), from 0 up to the number of rows; as for `jnp.take`, negative ones count from the last
        row, and one that is still outside gives NaN and has no gradient.
      axis: logical name of the rows, "vocab" or "positions".
      dtype: of the result.

    Returns:
      named ("batch", "residual_seq", "embed").

    Raises:
      LayoutError: a dimension that does not divide.
    """
    return _forward(table, ids, axis, dtype)[0]


def _forward(table: Array, ids: Array, axis: str, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    already, over, scattered = cut_already(axis), cut_over(axis), _scattered(axis)
    places = _places(ids, table.shape[0] * axis_size(already))
    if scattered and (layout := current()) is not None:
        manual = free_and_manual()[1]
        layout.spec(_OUT, (*ids.shape, table.shape[1]), kind="activations", name="the residual stream", manual=manual)
    if filled_shape((axis, "embed"), table.shape) != table.shape and ids.size * axis_size(over) <= table.shape[0]:
        # the vectors of few tokens are less to send than a table that is not kept in rows
        kept = constrain(table.astype(dtype), axis, "embed", kind="params")
        found = constrain(_rows(kept, constrain(places, None, None)), None, None, None)
        return constrain(found, *_OUT), (table, ids)
    rest = tuple(a for a in over if a not in scattered)

    def local(table: Array, ids: Array) -> Array:
        found = _rows(table, rows_from_ours(ids, table.shape[0], over)).astype(dtype)
        if scattered:
            found = lax.psum_scatter(found, scattered, scatter_dimension=1, tiled=True)
        return lax.psum(found, rest) if rest else found

    found = sharded_op(
        local,
        in_use(table, (axis, "embed"), dtype),
        rows_from_ours(places, table.shape[0], already),
        axes=((axis, "embed"), _TOKENS),
        out_axes=_OUT if scattered else ("batch", "seq", "embed"),
        name="the lookup's operand",
    )
    found = psum_float32(found, already) if already else found
    return constrain(found, *_OUT), (table, ids)


def _backward(axis: str, dtype: Any, kept: tuple[Array, Array], dx: Array) -> tuple[Array, None]:
    table, ids = kept
    already = cut_already(axis)
    over, tokens = cut_over(axis), cut_over("batch", "seq")
    split = where_gradients_go((axis, "embed"), tokens)

    pieces = filled_shape((axis, "embed"), table.shape)[0] // axis_size(over)

    def local(ids: Array, dx: Array) -> Array:
        rows = rows_from_ours(ids, pieces, over)
        # what is not among this device's rows is dropped, before and after them alike
        rows = jnp.where(rows < 0, pieces, rows)
        zeros = jnp.zeros((pieces, dx.shape[-1]), jnp.promote_types(table.dtype, jnp.float32))
        return sum_to(zeros.at[rows].add(dx.astype(zeros.dtype), mode="drop"), tokens, split, dim=1)

    dtable = sharded_op(
        local,
        rows_from_ours(_places(ids, table.shape[0] * axis_size(already)), table.shape[0], already),
        dx,
        axes=(_TOKENS, ("batch", "seq", "embed")),
        out_axes=(axis, "embed"),
        out_kinds="grads" if split else "activations",
        name="the lookup's operand",
    )
    dtable = constrain(dtable.astype(table.dtype), axis, "embed", kind="grads")
    return unfill(dtable, table.shape, axis, "embed"), None


sharded_lookup.defvjp(_forward, _backward)


def _places(ids: Int[Array, "b s"], rows: int) -> Int[Array, "b s"]:
    """Ids as places in a table of so many rows, `_OUTSIDE` where there is none."""
    ids = jnp.where(ids < 0, ids.astype(jnp.int32) + rows, ids.astype(jnp.int32))
    return jnp.where((ids >= 0) & (ids < rows), ids, _OUTSIDE)


def _rows(table: Float[Array, "r e"], places: Int[Array, "b s"]) -> Float[Array, "b s e"]:
    """These rows of a device's own; 0 for another device's, NaN for one that is nowhere."""
    mine = (places >= 0) & (places < table.shape[0])
    without = jnp.where(places < _OUTSIDE // 2, jnp.nan, 0).astype(table.dtype)
    return jnp.where(mine[..., None], table[jnp.where(mine, places, 0)], without[..., None])


def _scattered(axis: str) -> tuple[str, ...]:
    """The mesh axes that cut rows and, between blocks, the sequence: the sum over them lands in pieces."""
    seq, residual, over = cut_over("seq"), cut_over("residual_seq"), cut_over(axis)
    inner = residual[len(seq) :]
    return inner if residual[: len(seq)] == seq and set(inner) <= set(over) else ()
