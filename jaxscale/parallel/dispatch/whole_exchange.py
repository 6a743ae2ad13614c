"""Exchanges of a size that does not depend on the data: of all slots, or of all tokens; and their derivatives.

Rows to experts are sent in codes if there is a payload, and so are the cotangents of experts' outputs, which are sent
to experts by the derivatives of `send_back` and `scatter`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Float

from jaxscale.parallel.dispatch.payload import decode, encode
from jaxscale.parallel.wires import CodedWire


def _in_codes(move: Callable[[Array], Array], rows: Array, payload: CodedWire | None) -> Array:
    """Return `move(rows)` for a function that moves whole rows along the last dimension."""
    if payload is None:
        return move(rows)
    data = encode(rows.reshape(-1, rows.shape[-1]), payload)
    data = move(data.reshape(*rows.shape[:-1], data.shape[1]))
    got = decode(data.reshape(-1, data.shape[-1]), payload, rows.shape[-1], rows.dtype)
    return got.reshape(*data.shape[:-1], rows.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def send(slots: Float[Array, "n x c e"], axes: tuple[str, ...], payload: CodedWire | None) -> Float[Array, "m y c e"]:
    """Return what all devices send to this device's experts; the derivative is `send_back`.

    Args:
      slots: slots of all experts.
      axes: the mesh axes.
      payload: the codes in which rows are sent, or `None`.
    """
    return _in_codes(lambda a: lax.all_to_all(a, axes, 1, 0, tiled=True), slots, payload)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def send_back(
    slots: Float[Array, "m y c e"], axes: tuple[str, ...], payload: CodedWire | None
) -> Float[Array, "n x c e"]:
    """Return slots from the devices of their experts; the derivative is `send`.

    Args:
      slots: slots of this device's experts, of all devices.
      axes: the mesh axes.
      payload: the codes in which the derivative is sent, or `None`.
    """
    return lax.all_to_all(slots, axes, 0, 1, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(rows: Float[Array, "r e"], axes: tuple[str, ...], payload: CodedWire | None) -> Float[Array, "q e"]:
    """Return the rows of all devices along mesh axes, one axis after another; the derivative is `scatter`.

    Args:
      rows: this device's rows.
      axes: the mesh axes.
      payload: the codes in which rows are sent, or `None`.
    """

    def along_each(a: Array) -> Array:  # across first, while a device has only its own rows
        for dim, m in enumerate(axes):
            a = lax.all_gather(a, m, axis=dim)
        return a.reshape(-1, a.shape[-1])

    return _in_codes(along_each, rows, payload)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter(rows: Float[Array, "q e"], axes: tuple[str, ...], payload: CodedWire | None) -> Float[Array, "r e"]:
    """Return this device's rows of the sum over devices (a reduce-scatter); the derivative is `gather`.

    Args:
      rows: rows of all devices.
      axes: the mesh axes.
      payload: the codes in which the derivative is sent, or `None`.
    """
    # one mesh axis after another, the outermost last: a scatter over all chips is compiled to an all-reduce for TPUs
    rows = rows.reshape(*(lax.axis_size(m) for m in axes), -1, rows.shape[1])
    for dim in reversed(range(len(axes))):
        rows = lax.psum_scatter(rows, axes[dim], scatter_dimension=dim)
    return rows


for forth, back in ((send, send_back), (gather, scatter)):
    for one, other in ((forth, back), (back, forth)):
        one.defvjp(
            lambda a, axes, payload, one=one: (one(a, axes, payload), None),
            lambda axes, payload, _, d, other=other: (other(d, axes, payload),),
        )
