"""Exchange of rows between the devices that hold their experts, and its derivative."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.parallel.dispatch.payload import decode, encode
from jaxscale.parallel.wires import CodedWire


@jax.custom_vjp
def move(rows: Float[Array, "r e"], order: Int[Array, " r"], back: Int[Array, " r"]) -> Float[Array, "r e"]:
    """Return `rows[order]`, where `back` is the inverse of `order`; neither it nor its derivative scatters."""
    return jnp.take(rows, order, axis=0)


move.defvjp(lambda rows, order, back: (move(rows, order, back), back), lambda back, d: (d[back], None, None))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange of rows between devices.

    Args:
      axes: the mesh axes.
      devices: the number of devices along them.
      max_rows: the most rows that a device receives from each other one.
      rows: rows of this device before the exchange.
      ragged: use `ragged_all_to_all` on TPUs.
      payload: the codes in which rows are sent to experts, or `None`; rows are returned as they are.
    """

    axes: tuple[str, ...]
    devices: int
    max_rows: int
    rows: int
    ragged: bool
    payload: CodedWire | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def carry(
    rows: Float[Array, "r e"], sent: Int[Array, " d"], received: Int[Array, " d"], exchange: Exchange, outbound: bool
) -> Float[Array, "q e"]:
    """Send rows to the devices of their experts (`outbound`), or back; each direction is the derivative of the other.

    Before, rows are sorted by destination, `sent` to each. After, the `received` rows from device d begin at
    `d * max_rows`, and the others are zero. Of rounding to codes the derivative is that of no rounding.
    """
    if exchange.payload is None or not outbound:
        return _carry(rows, sent, received, exchange, outbound)
    data = _carry(encode(rows, exchange.payload), sent, received, exchange, outbound)
    return decode(data, exchange.payload, rows.shape[1], rows.dtype)


def _carry(rows: Array, sent: Array, received: Array, exchange: Exchange, outbound: bool) -> Array:
    padded = functools.partial(_padded, exchange=exchange, outbound=outbound)
    if not exchange.ragged:
        return padded(rows, sent, received)
    return lax.platform_dependent(
        rows, sent, received, tpu=functools.partial(_ragged, exchange=exchange, outbound=outbound), default=padded
    )


def _carry_bwd(exchange: Exchange, outbound: bool, residuals: tuple[Array, ...], d: Array) -> tuple[Array, None, None]:
    return carry(d, *residuals, exchange, not outbound), None, None


carry.defvjp(lambda rows, s, r, exchange, outbound: (carry(rows, s, r, exchange, outbound), (s, r)), _carry_bwd)


def _padded(rows: Array, sent: Array, received: Array, *, exchange: Exchange, outbound: bool) -> Array:
    """`carry` by an ordinary all-to-all of `max_rows` rows for every device."""
    starts = jnp.cumsum(sent) - sent
    if outbound:
        at = starts[:, None] + jnp.arange(exchange.max_rows)
        at = jnp.where(jnp.arange(exchange.max_rows) < sent[:, None], at, exchange.rows).reshape(-1)
        return lax.all_to_all(jnp.take(rows, at, axis=0, mode="fill", fill_value=0), exchange.axes, 0, 0, tiled=True)
    rows = lax.all_to_all(rows, exchange.axes, 0, 0, tiled=True)
    i = jnp.arange(exchange.rows)
    of = jnp.sum(i[:, None] >= jnp.cumsum(sent), axis=-1)  # the number of devices for rows that were not sent
    at = of * exchange.max_rows + i - jnp.take(starts, of, mode="clip")
    return jnp.take(rows, jnp.where(of < exchange.devices, at, len(rows)), axis=0, mode="fill", fill_value=0)


def _ragged(rows: Array, sent: Array, received: Array, *, exchange: Exchange, outbound: bool) -> Array:
    """`carry` by a ragged all-to-all, which sends only rows that have an expert."""
    sorted_starts = (jnp.cumsum(sent) - sent).astype(jnp.int32)
    received_starts = jnp.arange(exchange.devices, dtype=jnp.int32) * exchange.max_rows
    sent, received = sent.astype(jnp.int32), received.astype(jnp.int32)
    if outbound:
        me = jnp.full(exchange.devices, lax.axis_index(exchange.axes) * exchange.max_rows, jnp.int32)
        begin, sizes, end, coming, size = sorted_starts, sent, me, received, exchange.devices * exchange.max_rows
    else:
        theirs = lax.all_to_all(sorted_starts, exchange.axes, 0, 0, tiled=True)
        begin, sizes, end, coming, size = received_starts, received, theirs, sent, exchange.rows
    empty = jnp.zeros((size, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(rows, empty, begin, sizes, end, coming, axis_name=exchange.axes)
