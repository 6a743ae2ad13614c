"""Rows of tokens in few bits: the codes of a `Wire`, with their scales, as one array of bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxscale.errors import ConfigError
from jaxscale.parallel.wires import CodedWire


def check_payload(owner: object, wire: CodedWire | None) -> None:
    """Check a dispatcher's `payload`.

    Args:
      owner: the dispatcher.
      wire: its payload.

    Raises:
      ConfigError: a format without codes, or one that would keep rounding errors.
    """
    setting = f"{type(owner).__name__}.payload"
    if wire is None:
        return
    if not isinstance(wire, CodedWire):
        raise ConfigError(
            f"{setting} = {wire!r}: must be IntegerWire(), SignWire() or None, which sends rows as they are"
        )
    if wire.feedback:
        name = type(wire).__name__
        raise ConfigError(
            f"{setting} = {wire!r} adds rounding errors to what is sent next, which are other tokens; set "
            f"{name}.feedback = False"
        )


def row_bytes(wire: CodedWire | None, width: int, dtype: DTypeLike) -> int:
    """Return the bytes of a row.

    Args:
      wire: the payload's format, or `None`.
      width: numbers of a row.
      dtype: their dtype, if they are sent as they are.
    """
    if wire is None:
        return width * jnp.dtype(dtype).itemsize
    size = wire.block_of((width,))
    return wire.packed_size(width // size, size)


def encode(rows: Float[Array, "r e"], wire: CodedWire) -> UInt8[Array, "r n"]:
    """Return the codes of each row and then its scales.

    Args:
      rows: the rows.
      wire: the format.
    """
    size = wire.block_of(rows.shape)
    codes, scales = wire.encode(rows.astype(jnp.float32).reshape(len(rows), -1, size))
    parts = (lax.bitcast_convert_type(a, jnp.uint8).reshape(len(rows), -1) for a in (codes, scales))
    return jnp.concatenate(tuple(parts), axis=1)


def decode(data: UInt8[Array, "r n"], wire: CodedWire, width: int, dtype: DTypeLike) -> Float[Array, "r e"]:
    """Return the rows that `encode` made bytes of; bytes of 0 are rows of 0.

    Args:
      data: the bytes.
      wire: the format.
      width: numbers of a row.
      dtype: dtype of the rows.
    """
    size = wire.block_of((width,))
    blocks = width // size
    one = jax.eval_shape(wire.encode, jax.ShapeDtypeStruct((len(data), blocks, size), jnp.float32))[0]
    codes, scales = data[:, : -4 * blocks], data[:, -4 * blocks :]
    codes = lax.bitcast_convert_type(codes.reshape(one.shape), one.dtype)
    scales = lax.bitcast_convert_type(scales.reshape(len(data), blocks, 4), jnp.float32)
    return wire.decode(codes, scales).reshape(len(data), width).astype(dtype)
