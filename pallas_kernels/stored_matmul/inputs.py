"""The weight of a product: packed codes, and the scales of blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelError
from pallas_kernels.stored_matmul.numbers import Codebook, Integers, Numbers

WORDS = ("uint8", "uint32")
PARTS = ("scale", "zero", "offset")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix (K, N), `(number(codes) - zero) · scale + offset`, packed along K.

    Code k of a column takes the bits k·bits to (k+1)·bits - 1 of the column's words, lowest first. `scale`, `zero` and
    `offset` are (S, N), (S, 1), (1, N) or (1, 1): one for each of S equal blocks of rows.

    Args:
      codes: uint8 or uint32, (K · bits / word, N).
      scale: floats, or uint8 codes of `scale_numbers`; `None` is 1.
      zero: floats, or whole numbers as uint8, in units of the scale; `None` is 0.
      offset: floats; `None` is 0.
      factor: float, (1, 1), a factor of all scales; `None` is 1.
      table: float32 (2^bits,), of a `Codebook`.
      numbers: what codes stand for.
      scale_numbers: what scales that are uint8 stand for.
    """

    codes: jax.Array
    scale: jax.Array | None = None
    zero: jax.Array | None = None
    offset: jax.Array | None = None
    factor: jax.Array | None = None
    table: jax.Array | None = None
    numbers: Numbers = dataclasses.field(default=Integers(4), metadata={"static": True})
    scale_numbers: Numbers = dataclasses.field(default=Integers(8, signed=False), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix' shape, (K, N)."""
        rows, columns = self.codes.shape
        return rows * self.codes.dtype.itemsize * 8 // self.numbers.bits, columns

    def of(self, part: str) -> Numbers:
        """Return what a part's uint8 codes stand for.

        Args:
          part: "scale" or "zero".
        """
        return self.scale_numbers if part == "scale" else Integers(8, signed=False)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a product while tracing.

    Args:
      m: rows of x.
      k: rows of the matrix.
      n: columns of the matrix.
      dtype: of x and of the matrix, once it is unpacked.
      out: dtype of the product.
      transposed: whether the product is x · matrixᵀ.
      word: type of the words.
      numbers: what codes stand for.
      parts: (name, blocks along K, dtype) of each of scale, zero and offset that there is.
    """

    m: int
    k: int
    n: int
    dtype: str
    out: str
    transposed: bool
    word: str
    numbers: Numbers
    parts: tuple[tuple[str, int, str], ...]

    @property
    def unit(self) -> tuple[int, int]:
        """Codes and 32-bit words of the smallest whole piece of a column."""
        both = math.gcd(self.numbers.bits, 32)
        return 32 // both, self.numbers.bits // both


def checked(x: jax.Array, weight: Packed, transposed: bool, out: Any) -> Facts:
    """Return the facts of a product.

    Raises:
      KernelError: shapes or dtypes do not fit.
    """
    if weight.codes.ndim != 2 or str(weight.codes.dtype) not in WORDS:
        raise KernelError(
            f"codes are a matrix of {' or '.join(WORDS)}, not {weight.codes.dtype}{list(weight.codes.shape)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelError(f"x is a float array, not {x.dtype}; cast it first")
    (k, n), words = weight.shape, weight.codes.shape[0]
    width = 8 * weight.codes.dtype.itemsize
    if words * width % weight.numbers.bits:
        raise KernelError(f"{words} words of {width} bits are no whole number of codes of {weight.numbers.bits} bits")
    summed = n if transposed else k
    if x.ndim != 2 or x.shape[1] != summed:
        raise KernelError(f"x is (rows, {summed}) for a matrix ({k}, {n}), not {tuple(x.shape)}")
    parts = []
    for name in PARTS:
        part = getattr(weight, name)
        if part is None:
            continue
        if part.ndim != 2 or part.shape[1] not in (1, n) or not part.shape[0] or k % part.shape[0]:
            raise KernelError(
                f"the {name} of a matrix ({k}, {n}) is (S, {n}) or (S, 1), with S a divisor of {k}, not "
                f"{tuple(part.shape)}"
            )
        if not jnp.issubdtype(part.dtype, jnp.floating) and (name == "offset" or part.dtype != jnp.uint8):
            raise KernelError(f"the {name} is of floats{'' if name == 'offset' else ' or uint8'}, not {part.dtype}")
        parts.append((name, part.shape[0], str(part.dtype)))
    if weight.factor is not None and (weight.factor.shape != (1, 1) or weight.scale is None):
        raise KernelError(f"a factor is (1, 1) and needs a scale; this one is {tuple(weight.factor.shape)}")
    has, wants = weight.table is not None, isinstance(weight.numbers, Codebook)
    if has != wants or (weight.table is not None and weight.table.shape != (2**weight.numbers.bits,)):
        raise KernelError(f"a Codebook, and nothing else, needs a table of {2**weight.numbers.bits} numbers")
    out = str(jnp.dtype(x.dtype if out is None else out))
    facts = (k, n, str(x.dtype), out, transposed, str(weight.codes.dtype), weight.numbers, tuple(parts))
    return Facts(x.shape[0], *facts)


def floats(weight: Packed, part: str) -> jax.Array | None:
    """Return a part in float32."""
    x = getattr(weight, part)
    if x is None:
        return None
    x = weight.of(part).decode(x.astype(jnp.int32)) if x.dtype == jnp.uint8 else x.astype(jnp.float32)
    return x * weight.factor if part == "scale" and weight.factor is not None else x
