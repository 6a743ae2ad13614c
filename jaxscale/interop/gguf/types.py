"""The types of tensors in GGUF files: how a block of bytes stands for 32 or 256 values, and back.

The layouts are those of ggml (https://github.com/ggml-org/ggml, `ggml-common.h`). A tensor is a list of blocks along
its last dimension. Scales are float16; sums and products are float32, in the order in which ggml takes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from jaxscale.interop.stored.bits import E2M1

Blocks = UInt8[np.ndarray, "blocks bytes"]
Values = Float[np.ndarray, "blocks values"]
_SUPER = 256


@dataclasses.dataclass(frozen=True)
class GGMLType:
    """A type of tensors.

    Args:
      name: its name in ggml.
      number: its number in files.
      values: values of a block.
      size: bytes of a block.
      decode: blocks -> their values, float32.
      encode: values -> blocks; `None` for types that are only read.
    """

    name: str
    number: int
    values: int
    size: int
    decode: Callable[[Blocks], Values]
    encode: Callable[[Values], Blocks] | None = None


def _plain(name: str, number: int, dtype: np.dtype) -> GGMLType:
    def decode(b: Blocks) -> Values:
        return np.ascontiguousarray(b).view(dtype).astype(np.float32)

    def encode(v: Values) -> Blocks:
        return v.astype(dtype).view(np.uint8).reshape(len(v), -1)

    return GGMLType(name, number, 1, dtype.itemsize, decode, encode)


def _half(b: Blocks, at: int) -> Float[np.ndarray, "blocks 1"]:
    """Return the float16 numbers at a place of each block, as float32."""
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _fours(b: Blocks) -> UInt8[np.ndarray, "blocks values"]:
    """Return codes of four bits: the lower halves of all bytes, then the upper ones."""
    return np.concatenate([b & 15, b >> 4], axis=1)


def _fives(b: Blocks) -> UInt8[np.ndarray, "blocks 32"]:
    """Return codes of five bits: four bytes with the highest bit of each, then the lower four."""
    high = np.unpackbits(np.ascontiguousarray(b[:, :4]), axis=1, bitorder="little")
    return _fours(b[:, 4:]) | (high << 4)


def _q4_0(b: Blocks) -> Values:
    return _half(b, 0) * (_fours(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Blocks) -> Values:
    return _half(b, 0) * _fours(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Blocks) -> Values:
    return _half(b, 0) * (_fives(b[:, 2:]).astype(np.float32) - 16)


def _q5_1(b: Blocks) -> Values:
    return _half(b, 0) * _fives(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q8_0(b: Blocks) -> Values:
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _iq4_nl(b: Blocks) -> Values:
    return _half(b, 0) * _NL[_fours(b[:, 2:])]


def _mxfp4(b: Blocks) -> Values:
    values = E2M1[_fours(b[:, 1:])] + np.float32(0)  # ggml has no -0
    return np.ldexp(values, b[:, :1].astype(np.int32) - 127)


def _twos(b: Blocks) -> UInt8[np.ndarray, "blocks 256"]:
    """Return codes of two bits: of each 32 bytes the lowest two bits, then the next, and so on."""
    parts = (b.reshape(len(b), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    return parts.reshape(len(b), -1)


def _q2_k(b: Blocks) -> Values:
    d, m = _half(b, 80), _half(b, 82)
    scale, least = d * (b[:, :16] & 15).astype(np.float32), m * (b[:, :16] >> 4).astype(np.float32)
    codes = _twos(b[:, 16:80]).reshape(len(b), 16, 16).astype(np.float32)
    return (scale[:, :, None] * codes - least[:, :, None]).reshape(len(b), _SUPER)


def _q3_k(b: Blocks) -> Values:
    low = _fours(b[:, 96:104])  # 16 scales of six bits: four bits, then two
    high = ((b[:, 104:108][:, None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(len(b), 16)
    scale = _half(b, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    bits = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _twos(b[:, 32:96]).astype(np.float32) - 4 + 4 * bits.reshape(len(b), _SUPER)
    return (scale[:, :, None] * codes.reshape(len(b), 16, 16)).reshape(len(b), _SUPER).astype(np.float32)


def _scales(b: Blocks) -> tuple[Values, Values]:
    """Return eight scales and eight minima of six bits from twelve bytes."""
    first, second, rest = b[:, :4], b[:, 4:8], b[:, 8:]
    scale = np.concatenate([first & 63, (rest & 15) | ((first >> 2) & 48)], axis=1)
    least = np.concatenate([second & 63, (rest >> 4) | ((second >> 2) & 48)], axis=1)
    return scale.astype(np.float32), least.astype(np.float32)


def _four_k(b: Blocks) -> UInt8[np.ndarray, "blocks 8 32"]:
    """Return codes of four bits: of each 32 bytes the lower halves, then the upper ones."""
    halves = (b.reshape(len(b), -1, 1, 32) >> np.array([0, 4], np.uint8)[:, None]) & 15
    return halves.reshape(len(b), 8, 32)


def _with_minima(b: Blocks, codes: UInt8[np.ndarray, "blocks 8 32"]) -> Values:
    scale, least = _scales(b[:, 4:16])
    scale, least = _half(b, 0) * scale, _half(b, 2) * least
    return (scale[:, :, None] * codes.astype(np.float32) - least[:, :, None]).reshape(len(b), _SUPER)


def _q4_k(b: Blocks) -> Values:
    return _with_minima(b, _four_k(b[:, 16:]))


def _q5_k(b: Blocks) -> Values:
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_minima(b, _four_k(b[:, 48:]) | (high << 4))


def _q6_k(b: Blocks) -> Values:
    low = (b[:, :128].reshape(len(b), 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]) & 15
    high = (b[:, 128:192].reshape(len(b), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = low.reshape(len(b), 8, 32) | (high.reshape(len(b), 8, 32) << 4)
    scale = _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    numbers = codes.reshape(len(b), 16, 16).astype(np.float32) - 32
    return (scale[:, :, None] * numbers).reshape(len(b), _SUPER)


def _inverse(d: Float[np.ndarray, "blocks 1"]) -> Float[np.ndarray, "blocks 1"]:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _to_q8_0(v: Values) -> Blocks:
    """Round to the nearest of 255 multiples of d = max |v| / 127, halves away from zero."""
    d = abs(v).max(axis=1, keepdims=True) / np.float32(127)
    scaled = v * _inverse(d)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([d.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)


def _to_q4_0(v: Values) -> Blocks:
    """Round to 16 multiples of d, where the value of the largest size is -8 d."""
    largest = np.take_along_axis(v, abs(v).argmax(axis=1)[:, None], axis=1)
    d = largest / np.float32(-8)
    codes = np.clip(np.trunc(v * _inverse(d) + np.float32(8.5)), 0, 15).astype(np.uint8)
    return np.concatenate([d.astype(np.float16).view(np.uint8), codes[:, :16] | (codes[:, 16:] << 4)], axis=1)


TYPES: tuple[GGMLType, ...] = (
    _plain("F32", 0, np.dtype(np.float32)),
    _plain("F16", 1, np.dtype(np.float16)),
    _plain("BF16", 30, np.dtype(ml_dtypes.bfloat16)),
    GGMLType("Q4_0", 2, 32, 18, _q4_0, _to_q4_0),
    GGMLType("Q4_1", 3, 32, 20, _q4_1),
    GGMLType("Q5_0", 6, 32, 22, _q5_0),
    GGMLType("Q5_1", 7, 32, 24, _q5_1),
    GGMLType("Q8_0", 8, 32, 34, _q8_0, _to_q8_0),
    GGMLType("Q2_K", 10, 256, 84, _q2_k),
    GGMLType("Q3_K", 11, 256, 110, _q3_k),
    GGMLType("Q4_K", 12, 256, 144, _q4_k),
    GGMLType("Q5_K", 13, 256, 176, _q5_k),
    GGMLType("Q6_K", 14, 256, 210, _q6_k),
    GGMLType("IQ4_NL", 20, 32, 18, _iq4_nl),
    GGMLType("MXFP4", 39, 32, 17, _mxfp4),
)
"""All types that are read; those with `encode` are written, too."""

BY_NUMBER = {t.number: t for t in TYPES}
BY_NAME = {t.name: t for t in TYPES}
PLAIN = ("F32", "F16", "BF16")
"""Types that are floats by themselves."""
