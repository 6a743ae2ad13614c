"""What codes of 1 to 8 bits stand for, computed from the codes' bits: for kernels, without gathers and subnormals."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Integers:
    """Integers, in two's complement or without a sign.

    Args:
      bits: of a code.
      signed: whether they are in two's complement.
    """

    bits: int
    signed: bool = True

    def decode(self, codes: jax.Array, table: Any = None) -> jax.Array:
        """Return the float32 number of each code.

        Args:
          codes: int32, 0 to 2^bits - 1.
          table: unused.
        """
        if self.signed:
            half = 2 ** (self.bits - 1)
            codes = (codes ^ half) - half
        return codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Floats:
    """Floats of a sign, an exponent and a mantissa; NaN and infinity of e4m3 and of IEEE's types of 8 bits.

    Args:
      exponent: its bits.
      mantissa: its bits.
    """

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent + self.mantissa

    def decode(self, codes: jax.Array, table: Any = None) -> jax.Array:
        """Return float32 numbers; none on the way is subnormal, which a device may count as 0.

        Args:
          codes: int32, 0 to 2^bits - 1.
          table: unused.
        """
        e_bits, m_bits = self.exponent, self.mantissa
        bias = 2 ** (e_bits - 1) - 1
        m, e = codes & (2**m_bits - 1), (codes >> m_bits) & (2**e_bits - 1)
        wide = e + (127 - bias)
        if e_bits + m_bits == 7 and m_bits > 0:
            last = e == 2**e_bits - 1
            last = last & (m == 2**m_bits - 1) if (e_bits, m_bits) == (4, 3) else last
            wide = jnp.where(last, 255, wide)
        normal = lax.bitcast_convert_type((wide << 23) | (m << (23 - m_bits)), jnp.float32)
        small = m.astype(jnp.float32) * np.float32(2.0 ** (1 - bias - m_bits))
        value = jnp.where(e == 0, small, normal)
        return jnp.where((codes >> (e_bits + m_bits)) == 1, -value, value)


@dataclasses.dataclass(frozen=True)
class Powers:
    """Powers of two, 2^(code - 127); 255 is NaN (e8m0 of the OCP's MX formats)."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8

    def decode(self, codes: jax.Array, table: Any = None) -> jax.Array:
        """Return the float32 number of each code.

        Args:
          codes: int32, 0 to 2^bits - 1.
          table: unused.
        """
        bits = jnp.where(codes == 0, 1 << 22, codes << 23)
        value = lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(codes == 255, jnp.float32(jnp.nan), value)


@dataclasses.dataclass(frozen=True)
class Table:
    """Any numbers.

    Args:
      values: the float32 number of each code, 2 to 16 of them.
    """

    values: tuple[float, ...]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.values) - 1).bit_length()

    def decode(self, codes: jax.Array, table: Any = None) -> jax.Array:
        """Return the float32 number of each code, by selections.

        Args:
          codes: int32, 0 to 2^bits - 1.
          table: unused.
        """
        return _select(codes, [jnp.float32(v) for v in self.values])


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Numbers of an array, one for each code, such as centres of clusters.

    Args:
      bits: of a code, 1 to 4.
    """

    bits: int

    def decode(self, codes: jax.Array, table: Any = None) -> jax.Array:
        """Return the float32 number of each code, by selections.

        Args:
          codes: int32, 0 to 2^bits - 1.
          table: the numbers, one for each code.
        """
        return _select(codes, [table[i] for i in range(2**self.bits)])


Numbers = Integers | Floats | Powers | Table | Codebook


def _select(codes: jax.Array, rows: list[Any]) -> jax.Array:
    bit = 0
    while len(rows) > 1:
        high = ((codes >> bit) & 1) == 1
        rows = [jnp.where(high, b, a) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        bit += 1
    return jnp.broadcast_to(rows[0], codes.shape)
