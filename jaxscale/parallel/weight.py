"""`Weight`: what can take the place of a layer's kernel, and the product with a kernel."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.layout import TensorInfo, constrain, in_use, path_name, unfill
from jaxscale.layout.tensors import Tree
from jaxscale.parallel.arithmetic import Arithmetic, Operand
from jaxscale.parallel.seeds import seed_of_rows
from jaxscale.parallel.sharded import cut_over

Axes = tuple[str, ...]

ROUNDED = "rounded_product"
"""The name, for rematerialisation policies, of products whose sums have another dtype than the product."""


class Weight(abc.ABC):
    """A kernel that is not a plain array: with an adapter, quantised, or with a deferred gradient.

    A subclass is a frozen dataclass registered as a pytree (`jax.tree_util.register_dataclass`). Layers call `matmul`
    without knowing the subclass; layers with another product use `gathered` (experts, absorbed projections) or `dense`
    (lookups, overlapped collectives).
    """

    gathers: ClassVar[bool] = False
    """Whether `gathered` sends arrays of the weight's own between devices, and not the kernel."""
    pads: ClassVar[bool] = False
    """Whether `matmul` pads a vocabulary that the layout does not divide, as the product with an array does."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""

    @abc.abstractmethod
    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the kernel as one array.

        Args:
          dtype: dtype of the array; by default the weight's.
        """

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """Return `x · kernel`, by default by `dense`.

        Args:
          x: activations.
          axes: logical axis per dimension of the kernel.
          contracted: dimensions of the kernel that are summed over, all leading or all trailing.
          arithmetic: the numbers of the product and its gradients, and the dtype of the result.

        Returns:
          the remaining dimensions of `x`, then those of the kernel.
        """
        return product(x, self.dense(arithmetic.dtype), axes, contracted, arithmetic)

    def for_loss(self) -> Array | Weight:
        """Return an output head as a loss multiplies with it: by default one array."""
        return self.dense()

    def of_experts(self, chosen: Callable[[], Array], inputs: Callable[[], Array]) -> None:
        """Called by a layer of experts with what its experts multiply by this weight; by default this does nothing.

        Args:
          chosen: returns which experts each token has, (b, s, experts), True or False.
          inputs: returns the inputs: (b, s, n) for all experts, or (experts, b, s, n).
        """
        del chosen, inputs

    def for_experts(self, axes: Axes, arithmetic: Arithmetic, rows: int) -> Weight | None:
        """Return this weight, its arrays sharded as activations, if experts can multiply by `grouped`.

        Args:
          axes: logical axis per dimension of the kernel.
          arithmetic: the numbers of the product, from `arithmetic`.
          rows: tokens of all experts of one device, about.

        Returns:
          `None`, the default: experts multiply with the array of `gathered` or `dense`.
        """
        return None

    def grouped(
        self, rows: Float[Array, "m i"], sizes: Int[Array, " x"], transposed: bool, dtype: DTypeLike
    ) -> Float[Array, "m o"]:
        """Return each row times its expert's matrix; only of weights that `for_experts` returns.

        Args:
          rows: sorted by expert.
          sizes: rows of each expert.
          transposed: multiply by the transposed matrices.
          dtype: of the result.
        """
        raise NotImplementedError(f"{type(self).__name__} has no grouped product: for_experts returned None")

    def gathered(self, axes: Axes, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the kernel as layers compute with it: cast, then sharded as an activation; see `in_use`.

        Args:
          axes: logical axis per dimension of the kernel.
          dtype: dtype of the array.
        """
        return in_use(self.dense(), axes, dtype)

    def arithmetic(self, arithmetic: Arithmetic) -> Arithmetic:
        """Return the arithmetic of a product with `dense`, by default the layer's.

        Args:
          arithmetic: the layer's.
        """
        return arithmetic

    def matrix(self, arithmetic: Arithmetic) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
        """Return the array that a product multiplies with, and factors for the product's columns; `None` is 1.

        Args:
          arithmetic: the layer's.
        """
        return self.arithmetic(arithmetic).matrix(self.dense()), None

    def base(self) -> Weight:
        """Return the weight whose `matrix` an overlapped product multiplies with; `added` is the rest."""
        return self

    def added(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."] | None:
        """Return what `matmul` adds to the product with `base`; `None`, the default, is nothing.

        Args:
          x: activations.
          axes: see `matmul`.
          contracted: likewise.
          arithmetic: likewise.
        """
        return None

    def infos(self, info: TensorInfo) -> Tree:
        """Return a `TensorInfo` for each array of this weight, in the weight's tree structure.

        By default an array of the kernel's rank has the kernel's axes for dimensions of the same size, and any other
        array has no axes, so that it is replicated.

        Args:
          info: the `TensorInfo` of the kernel.
        """

        def one(path: tuple[Any, ...], x: Array | TensorInfo) -> TensorInfo:
            same = len(x.shape) == len(info.shape)
            sizes = zip(info.axes, info.shape, x.shape, strict=True) if same else ()
            axes = tuple(a if n == m else None for a, n, m in sizes) if same else (None,) * len(x.shape)
            return TensorInfo(f"{info.path}/{path_name(path)}", tuple(x.shape), x.dtype, axes)

        return jax.tree_util.tree_map_with_path(one, self)


@dataclasses.dataclass(frozen=True)
class Dense(Weight):
    """A kernel that is a plain array.

    Args:
      array: the array.
    """

    array: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`."""
        return self.array if dtype is None else self.array.astype(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`; the gradient has the array's dtype."""
        if arithmetic.reparametrised is None:
            return product(x, self.array, axes, contracted, arithmetic)

        def multiplied(x: Array, kernel: Array) -> Array:
            return product(x, arithmetic.matrix(kernel), axes, contracted, arithmetic)

        return jax.checkpoint(multiplied)(x, self.array)  # the backward pass computes the matrix again

    def infos(self, info: TensorInfo) -> TensorInfo:
        """See `Weight`: the kernel's info with the array's dtype."""
        return dataclasses.replace(info, dtype=self.array.dtype)


def as_weight(value: Array | Weight) -> Weight:
    """Return a parameter's value as a weight: an array becomes `Dense`.

    Args:
      value: an array or a `Weight`.
    """
    return value if isinstance(value, Weight) else Dense(value)


def product(
    x: Float[Array, "..."], kernel: Array, axes: Axes, contracted: tuple[int, ...], arithmetic: Arithmetic
) -> Float[Array, "..."]:
    """Compute `x · kernel` for an array; see `jaxscale.nn.project`. An array of integers has no gradient."""
    return _product(x, kernel, seed_for(x, arithmetic), axes, contracted, arithmetic)


def seed_for(x: Array, arithmetic: Arithmetic) -> Array | None:
    """Return the seed of a product's random numbers, or `None` if it has none.

    Args:
      x: the product's input, whose first dimension is the batch.
      arithmetic: its numbers.
    """
    return seed_of_rows(x) if arithmetic.random else None


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x, kernel, seed, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    return product_forward(x, kernel, axes, contracted, arithmetic)[0]


def product_forward(x, kernel, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    """Return the product and its residuals."""
    # The product is not in a nested jitted function, so that rematerialisation policies see it.
    numbers, dims = arithmetic.forward, _last(x, len(contracted))
    left, right = numbers.left(x, dims), used(numbers.right(kernel, contracted), kernel.shape, axes)
    parts = _parts([axes[i] for i in contracted], [kernel.shape[i] for i in contracted])
    y = numbers.dot(left, right, ((dims, contracted), ((), ())), arithmetic.out_dtype, parts)
    return checkpoint_name(y, ROUNDED) if numbers.rounds else y, (x, kernel)


def _forward(x, kernel, seed, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    y, residuals = product_forward(x, kernel, axes, contracted, arithmetic)
    return y, (*residuals, seed)


def _backward(axes, contracted, arithmetic, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel, seed = residuals
    arithmetic = arithmetic.seeded(seed)
    dx = input_gradient(x, kernel, dy, axes, contracted, arithmetic)
    if not jnp.issubdtype(kernel.dtype, jnp.inexact):
        return dx, None, None
    return dx, unfill(kernel_gradient(x, dy, axes, contracted, arithmetic, kernel.dtype), kernel.shape, *axes), None


_product.defvjp(_forward, _backward)


def input_gradient(x, kernel, dy, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    """Return the cotangent of a product's input."""
    rest = tuple(i for i in range(kernel.ndim) if i not in contracted)
    numbers, dims = arithmetic.input_gradient, _last(dy, len(rest))
    left, right = numbers.left(dy, dims), used(numbers.right(kernel, rest), kernel.shape, axes)
    parts = _parts([axes[i] for i in rest], [kernel.shape[i] for i in rest])
    return numbers.dot(left, right, ((dims, rest), ((), ())), x.dtype, parts)


def kernel_gradient(
    x: Float[Array, "..."],
    dy: Float[Array, "..."],
    axes: Axes,
    contracted: tuple[int, ...],
    arithmetic: Arithmetic,
    kernel_dtype: DTypeLike,
) -> Float[Array, "..."]:
    """Return the gradient of a product's kernel, from the product's input and its output's cotangent."""
    numbers, batch = arithmetic.kernel_gradient, tuple(range(x.ndim - len(contracted)))
    left, right = numbers.left(x, batch), numbers.right(dy, batch)
    if contracted[0] != 0:
        left, right = right, left
    parts = _parts(("batch", "seq"), x.shape[:2]) if len(batch) == 2 else ()
    dkernel = numbers.dot(left, right, ((batch, batch), ((), ())), kernel_dtype, parts)
    return constrain(dkernel, *axes, kind="grads")


def _parts(axes: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many devices shard each dimension of an activation."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(math.prod(mesh.shape[m] for m in cut_over(a, size=n)) for a, n in zip(axes, sizes, strict=True))


def used(operand: Operand, shape: tuple[int, ...], axes: Axes) -> Operand:
    """Return an encoded kernel as a layer computes with it: its arrays sharded as activations (FSDP gathers them).

    Args:
      operand: the kernel, encoded.
      shape: the kernel's shape.
      axes: its logical axes.
    """
    return jax.tree.map(lambda a: in_use(a, axes_of(a, shape, axes), a.dtype), operand)


def axes_of(a: Array, shape: tuple[int, ...], axes: Sequence[str | None]) -> tuple[str | None, ...]:
    """Return the logical axes of an array of an encoded operand: none where its elements are shared by all.

    Args:
      a: the array.
      shape: shape of the operand.
      axes: the operand's logical axes.
    """
    return tuple(None if m == 1 != n else name for m, n, name in zip(a.shape, shape, axes, strict=True))


def shape_of(operand: Operand) -> tuple[int, ...]:
    """Return the shape of the array that an operand encodes.

    Args:
      operand: the operand.
    """
    return tuple(map(max, zip(*(a.shape for a in jax.tree.leaves(operand)), strict=True)))


def _last(x: Array, n: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - n, x.ndim))
