"""Deferred weight gradients: a backward pass that returns a product's input and output cotangent instead of dW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.parallel.arithmetic import Arithmetic
from jaxscale.parallel.seeds import mixed
from jaxscale.parallel.weight import (
    Axes,
    Dense,
    Weight,
    input_gradient,
    kernel_gradient,
    product,
    product_forward,
    seed_for,
)


@dataclasses.dataclass(eq=False)
class Uses:
    """The products of a kernel, recorded while the model is traced.

    Args:
      products: one `Use` per product.
      at_once: the kernel was also read by `dense`, whose backward pass computes the gradient immediately.
    """

    products: list[Use] = dataclasses.field(default_factory=list)
    at_once: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """A product of a kernel.

    Args:
      x: the input, anything with a shape and dtype.
      y: the output, likewise.
      x_axes: logical axes of the input's contracted dimensions.
      y_axes: logical axes of the output's new dimensions.
      gradient: (input, output cotangent) -> the kernel's gradient.
      rounds: whether it rounds elements depending on others, so that a sum over parts of the tokens is another number.
    """

    x: Any
    y: Any
    x_axes: tuple[str, ...]
    y_axes: tuple[str, ...]
    gradient: Callable[[Array, Array], Array]
    rounds: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deferred(Weight):
    """A kernel whose gradient the backward pass does not compute.

    The backward pass of the product returns its input and its output's cotangent as the "cotangents" of `x` and `dy`,
    so that scans stack them, and `jax.checkpoint` recomputes them, as any gradient. The values of `x` and `dy` are
    never read.

    Args:
      kernel: the parameter.
      x: an array of the shape of the product's input; `None` if another kernel with the same input saves it.
      dy: an array of the shape of its output; `None` while products are recorded.
      uses: the record of products, while they are recorded.
    """

    kernel: Array
    x: Array | None = None
    dy: Array | None = None
    uses: Uses | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.kernel.shape

    def dense(self, dtype: DTypeLike | None = None) -> Array:
        """Return the parameter, for a product whose backward pass computes the gradient immediately."""
        assert self.uses is not None, "a kernel that is read by `dense` is not deferred"
        self.uses.at_once = True
        return self.kernel if dtype is None else self.kernel.astype(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """Return the product; its backward pass returns input and output cotangent instead of the kernel's gradient.

        The gradient of a kernel that is reparametrised is computed immediately.
        """
        if arithmetic.reparametrised is not None:
            return Dense(self.dense()).matmul(x, axes, contracted, arithmetic)
        if self.dy is not None:
            keep = self.x is not None
            seed = seed_for(x, arithmetic)
            return _deferred_product(x, self.kernel, self.x, self.dy, seed, axes, contracted, arithmetic, keep)
        y = product(x, self.kernel, axes, contracted, arithmetic)
        x_axes = tuple(a for i, a in enumerate(axes) if i in contracted)
        y_axes = tuple(a for i, a in enumerate(axes) if i not in contracted)
        gradient = partial(
            _later, axes=axes, contracted=contracted, arithmetic=arithmetic, kernel_dtype=self.kernel.dtype
        )
        assert self.uses is not None
        self.uses.products.append(Use(x, y, x_axes, y_axes, gradient, arithmetic.kernel_gradient.rounds))
        return y


def _later(x: Array, dy: Array, *, arithmetic: Arithmetic, **settings: Any) -> Array:
    """Return the kernel's gradient. The seed of its random numbers is of dy, since a stage keeps nothing else."""
    if arithmetic.kernel_gradient.random:
        bits = jax.lax.bitcast_convert_type(dy.astype(jnp.float32), jnp.uint32)
        arithmetic = arithmetic.seeded(mixed(jnp.sum(bits, dtype=jnp.uint32)))
    return kernel_gradient(x, dy, arithmetic=arithmetic, **settings)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _deferred_product(x, kernel, x_slot, dy_slot, seed, axes, contracted, arithmetic, keep):  # type: ignore[no-untyped-def]
    return product_forward(x, kernel, axes, contracted, arithmetic)[0]


def _deferred_product_forward(x, kernel, x_slot, dy_slot, seed, axes, contracted, arithmetic, keep):  # type: ignore[no-untyped-def]
    y, residuals = product_forward(x, kernel, axes, contracted, arithmetic)
    return y, (*residuals, seed)


def _deferred_product_backward(axes, contracted, arithmetic, keep, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel, seed = residuals
    dx = input_gradient(x, kernel, dy, axes, contracted, arithmetic.seeded(seed))
    return dx, None, x if keep else None, dy, None


_deferred_product.defvjp(_deferred_product_forward, _deferred_product_backward)
