"""`Weight`: what can take the place of a layer's kernel, and the product with a kernel."""

from __future__ import annotations

import abc
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.layout import TensorInfo, constrain, in_use, path_name, unfill
from jaxscale.layout.tensors import Tree

Axes = tuple[str, ...]


class Weight(abc.ABC):
    """A kernel that is not a plain array: with an adapter, quantised, or with a deferred gradient.

    A subclass is a frozen dataclass registered as a pytree (`jax.tree_util.register_dataclass`). Layers call `matmul`
    without knowing the subclass; layers with another product (experts, lookups, overlapped collectives) use `dense`.
    """

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
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], dtype: DTypeLike, out_dtype: DTypeLike
    ) -> Float[Array, "..."]:
        """Return `x · kernel`, by default by `dense`.

        Args:
          x: activations.
          axes: logical axis per dimension of the kernel.
          contracted: dimensions of the kernel that are summed over, all leading or all trailing.
          dtype: dtype of the inputs of the product.
          out_dtype: dtype of the result.

        Returns:
          the remaining dimensions of `x`, then those of the kernel.
        """
        return product(x, self.dense(dtype), axes, contracted, dtype, out_dtype)

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
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], dtype: DTypeLike, out_dtype: DTypeLike
    ) -> Float[Array, "..."]:
        """See `Weight`; the gradient has the array's dtype."""
        return product(x, self.array, axes, contracted, dtype, out_dtype)

    def infos(self, info: TensorInfo) -> TensorInfo:
        """See `Weight`: the kernel's info with the array's dtype."""
        return dataclasses.replace(info, dtype=self.array.dtype)


def as_weight(value: Array | Weight) -> Weight:
    """Return a parameter's value as a weight: an array becomes `Dense`.

    Args:
      value: an array or a `Weight`.
    """
    return value if isinstance(value, Weight) else Dense(value)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def product(
    x: Float[Array, "..."],
    kernel: Array,
    axes: Axes,
    contracted: tuple[int, ...],
    dtype: DTypeLike,
    out_dtype: DTypeLike,
) -> Float[Array, "..."]:
    """Compute `x · kernel` for an array; see `jaxscale.nn.project`. An array of integers has no gradient."""
    return product_forward(x, kernel, axes, contracted, dtype, out_dtype)[0]


def product_forward(  # type: ignore[no-untyped-def]
    x, kernel, axes, contracted, dtype, out_dtype
):
    """Return the product and its residuals."""
    # The product is not in a nested jitted function, so that rematerialisation policies see it.
    dims = _last(x, len(contracted)), contracted
    weight = in_use(kernel, axes, dtype)
    y = jax.lax.dot_general(x.astype(dtype), weight, (dims, ((), ())), preferred_element_type=out_dtype)
    return y, (x, kernel)


def _backward(axes, contracted, dtype, out_dtype, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel = residuals
    dx = input_gradient(x, kernel, dy, axes, contracted, dtype)
    if not jnp.issubdtype(kernel.dtype, jnp.inexact):
        return dx, None
    return dx, unfill(kernel_gradient(x, dy, axes, contracted, dtype, kernel.dtype), kernel.shape, *axes)


product.defvjp(product_forward, _backward)


def input_gradient(x, kernel, dy, axes, contracted, dtype):  # type: ignore[no-untyped-def]
    """Return the cotangent of a product's input."""
    rest = tuple(i for i in range(kernel.ndim) if i not in contracted)
    dims = _last(dy, len(rest)), rest
    weight = in_use(kernel, axes, dtype)
    return jax.lax.dot_general(dy.astype(dtype), weight, (dims, ((), ())), preferred_element_type=x.dtype)


def kernel_gradient(
    x: Float[Array, "..."],
    dy: Float[Array, "..."],
    axes: Axes,
    contracted: tuple[int, ...],
    dtype: DTypeLike,
    kernel_dtype: DTypeLike,
) -> Float[Array, "..."]:
    """Return the gradient of a product's kernel, from the product's input and its output's cotangent."""
    x, dy = x.astype(dtype), dy.astype(dtype)
    batch = tuple(range(x.ndim - len(contracted)))
    left, right = (x, dy) if contracted[0] == 0 else (dy, x)
    dkernel = jax.lax.dot_general(left, right, ((batch, batch), ((), ())), preferred_element_type=kernel_dtype)
    return constrain(dkernel, *axes, kind="grads")


def _last(x: Array, n: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - n, x.ndim))
