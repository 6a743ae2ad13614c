"""`Rebuilt`: weights whose kernel is computed from fewer bytes in both passes of a product."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.layout import TensorInfo, constrain, path_name
from jaxscale.layout.tensors import Tree
from jaxscale.parallel import Arithmetic, Weight
from jaxscale.parallel.weight import kernel_gradient, seed_for

Axes = tuple[str | None, ...]


class Rebuilt(Weight):
    """A weight of packed arrays: devices exchange those, and each computes the kernel, which no pass holds.

    A subclass has `dense`, and `names` if its arrays are not of the kernel's rank.
    """

    gathers: ClassVar[bool] = True

    def names(self, part: str, shape: tuple[int, ...], axes: Axes) -> Axes:
        """Return the logical axes of an array: the kernel's wherever it has several entries; more dimensions have none.

        Args:
          part: its path in the weight, such as "codes".
          shape: of the array.
          axes: of the kernel.
        """
        pairs = zip(shape, self.shape, axes, strict=False)
        return tuple(a if m > 1 or n == 1 else None for m, n, a in pairs) + (None,) * (len(shape) - len(self.shape))

    def whole(self, axes: Axes) -> Any:
        """Return this weight, its arrays sharded as activations.

        Args:
          axes: of the kernel.
        """

        def gather(path: tuple[Any, ...], x: Array) -> Array:
            names = self.names(path_name(path), x.shape, axes)
            return constrain(constrain(x, *names, kind="params"), *names)

        return jax.tree_util.tree_map_with_path(gather, self)

    def gathered(self, axes: tuple[str, ...], dtype: DTypeLike) -> Float[Array, "..."]:
        """See `Weight`: devices exchange the packed arrays, and each computes the kernel from them."""
        return constrain(self.whole(axes).dense(dtype), *axes)

    def arithmetic(self, arithmetic: Arithmetic) -> Arithmetic:
        """See `Weight`: the numbers of kernels that are stored in few bits."""
        return arithmetic.for_stored()

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`. The backward pass computes the kernel again; gradients reach arrays of floats."""
        arithmetic = self.arithmetic(arithmetic)
        return _product(x, self, seed_for(x, arithmetic), axes, contracted, arithmetic)

    def multiplied(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """Return the product of the forward pass, by default with `dot`.

        Args:
          x: activations.
          axes: see `matmul`.
          contracted: see `matmul`.
          arithmetic: the numbers of the product.
        """
        return self.dot(x, axes, contracted, arithmetic.dtype, arithmetic.forward, arithmetic.out_dtype)

    def dot(  # type: ignore[no-untyped-def]
        self, x: Array, axes: tuple[str, ...], summed: tuple[int, ...], dtype: DTypeLike, numbers, out_dtype: DTypeLike
    ) -> Array:
        """Return the product of an array with the kernel.

        Args:
          x: the array; its last dimensions are summed over.
          axes: of the kernel.
          summed: dimensions of the kernel that are summed over.
          dtype: of the kernel in the product.
          numbers: the numbers of the product, `Arithmetic.forward` or `Arithmetic.input_gradient`.
          out_dtype: of the result.
        """
        dims = tuple(range(x.ndim - len(summed), x.ndim))
        left, right = numbers.left(x, dims), numbers.right(self.gathered(axes, dtype), summed)
        return numbers.dot(left, right, ((dims, summed), ((), ())), out_dtype)

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`; axes as in `names`."""

        def one(path: tuple[Any, ...], x: Array | TensorInfo) -> TensorInfo:
            part = path_name(path)
            return TensorInfo(f"{info.path}/{part}", tuple(x.shape), x.dtype, self.names(part, x.shape, info.axes))

        return jax.tree_util.tree_map_with_path(one, self)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x, weight, seed, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    return _forward(x, weight, seed, axes, contracted, arithmetic)[0]


def _forward(x, weight, seed, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    # residuals without the kernel, so that no dense copy is held
    return weight.multiplied(x, axes, contracted, arithmetic), (x, weight, seed)


def _backward(axes, contracted, arithmetic, residuals, dy):  # type: ignore[no-untyped-def]
    x, weight, seed = residuals
    arithmetic = arithmetic.seeded(seed)
    rest = tuple(d for d in range(len(axes)) if d not in contracted)
    dx = weight.dot(dy, axes, rest, arithmetic.dtype, arithmetic.input_gradient, x.dtype)
    dkernel = kernel_gradient(x, dy, axes, contracted, arithmetic, jnp.float32)
    return dx, jax.vjp(lambda w: w.dense(), weight)[1](dkernel)[0], None


_product.defvjp(_forward, _backward)
