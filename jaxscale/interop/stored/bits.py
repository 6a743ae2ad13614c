"""Codes of a few bits in wider words, and small floats, as they are in files."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of fp4 (e2m1) by code: sign, two bits of exponent, one of mantissa (Open Compute Project, MX 1.0)."""


def unpack(words: np.ndarray, bits: int, count: int) -> UInt8[np.ndarray, "... n"]:
    """Unpack codes from words along the last dimension.

    Code i is in the bits from `bits * i` on, the lowest first, without gaps: it may begin in one word and end in the
    next.

    Args:
      words: integers of any width, little-endian.
      bits: 1 to 8, the bits of a code.
      count: number of codes of a row.
    """
    rows = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-1], -1)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (rows[..., None] >> shifts) & np.uint8(2**bits - 1)
        return codes.reshape(*rows.shape[:-1], -1)[..., :count]
    single = np.unpackbits(rows, axis=-1, count=bits * count, bitorder="little")
    powers = (1 << np.arange(bits)).astype(np.uint8)
    return single.reshape(*rows.shape[:-1], count, bits) @ powers


def pack(codes: UInt8[np.ndarray, "rows n"], bits: int) -> np.ndarray:
    """Pack the codes of each row into int32 words; the inverse of `unpack`.

    Args:
      codes: below 2^bits.
      bits: 1 to 8, the bits of a code.
    """
    whole = np.zeros((len(codes), 4 * words_of(codes.shape[1], bits)), np.uint8)
    packed = pack_along(codes, bits, -1)
    whole[:, : packed.shape[1]] = packed
    return whole.view(np.int32)


def pack_along(codes: UInt8[np.ndarray, "..."], bits: int, axis: int) -> UInt8[np.ndarray, "..."]:
    """Pack codes into bytes along a dimension, the lowest bit first and without gaps; the last byte may not be full.

    Args:
      codes: below 2^bits.
      bits: 1 to 8, the bits of a code.
      axis: the dimension.
    """
    moved = np.moveaxis(codes, axis, -1)
    if bits == 8:
        packed = moved
    elif 8 % bits == 0 and moved.shape[-1] % (8 // bits) == 0:
        parts = moved.reshape(*moved.shape[:-1], -1, 8 // bits)
        packed = np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)
    else:
        single = np.unpackbits(moved[..., None], axis=-1, count=bits, bitorder="little")
        packed = np.packbits(single.reshape(*moved.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def words_of(count: int, bits: int, width: int = 32) -> int:
    """Return the number of words that hold codes.

    Args:
      count: number of codes.
      bits: bits of a code.
      width: bits of a word.
    """
    return -(-count * bits // width)


def e2m1(codes: UInt8[np.ndarray, "... n"]) -> Float[np.ndarray, "... 2*n"]:
    """Return the float32 values of pairs of fp4 codes, the lower four bits of a byte first.

    Args:
      codes: the bytes.
    """
    return E2M1[unpack(codes, 4, 2 * codes.shape[-1])]


def e8m0(exponents: UInt8[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return the float32 powers of two of biased exponents, 2^(e - 127); 255 is NaN.

    Args:
      exponents: the bytes.
    """
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers).astype(np.float32)
