"""Weights: what may stand where a layer's kernel stands, and the product of a kernel."""

from __future__ import annotations

import abc
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.layout import TensorInfo, constrain, in_use, path_name, unfill

Axes = tuple[str, ...]


class Weight(abc.ABC):
    """A kernel in a form of its own: adapted, quantised, with its gradient put off.

    A subclass is a frozen dataclass registered as a pytree (`jax.tree_util.register_dataclass`). Layers never ask which
    one they have; a layer whose product is not `matmul`'s (experts, lookups, overlapped rings) takes `dense`.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""

    @abc.abstractmethod
    def dense(self, dtype: Any = None) -> Float[Array, "..."]:
        """The kernel as one array.

        Args:
          dtype: of the array; by default the weight's own.
        """

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], dtype: Any, out_dtype: Any
    ) -> Float[Array, "..."]:
        """`x · kernel`; arguments and result as `jaxscale.nn.project`. By default the product of `dense`."""
        return product(x, self.dense(dtype), axes, contracted, dtype, out_dtype)

    def infos(self, info: TensorInfo) -> Any:
        """A `TensorInfo` for each array of this weight, in its own structure.

        By default an array of the kernel's rank has the kernel's axes where it has its sizes, and any other array has
        no axes, so that every device holds all of it.

        Args:
          info: the kernel's.
        """

        def one(path: tuple[Any, ...], x: Any) -> TensorInfo:
            same = len(x.shape) == len(info.shape)
            sizes = zip(info.axes, info.shape, x.shape, strict=True) if same else ()
            axes = tuple(a if n == m else None for a, n, m in sizes) if same else (None,) * len(x.shape)
            return TensorInfo(f"{info.path}/{path_name(path)}", tuple(x.shape), x.dtype, axes)

        return jax.tree_util.tree_map_with_path(one, self)


@dataclasses.dataclass(frozen=True)
class Dense(Weight):
    """An array as it is."""

    array: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.array.shape

    def dense(self, dtype: Any = None) -> Float[Array, "..."]:
        """The array."""
        return self.array if dtype is None else self.array.astype(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], dtype: Any, out_dtype: Any
    ) -> Float[Array, "..."]:
        """`product`, so that the gradient has the array's own type."""
        return product(x, self.array, axes, contracted, dtype, out_dtype)

    def infos(self, info: TensorInfo) -> TensorInfo:
        """The kernel's, in the array's type."""
        return dataclasses.replace(info, dtype=self.array.dtype)


def as_weight(value: Any) -> Weight:
    """A parameter's value as a weight: an array is `Dense`."""
    return value if isinstance(value, Weight) else Dense(value)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def product(
    x: Float[Array, "..."],
    kernel: Array,
    axes: Axes,
    contracted: tuple[int, ...],
    dtype: Any,
    out_dtype: Any,
) -> Float[Array, "..."]:
    """`x · kernel` of an array; see `jaxscale.nn.project`. An array of integers has no gradient."""
    return product_forward(x, kernel, axes, contracted, dtype, out_dtype)[0]


def product_forward(  # type: ignore[no-untyped-def]
    x, kernel, axes, contracted, dtype, out_dtype
):
    """The product, and what its backward pass needs."""
    # The product stands in no function of its own below `custom_vjp`, so that a rematerialisation policy sees it.
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
    """The cotangent of a product's input."""
    rest = tuple(i for i in range(kernel.ndim) if i not in contracted)
    dims = _last(dy, len(rest)), rest
    weight = in_use(kernel, axes, dtype)
    return jax.lax.dot_general(dy.astype(dtype), weight, (dims, ((), ())), preferred_element_type=x.dtype)


def kernel_gradient(
    x: Float[Array, "..."],
    dy: Float[Array, "..."],
    axes: Axes,
    contracted: tuple[int, ...],
    dtype: Any,
    kernel_dtype: Any,
) -> Float[Array, "..."]:
    """The gradient of a product's kernel, from its input and its output's cotangent."""
    x, dy = x.astype(dtype), dy.astype(dtype)
    batch = tuple(range(x.ndim - len(contracted)))
    left, right = (x, dy) if contracted[0] == 0 else (dy, x)
    dkernel = jax.lax.dot_general(left, right, ((batch, batch), ((), ())), preferred_element_type=kernel_dtype)
    return constrain(dkernel, *axes, kind="grads")


def _last(x: Array, n: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - n, x.ndim))
