"""A frozen kernel and the low-rank product that is added to it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.parallel import Weight, as_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Weight):
    """A kernel to which `scale · a · b` is added; stands in a `Linear` where its kernel stood (Hu et al. 2021).

    Args:
      kernel: (*inputs, *outputs), which gets no gradient; an array or another weight.
      a: (*inputs, rank).
      b: (rank, *outputs).
      scale: factor on the product.

    A stack of layers may come before each one's dimensions.
    """

    kernel: Float[Array, "..."] | Weight
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's."""
        return tuple(self.kernel.shape)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], dtype: Any, out_dtype: Any
    ) -> Float[Array, "..."]:
        """The frozen kernel's product, and the one of low rank."""
        y = as_weight(jax.lax.stop_gradient(self.kernel)).matmul(x, axes, contracted, dtype, out_dtype)
        inputs, outputs = axes[: len(contracted)], axes[len(contracted) :]
        h = as_weight(self.a).matmul(x, (*inputs, "rank"), contracted, dtype, dtype) * self.scale
        return y + as_weight(self.b).matmul(h, ("rank", *outputs), (0,), dtype, out_dtype)

    def dense(self, dtype: Any = None) -> Float[Array, "..."]:
        """The sum, as one kernel, by default in the frozen one's own type; added in float32."""
        base, rank = as_weight(self.kernel).dense(), self.a.shape[-1]
        lead = self.a.ndim + self.b.ndim - base.ndim - 2
        stack, inputs = self.a.shape[:lead], self.a.shape[lead:-1]
        a = self.a.astype(jnp.float32).reshape(*stack, math.prod(inputs), rank)
        b = self.b.astype(jnp.float32).reshape(*stack, rank, -1)
        more = self.scale * jnp.matmul(a, b, precision="highest")
        return (base.astype(jnp.float32) + more.reshape(base.shape)).astype(base.dtype if dtype is None else dtype)
