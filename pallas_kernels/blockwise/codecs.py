"""Eight-bit codes for numbers in [-1, 1] or [0, 1]: a block's numbers divided by the block's largest magnitude.

A codec is pure arithmetic, without tables or gathers, so that the same code runs under XLA, Mosaic TPU and Mosaic GPU.
To add a codec, add a class here and its name to `FORMATS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.dispatch import KernelError
from pallas_kernels.errors import did_you_mean

MOMENT_DOWN = 1.05**2
"""Largest factor by which a code may be below a second moment: the step, divided by its root, grows by at most 5%."""


class Codec(Protocol):
    """An 8-bit code; `values()[i]` belongs to the i-th code in ascending order."""

    name: ClassVar[str]

    @property
    def signed(self) -> bool:
        """Whether it covers [-1, 1], else [0, 1]."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the stored codes."""
        ...

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of the nearest values; of a tie either one, of a NaN any.

        Args:
          x: float32 in [-1, 1], or in [0, 1] if unsigned.
        """
        ...

    def encode_moment(self, x: jax.Array) -> jax.Array:
        """Encode an optimizer's moments: as `encode` if signed, and safe to divide by the root of if unsigned.

        Unsigned, a positive number never becomes 0, and the dynamic map rounds down by a tenth at most, so that
        rounding hardly enlarges a step.

        Args:
          x: float32 in [-1, 1], or in [0, 1] if unsigned.
        """
        ...

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of codes.

        Args:
          codes: of `dtype`.
        """
        ...

    def scales(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """Return the scale to store for each block.

        Args:
          blocks: float32 in blocks, see `reference.blocks_of`.
          largest: each block's largest magnitude, of a shape that broadcasts against `blocks`.
        """
        ...

    def bend(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        """Return what `encode` takes of numbers divided by their scale.

        Args:
          x: float32 in [-1, 1] or [0, 1].
          scales: the blocks' scales, which broadcast against x.
        """
        ...

    def unbend(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        """Undo `bend`.

        Args:
          x: what `decode` returned.
          scales: as for `bend`.
        """
        ...

    def order(self, codes: jax.Array) -> jax.Array:
        """Return int32 indices into `values()`.

        Args:
          codes: of `dtype`.
        """
        ...

    def at(self, places: jax.Array) -> jax.Array:
        """Return the codes at indices of `values()`.

        Args:
          places: int32 indices, clipped to the length of `values()`.
        """
        ...

    def values(self) -> np.ndarray:
        """Return the values of all codes, float64, ascending (tests)."""
        ...


class Straight:
    """Of a codec whose blocks have a scale and nothing else."""

    def scales(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """Return `largest`."""
        return largest

    def bend(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        """Return x."""
        return x

    def unbend(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        """Return x."""
        return x


@dataclasses.dataclass(frozen=True)
class Dynamic(Straight):
    """The dynamic map (Dettmers, Lewis, Shleifer & Zettlemoyer 2022, "8-bit Optimizers via Block-wise Quantization").

    Seven decades from 1e-6 to 1. Decade i holds the 2**i (unsigned: 2 * 2**i) midpoints of an even division of
    [0.1, 1] * 10**(i - 6); 0 and 1 are values, too. So large numbers get precision and small ones range. Codes are
    uint8 in ascending order of value; signed, 127 is zero and -1 has no code (the nearest value is -0.993).

    Both directions are closed forms. With a the code's distance from zero and h = a + 1/2 (unsigned: a + 3/2), the
    exponent of h is the decade, and its mantissa m in [1, 2) gives 10**(i - 6) * (0.9 m - 0.8).

    Args:
      signed: cover [-1, 1] instead of [0, 1].
    """

    signed: bool
    name: ClassVar[str] = "dynamic"

    @property
    def dtype(self) -> np.dtype:
        """uint8."""
        return np.dtype(np.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of codes."""
        # 2**23 | code, as the bits of a float32, is 2**23 + code: cheaper on a GPU than converting an integer.
        x = _float(codes.astype(jnp.int32) | 0x4B000000)
        if not self.signed:
            return _decoded(x - (2.0**23 - 1.5))
        twice = _float(codes.astype(jnp.int32) | 0x4B800000) - (2.0**24 + 2 * 127.0)
        magnitude = _decoded(jnp.abs(twice) + 1.0)
        return _float(_bits(magnitude) | (_bits(twice) & _SIGN))

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of the nearest values."""
        return self._encode(x, at_most_down=None)

    def encode_moment(self, x: jax.Array) -> jax.Array:
        """Encode moments; unsigned, down by at most `MOMENT_DOWN` and never to 0."""
        return self._encode(x, at_most_down=None if self.signed else MOMENT_DOWN)

    def _encode(self, x: jax.Array, *, at_most_down: float | None) -> jax.Array:
        """Return the nearest code, or the next above where the nearest is lower than x by more than `at_most_down`."""
        a = jnp.abs(x) if self.signed else x
        # Bisect for the three bits of the decade i; y = a * 10**(6 - i) ends in (0.1, 1], and n is the decade's size.
        first = 1.0 if self.signed else 2.0
        b2 = a > np.float32(1e-3)
        y = jnp.where(b2, a, a * np.float32(1e4))
        b1 = y > np.float32(0.1)
        y = jnp.where(b1, y, y * np.float32(100))
        b0 = y > 1.0
        y = jnp.where(b0, y * np.float32(0.1), y)
        n = jnp.where(b2, 16 * first, first)
        n = jnp.where(b1, n * 4.0, n)
        n = jnp.where(b0, n + n, n)
        # Midpoints between codes are where n * (y / 0.9 + 8 / 9) is whole: subtract 1/2 and round. A factor slightly
        # below 1 / 0.9 keeps y = 1 in its decade.
        ninths = y * np.float32((1 - 4e-7) / 0.9)
        place = (ninths + np.float32(8 / 9)) * n - 0.5
        if at_most_down is not None:
            # x / at_most_down lies this much lower; round that up by adding the rest of 1/2, if positive.
            place = place + jnp.maximum(0.5 - ninths * n * np.float32(1 - 1 / at_most_down), 0.0)
        # For the first 0.2 of a step of a decade the last code of the decade below is nearer; in the lowest one, 0 is
        # nearer up to half of its first value.
        zero, one = _EDGES[self.signed]
        edge = jnp.where(a < np.float32(1e-6), (zero * 1e6 / 0.9 + 8 / 9) * first - 0.5, n - 0.3)
        place = jnp.where(place < edge, place - 0.5, place)
        if not self.signed:  # decade i starts at code n - 1
            place = jnp.where(a > np.float32(one), 256.0, place)
            if at_most_down is not None:
                place = jnp.where(x > 0, place, 1.0)
            return (_rounded(place, -1) & 0xFF).astype(jnp.uint8)
        place = _float(_bits(place) | (_bits(x) & _SIGN))
        return (_rounded(jnp.where(x > np.float32(one), 128.0, place), 127) & 0xFF).astype(jnp.uint8)

    def order(self, codes: jax.Array) -> jax.Array:
        """Return int32 indices into `values()`."""
        return codes.astype(jnp.int32)

    def at(self, places: jax.Array) -> jax.Array:
        """Return the codes at indices of `values()`."""
        return jnp.clip(places, 0, 255).astype(jnp.uint8)

    def values(self) -> np.ndarray:
        """Return the values of all codes, float64, ascending."""
        positive = _dynamic_positive(self.signed)
        return np.concatenate([-positive[-2::-1], [0.0], positive] if self.signed else [[0.0], positive])


@dataclasses.dataclass(frozen=True)
class Linear(Straight):
    """Evenly spaced: int8 codes -127 to 127 of 127ths, or uint8 codes of 255ths. Too coarse near zero for Adam's v.

    Args:
      signed: cover [-1, 1] instead of [0, 1].
    """

    signed: bool
    name: ClassVar[str] = "linear"

    @property
    def dtype(self) -> np.dtype:
        """int8 if signed, else uint8."""
        return np.dtype(np.int8 if self.signed else np.uint8)

    @property
    def _top(self) -> float:
        return 127.0 if self.signed else 255.0

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of codes."""
        return codes.astype(jnp.int32).astype(jnp.float32) * np.float32(1 / self._top)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of the nearest values."""
        x = jnp.clip(x * self._top, -self._top if self.signed else 0.0, self._top)
        return _rounded(x, 0).astype(self.dtype)

    def encode_moment(self, x: jax.Array) -> jax.Array:
        """Encode moments; unsigned, a positive number gets at least code 1."""
        return self.encode(x if self.signed else jnp.where(x > 0, jnp.maximum(x, np.float32(1 / self._top)), x))

    def order(self, codes: jax.Array) -> jax.Array:
        """Return int32 indices into `values()`."""
        return codes.astype(jnp.int32) + (127 if self.signed else 0)

    def at(self, places: jax.Array) -> jax.Array:
        """Return the codes at indices of `values()`."""
        if not self.signed:
            return jnp.clip(places, 0, 255).astype(jnp.uint8)
        return (jnp.clip(places, 0, 254) - 127).astype(jnp.int8)

    def values(self) -> np.ndarray:
        """Return the values of all codes, float64, ascending."""
        return np.arange(-127 if self.signed else 0, self._top + 1) / self._top


@dataclasses.dataclass(frozen=True)
class Float8(Straight):
    """float8_e4m3fn (Micikevicius et al. 2022), a block's largest magnitude at 448; unsigned, the sign is unused.

    Args:
      signed: cover [-1, 1] instead of [0, 1].
    """

    signed: bool
    name: ClassVar[str] = "fp8"

    @property
    def dtype(self) -> np.dtype:
        """float8_e4m3fn."""
        return np.dtype(jnp.float8_e4m3fn)

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of codes."""
        return codes.astype(jnp.float32) * np.float32(1 / 448)

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of the nearest values."""
        return (x * 448.0).astype(jnp.float8_e4m3fn)

    def encode_moment(self, x: jax.Array) -> jax.Array:
        """Encode moments; unsigned, a positive number becomes at least the smallest positive value."""
        return self.encode(x if self.signed else jnp.where(x > 0, jnp.maximum(x, np.float32(2.0**-9 / 448)), x))

    def order(self, codes: jax.Array) -> jax.Array:
        """Return int32 indices into `values()`."""
        bits = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
        if not self.signed:
            return bits & 0x7F
        return 126 + jnp.where(bits >= 128, -(bits & 0x7F), bits)

    def at(self, places: jax.Array) -> jax.Array:
        """Return the codes at indices of `values()`."""
        if self.signed:
            places = jnp.clip(places - 126, -126, 126)
            places = jnp.where(places < 0, 128 - places, places)
        else:
            places = jnp.clip(places, 0, 126)
        return lax.bitcast_convert_type(places.astype(jnp.uint8), jnp.float8_e4m3fn)

    def values(self) -> np.ndarray:
        """Return the values of all codes, float64, ascending."""
        positive = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64) / 448
        return np.concatenate([-positive[:0:-1], positive]) if self.signed else positive


_POWER_BITS = 0x7F
"""The bits of a stored scale, its lowest seven, that are the number of the block's power."""


@dataclasses.dataclass(frozen=True)
class ExpandedFloat8(Float8):
    """`Float8` with dynamic range expansion (Xi et al. 2024, "COAT"): a number of a block is raised to a power first.

    The power k takes a block's range, its largest over its smallest magnitude, to that of float8_e4m3fn, whose relative
    error then counts 1/k. It is one of 128 from 1/16 to 15.3, rounded down, and its number takes the lowest seven bits
    of the scale, which changes the scale by less than 2**-16: a block takes no more bytes.

    Args:
      signed: see `Float8`.
    """

    name: ClassVar[str] = "fp8_expanded"

    def scales(self, blocks: jax.Array, largest: jax.Array) -> jax.Array:
        """Return the largest magnitude with the power's number in its lowest bits."""
        inside = tuple(d for d in range(blocks.ndim) if largest.shape[d] == 1 and blocks.shape[d] > 1)
        a = jnp.abs(blocks)
        smallest = jnp.min(jnp.where(a > 0, a, jnp.inf), axis=inside, keepdims=True).reshape(largest.shape)
        span = jnp.log2(largest) - jnp.log2(smallest)  # 0 if all are equal
        power = np.float32(np.log2(448.0) + 9) / jnp.maximum(span, np.float32(1e-3))
        number = jnp.clip(jnp.floor(16 * jnp.log2(power)) + 64, 0, _POWER_BITS).astype(jnp.int32)
        packed = _float((_bits(largest) & ~_POWER_BITS) | number)
        return jnp.where((largest > 0) & (largest < jnp.inf), packed, largest)

    def bend(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        """Return |x| to the block's power, with the sign of x."""
        return jnp.sign(x) * jnp.minimum(jnp.abs(x), 1.0) ** _power(scales) + 0 * x  # NaN stays

    def unbend(self, x: jax.Array, scales: jax.Array) -> jax.Array:
        """Undo `bend`."""
        return jnp.sign(x) * jnp.abs(x) ** (1 / _power(scales))


def _power(scales: jax.Array) -> jax.Array:
    """Return the power whose number is in the lowest bits of a scale."""
    return jnp.exp2(((_bits(scales) & _POWER_BITS) - 64).astype(jnp.float32) / 16)


FORMATS: Mapping[str, tuple[Codec, Codec]] = {
    kind.name: (kind(False), kind(True)) for kind in (Dynamic, Linear, Float8, ExpandedFloat8)
}
"""A format's name -> its codec for unsigned and for signed numbers."""


def codec(format: str, signed: bool) -> Codec:
    """Return the codec of a format.

    Args:
      format: "dynamic", "linear", "fp8" or "fp8_expanded".
      signed: for numbers of both signs.

    Raises:
      KernelError: there is no such format.
    """
    if format not in FORMATS:
        hint = did_you_mean(str(format), FORMATS)
        raise KernelError(f"there is no 8-bit format '{format}'; the formats are {', '.join(map(repr, FORMATS))}{hint}")
    return FORMATS[format][bool(signed)]


def encode_stochastic(codec: Codec, x: jax.Array, key: jax.Array) -> jax.Array:
    """Round x at random to one of the two values around it, so that the mean is x; a value of the codec stays.

    Args:
      codec: the codec.
      x: float32 in the codec's range. Beyond its last value there is one neighbour only (-1 under `Dynamic`).
      key: of `jax.random`.

    Returns:
      codes of x's shape.
    """
    place = codec.order(codec.encode(x))
    near = codec.decode(codec.at(place))
    other = codec.decode(codec.at(jnp.where(x > near, place + 1, place - 1)))
    gap = other - near
    chance = jnp.where(gap == 0, 0.0, (x - near) / jnp.where(gap == 0, 1.0, gap))
    step = jnp.where(x > near, 1, -1)
    return codec.at(jnp.where(jax.random.uniform(key, x.shape) < chance, place + step, place))


# ---- the dynamic map's numbers

_SIGN = np.int32(-(2**31))


def _dynamic_positive(signed: bool) -> np.ndarray:
    """Return the positive values of the dynamic map, ascending, float64."""
    out = []
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        out.append(10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(n) + 0.5) / n))
    return np.concatenate([*out, [1.0]])


def _edges(signed: bool) -> tuple[float, float]:
    """Return the number below which 0 is the nearest value, and the number above which 1 is."""
    positive = _dynamic_positive(signed)
    return float(positive[0] / 2), float((1 + positive[-2]) / 2)


_EDGES = (_edges(False), _edges(True))


def _decoded(f: jax.Array) -> jax.Array:
    """Map f = 2**(i + 1) * m to 10**(i - 6) * (0.9 m - 0.8), at most 1; 0 where f < 2, which is the code of zero."""
    bits = _bits(f)
    mantissa = _float((bits & 0x007FFFFF) | 0x3F800000)
    value = mantissa * np.float32(0.9e-6) - np.float32(0.8e-6)
    # The exponent field is 128 + i, so its low bits are those of i.
    for bit, power in ((1, 1e1), (2, 1e2), (4, 1e4)):
        value = jnp.where((bits & (bit << 23)) != 0, value * np.float32(power), value)
    return jnp.where(f < 2.0, 0.0, jnp.minimum(value, 1.0))


def _rounded(x: jax.Array, plus: int) -> jax.Array:
    """Return round(x) + plus as int32, for |x| < 2**22: adding 3 * 2**22 leaves the integer in the low bits."""
    return _bits(x + np.float32(3 * 2**22 + plus)) - 0x4B400000


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)
