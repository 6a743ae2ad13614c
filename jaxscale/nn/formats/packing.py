"""Codes of 1 to 8 bits packed in the words of an unsigned type."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, UInt, UInt8


def unit(bits: int, word: int = 8) -> tuple[int, int]:
    """Return the smallest whole piece of packed codes: how many codes it has, and how many words.

    Args:
      bits: of a code, 1 to 8.
      word: bits of a word, 8 or 32.
    """
    both = math.gcd(bits, word)
    return word // both, bits // both


def pack(codes: UInt8[Array, "..."], bits: int, axis: int, word: DTypeLike = jnp.uint8) -> UInt[Array, "..."]:
    """Pack codes along a dimension, without gaps: code k takes the bits k·bits to (k+1)·bits - 1, lowest first.

    Args:
      codes: uint8, each below 2^bits.
      bits: of a code, 1 to 8.
      axis: the dimension, counted from the last as -1; `unit(bits)[0]` divides its size.
      word: the type of the words, uint8 or uint32.

    Returns:
      the same array with `size · bits / (bits of a word)` words along `axis`.

    Raises:
      ValueError: the size is not a whole number of units.
    """
    width = 8 * jnp.dtype(word).itemsize
    per, words = unit(bits, width)
    if bits == width:
        return codes.astype(word)
    at = axis % codes.ndim
    if codes.shape[at] % per:
        raise ValueError(f"{codes.shape[at]} codes of {bits} bits do not fill units of {per}")
    x = codes.reshape(*codes.shape[:at], -1, per, *codes.shape[at + 1 :]).astype(word)
    parts = [jnp.take(x, k, axis=at + 1) for k in range(per)]
    out = [jnp.zeros_like(parts[0]) for _ in range(words)]
    for k, part in enumerate(parts):
        index, shift = divmod(k * bits, width)
        out[index] = out[index] | (part << shift)
        if shift + bits > width:
            out[index + 1] = out[index + 1] | (part >> (width - shift))
    packed = jnp.stack(out, axis=at + 1)
    return packed.reshape(*codes.shape[:at], -1, *codes.shape[at + 1 :])


def unpack(words: UInt[Array, "..."], bits: int, axis: int) -> UInt8[Array, "..."]:
    """Return the codes that `pack` packed.

    Args:
      words: uint8 or uint32.
      bits: of a code.
      axis: the packed dimension, counted from the last as -1.

    Returns:
      uint8 codes.
    """
    width = 8 * words.dtype.itemsize
    per, count = unit(bits, width)
    if bits == width:
        return words.astype(jnp.uint8)
    at = axis % words.ndim
    x = words.reshape(*words.shape[:at], -1, count, *words.shape[at + 1 :])
    parts = [jnp.take(x, n, axis=at + 1) for n in range(count)]
    out = []
    for k in range(per):
        index, shift = divmod(k * bits, width)
        code = parts[index] >> shift
        if shift + bits > width:
            code = code | (parts[index + 1] << (width - shift))
        out.append((code & (2**bits - 1)).astype(jnp.uint8))
    return jnp.stack(out, axis=at + 1).reshape(*words.shape[:at], -1, *words.shape[at + 1 :])
