"""Number types of few bits: which number each code stands for."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxscale.errors import ConfigError, near
from pallas_kernels.stored_matmul import Floats, Integers, Numbers, Powers, Table

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 numbers of nf4, quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E)."""


@dataclasses.dataclass(frozen=True)
class NumberType:
    """A type of numbers: a table of what each code stands for.

    Args:
      name: its name, see `numbers_of`.
      bits: of a code, 1 to 8.
      values: float32 number of each code, 2^bits of them; NaN and infinity where a code stands for them.
      mean: whether a group's scale is its mean absolute value, and not the largest one over `largest`.
      parts: bits of exponent and mantissa of a float with a sign; `None` for other types.
    """

    name: str
    bits: int
    values: tuple[float, ...]
    mean: bool = False
    parts: tuple[int, int] | None = None

    @property
    def largest(self) -> float:
        """The largest finite number; a group's largest weight becomes it."""
        return max(v for v in self.values if np.isfinite(v))

    @property
    def smallest(self) -> float:
        """The smallest number above 0 that float32 has as a normal number."""
        return min(v for v in self.values if v >= float(np.finfo(np.float32).tiny))

    @property
    def nan(self) -> int | None:
        """The first code that stands for NaN, which only types of 8 bits have; else `None`."""
        return next((c for c, v in enumerate(self.values) if self.bits == 8 and np.isnan(v)), None)

    @property
    def computed(self) -> Numbers | None:
        """The numbers as a kernel computes them from codes; `None` if it cannot."""
        if (low := _lowest(self)) is not None:
            return Integers(self.bits, signed=low < 0)
        if self.parts is not None:
            return Floats(*self.parts)
        return Powers() if self.name == "e8m0" else Table(self.values) if self.bits <= 4 else None

    def decode(self, codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
        """Return the float32 numbers of codes.

        Args:
          codes: uint8, each below 2^bits.
        """
        if (low := _lowest(self)) is not None:
            mask = np.uint8(low & (2**self.bits - 1))  # the lowest number's code becomes 0
            return (codes ^ mask).astype(jnp.float32) + np.float32(low)
        if self.bits > 4:
            assert self.computed is not None
            return self.computed.decode(codes.astype(jnp.int32))
        return from_table(codes, jnp.asarray(self.values, jnp.float32), self.bits)

    def encode(self, x: Float[Array, "..."]) -> UInt8[Array, "..."]:
        """Return the codes of the nearest finite numbers; between two equally near ones, the even code.

        Args:
          x: numbers, in units of the scale; those beyond the largest number become it, and NaN becomes NaN where the
            type has it.
        """
        if (low := _lowest(self)) is not None:
            whole = jnp.clip(jnp.round(x.astype(jnp.float32)), low, low + 2**self.bits - 1)
            return (whole.astype(jnp.int32) & (2**self.bits - 1)).astype(jnp.uint8)
        codes, bounds = _bounds(self)
        method = "compare_all" if len(codes) <= 16 else "scan_unrolled"
        place = jnp.searchsorted(bounds, x.astype(jnp.float32), side="left", method=method)
        nearest = jnp.asarray(codes)[place]
        return nearest if self.nan is None else jnp.where(jnp.isnan(x), jnp.uint8(self.nan), nearest)


def from_table(codes: UInt8[Array, "..."], table: Float[Array, " n"], bits: int) -> Float[Array, "..."]:
    """Look up codes in a table, by selections up to 4 bits (devices without fast gathers), else by a gather.

    Args:
      codes: uint8, each below 2^bits.
      table: float32.
      bits: of a code.
    """
    if bits > 4:
        return table[codes.astype(jnp.int32)]
    rows = [table[n] for n in range(2**bits)]
    for bit in range(bits):
        high = (codes >> bit) & 1 == 1
        rows = [jnp.where(high, b, a) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


@functools.cache
def _lowest(numbers: NumberType) -> int | None:
    """Return the lowest number if codes are integers in two's complement or without a sign; else `None`."""
    for low in (0, -(2 ** (numbers.bits - 1))):
        if numbers.values == tuple(float((c ^ -low) + low) for c in range(2**numbers.bits)):
            return low
    return None


@functools.cache
def _bounds(numbers: NumberType) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of finite numbers in rising order, and the largest number that still takes each but the last."""
    first: dict[float, int] = {}
    for code, value in enumerate(numbers.values):
        if np.isfinite(value):
            first.setdefault(value + 0.0, code)  # -0 is 0
    values = np.asarray(sorted(first), np.float32)
    codes = np.asarray([first[float(v)] for v in sorted(first)], np.uint8)
    middle = ((values[:-1].astype(np.float64) + values[1:].astype(np.float64)) / 2).astype(np.float32)
    even = codes[1:] % 2 == 0  # a number in the middle goes to the upper one
    return codes, np.where(even, np.nextafter(middle, np.float32(-np.inf)), middle).astype(np.float32)


@functools.cache
def numbers_of(name: str) -> NumberType:
    """Return a type of numbers by its name.

    `int2` to `int8` are integers in two's complement, symmetric around 0 when weights are encoded; `uint1` to `uint8`
    are for zero points; `binary` is -1 and 1, `ternary` -1, 0 and 1, both with the mean absolute value as the scale;
    `nf4` has the quantiles of a normal distribution; `eXmY` is any float of a sign, X bits of exponent and Y of
    mantissa, 2 to 8 bits together, as `e2m1`; `e8m0` is a power of two, for scales.

    Args:
      name: its name.

    Raises:
      ConfigError: there is no such type.
    """
    if match := re.fullmatch(r"(u?)int([1-8])", name):
        bits = int(match[2])
        half = 0 if match[1] else 2 ** (bits - 1)
        if match[1] or bits > 1:
            return NumberType(name, bits, tuple(float((c ^ half) - half) for c in range(2**bits)))
    if name == "e8m0":
        return NumberType(name, 8, (*(float(np.float32(2.0) ** e) for e in range(-127, 128)), float("nan")))
    if match := re.fullmatch(r"e([1-8])m([0-7])", name):
        exponent, mantissa = int(match[1]), int(match[2])
        if exponent + mantissa <= 7:
            return NumberType(name, 1 + exponent + mantissa, _floats(exponent, mantissa), parts=(exponent, mantissa))
    if name in _NAMED:
        return _NAMED[name]
    examples = [*_NAMED, *(f"int{b}" for b in range(2, 9)), *(f"uint{b}" for b in range(1, 9)), *_FLOATS]
    raise ConfigError(
        f"there are no numbers '{name}'{near(name, examples) or '; there are ' + ', '.join(examples)}; any eXmY with a "
        "sign and up to 8 bits together is one"
    )


_NAMED = {
    "nf4": NumberType("nf4", 4, NF4),
    "ternary": NumberType("ternary", 2, (0.0, 1.0, float("nan"), -1.0), mean=True),
    "binary": NumberType("binary", 1, (-1.0, 1.0), mean=True),
}
_FLOATS = ("e2m1", "e3m2", "e2m3", "e4m3", "e5m2", "e8m0")


def _floats(exponent: int, mantissa: int) -> tuple[float, ...]:
    """Return the numbers of a float type: below 8 bits all are finite, as of the OCP's types."""
    bits = 1 + exponent + mantissa
    bias = 2 ** (exponent - 1) - 1
    values = []
    for code in range(2 ** (bits - 1)):
        e, m = code >> mantissa, code & (2**mantissa - 1)
        last = e == 2**exponent - 1
        if bits == 8 and (exponent, mantissa) == (4, 3):  # one NaN and no infinity (e4m3fn)
            special = np.nan if last and m == 2**mantissa - 1 else None
        elif bits == 8 and mantissa > 0:  # as IEEE 754
            special = (np.nan if m else np.inf) if last else None
        else:
            special = None
        whole = m * 2.0 ** (1 - bias - mantissa) if e == 0 else (1 + m * 2.0**-mantissa) * 2.0 ** (e - bias)
        values.append(whole if special is None else special)
    return tuple(float(s * v) for s in (1.0, -1.0) for v in values)
