"""Weight gradients put off: a backward pass that leaves, in place of each, the two arrays it is the product of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxscale.parallel.weight import Axes, Weight, input_gradient, kernel_gradient, product, product_forward


@dataclasses.dataclass(eq=False)
class Uses:
    """What a kernel was multiplied by, written down while the model around it is traced.

    Args:
      found: of each use, the input and output (anything with a shape and dtype), the names of their last dimensions,
        and the function of input and output cotangent that gives the gradient.
      at_once: there was a product whose own backward pass makes the gradient.
    """

    found: list[Use] = dataclasses.field(default_factory=list)
    at_once: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """A product of a kernel."""

    x: Any
    y: Any
    x_axes: tuple[str, ...]
    y_axes: tuple[str, ...]
    gradient: Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deferred(Weight):
    """A kernel in a model whose backward pass makes no gradient of it.

    The product hands its input and its output's cotangent back as "cotangents" of `x` and `dy`: stacked by scans,
    recomputed by `jax.checkpoint` and passed on as any gradient is. Nobody reads the values of the two.

    Args:
      kernel: the parameter.
      x: of the shape of the product's input; `None` where another kernel of the same input keeps it.
      dy: of the shape of its output; `None` while products are written down.
      uses: where products are written down.
    """

    kernel: Array
    x: Array | None = None
    dy: Array | None = None
    uses: Uses | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        return self.kernel.shape

    def dense(self, dtype: Any = None) -> Array:
        """The parameter itself, for a product whose own backward pass makes the gradient."""
        assert self.uses is not None, "a kernel that is used so does not wait"
        self.uses.at_once = True
        return self.kernel if dtype is None else self.kernel.astype(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], dtype: Any, out_dtype: Any
    ) -> Float[Array, "..."]:
        """The product; its backward pass leaves input and cotangent in place of the kernel's gradient."""
        if self.dy is not None:
            keep = self.x is not None
            return _put_off(x, self.kernel, self.x, self.dy, axes, contracted, dtype, out_dtype, keep)
        y = product(x, self.kernel, axes, contracted, dtype, out_dtype)
        x_axes = tuple(a for i, a in enumerate(axes) if i in contracted)
        y_axes = tuple(a for i, a in enumerate(axes) if i not in contracted)
        of = dict(axes=axes, contracted=contracted, dtype=dtype, kernel_dtype=self.kernel.dtype)
        assert self.uses is not None
        self.uses.found.append(Use(x, y, x_axes, y_axes, partial(kernel_gradient, **of)))
        return y


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _put_off(x, kernel, x_slot, dy_slot, axes, contracted, dtype, out_dtype, keep):  # type: ignore[no-untyped-def]
    return product_forward(x, kernel, axes, contracted, dtype, out_dtype)[0]


def _put_off_forward(x, kernel, x_slot, dy_slot, axes, contracted, dtype, out_dtype, keep):  # type: ignore[no-untyped-def]
    return product_forward(x, kernel, axes, contracted, dtype, out_dtype)


def _put_off_backward(axes, contracted, dtype, out_dtype, keep, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel = residuals
    return input_gradient(x, kernel, dy, axes, contracted, dtype), None, x if keep else None, dy


_put_off.defvjp(_put_off_forward, _put_off_backward)
