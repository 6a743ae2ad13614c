"""A weight of packed codes and scales, and its product."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt, UInt8

from jaxscale.layout import TensorInfo, constrain, path_name
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats.blocks import spread
from jaxscale.nn.formats.integer_products import integer_product
from jaxscale.nn.formats.kernels import experts_as_packed, grouped_here, kernel_product
from jaxscale.nn.formats.numbers import from_table, numbers_of
from jaxscale.nn.formats.packing import pack, unit, unpack
from jaxscale.nn.formats.rebuilt import Rebuilt
from jaxscale.parallel import Arithmetic, Cast
from pallas_kernels.grouped_stored_matmul import grouped_stored_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredWeight(Rebuilt):
    """A kernel `(number(codes) - zero) · scale + offset`.

    `scale`, `zero` and `offset` have the kernel's rank: along a dimension of n entries, 1, n, or one for each of
    several blocks of equal size. Each may be a `StoredWeight` itself, such as scales of 8 bits.

    Args:
      codes: uint8 or uint32, the kernel's shape but for `axis`, along which they are packed (`pack`).
      scale: float; `None` is 1.
      zero: float, in units of the scale; `None` is 0.
      offset: float; `None` is 0.
      table: float32, the kernel's dimensions of layers and experts, 1 for each other dimension, then 2^bits: the
        numbers of the codes; `None` is those of `numbers`.
      numbers: the type of number, see `numbers_of`.
      axis: the packed dimension, counted from the last as -1.
      activations: bits to which activations are rounded in products of integers, 2 to 8; `None` computes the kernel
        and multiplies in the arithmetic of the layer. The codes are then "int2" to "int8", without zero points.
      divided: numbers are divided by the scale and not multiplied, see `Divided`.
    """

    codes: UInt[Array, "..."]
    scale: Float[Array, "..."] | StoredWeight | None = None
    zero: Float[Array, "..."] | StoredWeight | None = None
    offset: Float[Array, "..."] | StoredWeight | None = None
    table: Float[Array, "..."] | None = None
    numbers: str = dataclasses.field(default="int4", metadata={"static": True})
    axis: int = dataclasses.field(default=-1, metadata={"static": True})
    activations: int | None = dataclasses.field(default=None, metadata={"static": True})
    divided: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls, codes: UInt8[Array, "..."], numbers: str, axis: int, word: DTypeLike = jnp.uint8, **parts: Any
    ) -> StoredWeight:
        """Return a weight of codes that are not packed yet.

        Args:
          codes: uint8, the kernel's shape.
          numbers: the type of number.
          axis: the dimension to pack along, counted from the last as -1.
          word: uint8 or uint32.
          **parts: `scale`, `zero`, `offset`, `table`.
        """
        return cls(pack(codes, numbers_of(numbers).bits, axis, word), numbers=numbers, axis=axis, **parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        shape = list(self.codes.shape)
        shape[self.axis] = shape[self.axis] * 8 * self.codes.dtype.itemsize // numbers_of(self.numbers).bits
        return tuple(shape)

    def unpacked(self) -> UInt8[Array, "..."]:
        """Return the codes, one in each byte, in the kernel's shape."""
        return unpack(self.codes, numbers_of(self.numbers).bits, self.axis)

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`; computed in float32, which is the default dtype."""
        kind, codes = numbers_of(self.numbers), self.unpacked()
        x = kind.decode(codes) if self.table is None else _look_up(codes, self.table, kind.bits)
        if self.zero is not None:
            x = x - spread(_float(self.zero), x.shape)
        if self.scale is not None:
            scale = spread(_float(self.scale), x.shape)
            x = _quotient(x, scale) if self.divided else x * scale
        if self.offset is not None:
            x = x + spread(_float(self.offset), x.shape)
        return x.astype(dtype or jnp.float32)

    def multiplied(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Rebuilt`; with rounded activations a product of integers (`integer_product`).

        Gradients pass the rounding of activations as if there were none.
        """
        if self.activations is None:
            return super().multiplied(x, axes, contracted, arithmetic)
        whole = self.whole(axes)
        codes = constrain(numbers_of(self.numbers).decode(whole.unpacked()).astype(jnp.int8), *axes)
        scale = None if whole.scale is None else _float(whole.scale)
        return integer_product(x, codes, scale, contracted, self.activations).astype(arithmetic.out_dtype)

    def dot(  # type: ignore[no-untyped-def]
        self, x: Array, axes: tuple[str, ...], summed: tuple[int, ...], dtype: DTypeLike, numbers, out_dtype: DTypeLike
    ) -> Array:
        """See `Rebuilt`; by a kernel where one serves."""
        if isinstance(numbers, Cast):
            names = [self.names("", a.shape, axes) for a in jax.tree.leaves(self)]
            y = kernel_product(x, self, axes, names, summed, numbers.dtype, out_dtype)
            if y is not None:
                return y
        return super().dot(x, axes, summed, dtype, numbers, out_dtype)

    def for_experts(self, axes: tuple[str, ...], arithmetic: Arithmetic, rows: int) -> StoredWeight | None:
        """See `Weight`: where a grouped product has the numbers, and unpacking all experts is not cheaper."""
        plain = isinstance(arithmetic.forward, Cast) and isinstance(arithmetic.input_gradient, Cast)
        names = [self.names("", a.shape, axes) for a in jax.tree.leaves(self)]
        return self.whole(axes) if plain and grouped_here(self, names, rows) else None

    def grouped(
        self, rows: Float[Array, "m i"], sizes: Int[Array, " x"], transposed: bool, dtype: DTypeLike
    ) -> Float[Array, "m o"]:
        """See `Weight`: each expert's matrix is unpacked where it is multiplied."""
        matrices = experts_as_packed(self)
        return grouped_stored_matmul(rows, matrices, sizes, transposed=transposed, out_dtype=dtype)

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`; dimensions of codes and scales have the kernel's names wherever there are several."""

        def one(path: tuple[Any, ...], x: Array | TensorInfo) -> TensorInfo:
            names = self.names("", x.shape, info.axes)
            bits = numbers_of(self.numbers).bits if path == (jax.tree_util.GetAttrKey("codes"),) else None
            advice = partial(_advice, tuple(info.shape), tuple(x.shape), bits)
            return TensorInfo(f"{info.path}/{path_name(path)}", tuple(x.shape), x.dtype, names, advice=advice)

        return jax.tree_util.tree_map_with_path(one, self)


def _float(x: Array | StoredWeight) -> Array:
    return x.dense(jnp.float32) if isinstance(x, StoredWeight) else x.astype(jnp.float32)


def _quotient(x: Array, scale: Array) -> Array:
    """Divide; XLA would multiply by the reciprocal of a broadcast scalar, which differs in the last bit."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(scale, x.shape))


def _look_up(codes: Array, table: Array, bits: int) -> Array:
    """Look up codes in a table for each layer and expert."""
    if (lead := sum(n > 1 for n in table.shape[:-1])) == 0:
        return from_table(codes, table.reshape(-1), bits)
    while table.shape[lead - 1] == 1:  # a stack of one layer before several experts
        lead += 1
    flat = codes.reshape(-1, *codes.shape[lead:])
    looked = jax.vmap(partial(from_table, bits=bits))(flat, table.reshape(flat.shape[0], -1))
    return looked.reshape(codes.shape)


def _advice(kernel: tuple[int, ...], shape: tuple[int, ...], bits: int | None, dim: int, pieces: int) -> str:
    """Return what to change for an array of a weight along a dimension that some devices do not divide."""
    n = kernel[dim]
    if n % pieces:
        return (
            f"{pieces} devices do not divide its {n} weights along dimension {dim}; use a number of devices that does"
        )
    mine, group = n // pieces, n // shape[dim]
    if bits is not None:
        fit = next((b for b in range(bits, 9) if mine % unit(b)[0] == 0), 8)
        return (
            f"codes of {bits} bits are packed in units of {unit(bits)[0]}, which do not divide the {mine} weights of a "
            f"device along dimension {dim}; the nearest width that does is {fit} bits"
        )
    return (
        f"groups of {group} do not divide the {mine} weights of a device along dimension {dim}; a size that does is "
        f"{math.gcd(group, mine)}"
    )
