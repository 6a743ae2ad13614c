"""`Tracked`: a kernel with the largest magnitudes of earlier steps, for products with delayed scaling."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.parallel.arithmetic import Arithmetic
from jaxscale.parallel.scaled import magnitudes
from jaxscale.parallel.weight import Axes, Weight, input_gradient, kernel_gradient, product_forward, seed_for

OPERANDS = ("input", "kernel", "cotangent")
"""The rows of `Tracked.history`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tracked(Weight):
    """A kernel whose products are scaled by the largest magnitudes of earlier steps (Micikevicius et al. 2022).

    The "gradient" of `largest` is the largest magnitude of each operand in this step; its values are not read. Each
    array can have a leading dimension of stacked layers.

    Args:
      kernel: the parameter.
      history: float32 (3, n), the largest magnitudes of each of `OPERANDS` in the last n steps; 0 where there was none.
      largest: float32 (3,).
    """

    kernel: Float[Array, "..."]
    history: Float[Array, "*l 3 n"]
    largest: Float[Array, "*l 3"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return tuple(self.kernel.shape)

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`; products with it are scaled by its own magnitudes."""
        return self.kernel if dtype is None else self.kernel.astype(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: Axes, contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`."""
        seed, earlier = seed_for(x, arithmetic), jnp.max(self.history, axis=-1)
        return _product(x, self.kernel, earlier, self.largest, seed, axes, contracted, arithmetic)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _product(x, kernel, earlier, largest, seed, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    return _forward(x, kernel, earlier, largest, seed, axes, contracted, arithmetic)[0]


def _forward(x, kernel, earlier, largest, seed, axes, contracted, arithmetic):  # type: ignore[no-untyped-def]
    y, _ = product_forward(x, kernel, axes, contracted, arithmetic.scaled_by(*earlier))
    now = jnp.stack([_largest(x), _largest(kernel)])
    return y, (x, kernel, earlier, now, seed)


def _backward(axes, contracted, arithmetic, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel, earlier, now, seed = residuals
    arithmetic = arithmetic.scaled_by(*earlier).seeded(seed)
    dx = input_gradient(x, kernel, dy, axes, contracted, arithmetic)
    dkernel = kernel_gradient(x, dy, axes, contracted, arithmetic, kernel.dtype)
    return dx, dkernel, None, jnp.append(now, _largest(dy)), None


_product.defvjp(_forward, _backward)


def _largest(a: Array) -> Float[Array, ""]:
    return jnp.max(magnitudes(a.astype(jnp.float32)))
