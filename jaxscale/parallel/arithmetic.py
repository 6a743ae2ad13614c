"""`Arithmetic`: in which numbers the three products of a layer are computed, forward and backward."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer

Operand = Any
"""An operand of a product, as `Numbers` encodes it: a pytree of arrays of one rank, such as codes and their scales. An
array's dimension has the size of the encoded array's, or is shorter where elements share a value (1: all of them)."""

Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Summed dimensions of both operands, then batch dimensions of both, as in `jax.lax.dot_general`."""

Cut = tuple[tuple[str, ...], ...]
"""For each dimension the manual mesh axes of an enclosing `shard_map` that shard it."""


def cut_along(dims: Sequence[int], cut: Cut) -> tuple[str, ...]:
    """Return the manual mesh axes that shard any of some dimensions.

    Args:
      dims: the dimensions.
      cut: the axes of each dimension; empty is none.
    """
    return tuple(dict.fromkeys(m for d in dims for m in cut[d])) if cut else ()


class Numbers(abc.ABC):
    """The numbers to which the operands of a product are rounded, and the product of rounded operands.

    A subclass is a frozen dataclass: it is part of compiled programs' keys.
    """

    rounds: ClassVar[bool] = True
    """Whether an element is rounded depending on other elements of the operand."""

    @abc.abstractmethod
    def left(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Operand:
        """Encode the left operand: activations, or the output's cotangent in the product for the input's gradient.

        Args:
          a: the operand.
          dims: its dimensions that the product sums over.
          batch: its batch dimensions, such as that of experts.
          cut: the mesh axes that shard each dimension, inside a `shard_map`; by default none.
        """

    @abc.abstractmethod
    def right(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Operand:
        """Encode the right operand: the kernel, or the output's cotangent in the product for the kernel's gradient.

        Args:
          a: the operand.
          dims: see `left`.
          batch: see `left`.
          cut: see `left`.
        """

    @abc.abstractmethod
    def dot(
        self, left: Operand, right: Operand, dims: Dims, out_dtype: DTypeLike, parts: Sequence[int] = ()
    ) -> Float[Array, "..."]:
        """Multiply encoded operands; dimensions of the result as of `jax.lax.dot_general`.

        Args:
          left: from `left`.
          right: from `right`.
          dims: summed and batch dimensions.
          out_dtype: dtype of the result.
          parts: for each summed dimension, the number of devices that shard it.
        """

    @abc.abstractmethod
    def ragged_dot(
        self,
        rows: Operand,
        matrices: Operand,
        sizes: Int[Array, " x"],
        transposed: bool = False,
        bias: Float[Array, "x o"] | None = None,
    ) -> Float[Array, "n o"]:
        """Multiply each row by the matrix of its group.

        Args:
          rows: `left` of an array (n, i), sorted by group.
          matrices: `right` of an array (x, i, o); (x, o, i) with `transposed`.
          sizes: rows of each group; rows after the last group give 0.
          transposed: multiply by the transposed matrices, of which no copy is made.
          bias: added to the rows of each group before the result is rounded, float32, or `None`.
        """

    @abc.abstractmethod
    def ragged_outer(
        self, rows: Operand, other: Operand, sizes: Int[Array, " x"], out_dtype: DTypeLike
    ) -> Float[Array, "x i o"]:
        """Sum, for each group, the outer products of rows.

        Args:
          rows: `left` of an array (n, i), sorted by group.
          other: `right` of an array (n, o).
          sizes: rows of each group.
          out_dtype: dtype of the result.
        """

    @property
    def random(self) -> bool:
        """Whether an operand is rounded up or down at random, by default not."""
        return False

    def seeded(self, seed: UInt32[Array, "..."] | None) -> Numbers:
        """Return these numbers with the random numbers of one product of one step; no longer hashable.

        Args:
          seed: one seed, or one for each row of a batch; `None` is the same in every step.
        """
        return self

    @property
    def history(self) -> int:
        """The number of earlier steps whose largest magnitudes scale operands; by default 0."""
        return 0

    def scaled_by(self, left: Float[Array, ""], right: Float[Array, ""]) -> Numbers:
        """Return these numbers with the largest magnitudes of earlier steps; no longer hashable.

        Args:
          left: of the left operand, 0 if it is not known.
          right: of the right operand.
        """
        return self

    def for_stored(self) -> Numbers:
        """Return these numbers for a product with a kernel that is stored in few bits, by default the same."""
        return self


@dataclasses.dataclass(frozen=True)
class Cast(Numbers):
    """Operands cast to one dtype.

    Args:
      dtype: the dtype.
    """

    rounds: ClassVar[bool] = False
    dtype: DTypeLike

    def left(self, a: Float[Array, "..."], dims: Sequence[int], batch: Sequence[int] = (), cut: Cut = ()) -> Operand:
        """See `Numbers`."""
        return a.astype(self.dtype)

    right = left

    def dot(
        self, left: Operand, right: Operand, dims: Dims, out_dtype: DTypeLike, parts: Sequence[int] = ()
    ) -> Float[Array, "..."]:
        """See `Numbers`; accumulated in `out_dtype` or wider."""
        return lax.dot_general(left, right, dims, preferred_element_type=out_dtype)

    def ragged_dot(
        self,
        rows: Operand,
        matrices: Operand,
        sizes: Int[Array, " x"],
        transposed: bool = False,
        bias: Float[Array, "x o"] | None = None,
    ) -> Float[Array, "n o"]:
        """See `Numbers`."""
        return grouped_matmul(rows, matrices, sizes, bias=bias, transposed=transposed)

    def ragged_outer(
        self, rows: Operand, other: Operand, sizes: Int[Array, " x"], out_dtype: DTypeLike
    ) -> Float[Array, "x i o"]:
        """See `Numbers`."""
        return grouped_outer(rows, other, sizes, out_dtype=out_dtype)


PASSES = ("forward", "input_gradient", "kernel_gradient")
"""The fields of `Arithmetic` that are numbers."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a product with a kernel is computed, and its two gradients. Hashable.

    Args:
      forward: the numbers of activations (left) and kernel (right).
      input_gradient: the numbers of the output's cotangent (left) and kernel (right).
      kernel_gradient: the numbers of activations (left) and the output's cotangent (right).
      dtype: dtype of operands that are not rounded further, such as those of an adapter.
      out_dtype: dtype of the product. Gradients have the dtype of what they belong to.
      reparametrised: a differentiable function from the stored kernel to the one that is multiplied; `None` is the
        kernel itself.
      sums: the numbers in which devices exchange the terms of an overlapped product's sum, as left operands; `None`
        sums them on the way, in `out_dtype`.
      gradient_sums: the same of the sum for the input's gradient; `None` sums in `dtype`.
    """

    forward: Numbers
    input_gradient: Numbers
    kernel_gradient: Numbers
    dtype: DTypeLike
    out_dtype: DTypeLike
    reparametrised: Callable[[Float[Array, "..."]], Float[Array, "..."]] | None = None
    sums: Numbers | None = None
    gradient_sums: Numbers | None = None

    @classmethod
    def cast(cls, dtype: DTypeLike, out_dtype: DTypeLike | None = None) -> Arithmetic:
        """Return ordinary products of operands cast to a dtype.

        Args:
          dtype: dtype of the operands.
          out_dtype: dtype of the product; by default `dtype`.
        """
        dtype = jnp.dtype(dtype)
        return cls(*(Cast(dtype),) * 3, dtype, jnp.dtype(dtype if out_dtype is None else out_dtype))

    def plain(self, out_dtype: DTypeLike | None = None) -> Arithmetic:
        """Return ordinary products in the same dtypes.

        Args:
          out_dtype: dtype of the product; by default that of this one.
        """
        return Arithmetic.cast(self.dtype, self.out_dtype if out_dtype is None else out_dtype)

    @property
    def random(self) -> bool:
        """Whether an operand is rounded up or down at random."""
        return any(getattr(self, name).random for name in PASSES)

    def seeded(self, seed: UInt32[Array, "..."] | None) -> Arithmetic:
        """Return the arithmetic with the random numbers of one product of one step; see `Numbers.seeded`.

        Args:
          seed: one seed, or one for each row of a batch, or `None`.
        """
        if seed is None:
            return self
        return dataclasses.replace(self, **{name: getattr(self, name).seeded(seed) for name in PASSES})

    @property
    def history(self) -> int:
        """The number of earlier steps whose largest magnitudes scale operands."""
        return max(getattr(self, name).history for name in PASSES)

    def scaled_by(self, x: Float[Array, ""], kernel: Float[Array, ""], dy: Float[Array, ""]) -> Arithmetic:
        """Return the arithmetic with the largest magnitudes of earlier steps; see `Numbers.scaled_by`.

        Args:
          x: of the product's input.
          kernel: of the kernel.
          dy: of the output's cotangent.
        """
        return dataclasses.replace(
            self,
            forward=self.forward.scaled_by(x, kernel),
            input_gradient=self.input_gradient.scaled_by(dy, kernel),
            kernel_gradient=self.kernel_gradient.scaled_by(x, dy),
        )

    def for_stored(self) -> Arithmetic:
        """Return the arithmetic of a product with a kernel that is stored in few bits, and not rounded again."""
        stored = {name: getattr(self, name).for_stored() for name in PASSES}
        return dataclasses.replace(self, reparametrised=None, **stored)

    def matrix(self, kernel: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the kernel that is multiplied.

        Args:
          kernel: one layer's (and expert's) stored kernel.
        """
        return kernel if self.reparametrised is None else self.reparametrised(kernel)
