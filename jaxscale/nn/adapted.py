"""A frozen kernel and the low-rank product that is added to it."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A kernel to which `scale · a · b` is added; stands in a `Linear` where its kernel stood (Hu et al. 2021).

    Args:
      kernel: (*inputs, *outputs), which gets no gradient.
      a: (*inputs, rank).
      b: (rank, *outputs).
      scale: factor on the product.

    A stack of layers may come before each one's dimensions.
    """

    kernel: Float[Array, "..."]
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = dataclasses.field(metadata={"static": True})

    def merged(self, inputs: int) -> Float[Array, "..."]:
        """The sum, as one kernel in the kernel's own type; added in float32.

        Args:
          inputs: how many dimensions are contracted.
        """
        lead = self.a.ndim - inputs - 1
        rank, stack, at = self.a.shape[-1], self.kernel.shape[:lead], self.kernel.shape[lead : lead + inputs]
        a = self.a.astype(jnp.float32).reshape(*stack, math.prod(at), rank)
        b = self.b.astype(jnp.float32).reshape(*stack, rank, -1)
        more = self.scale * jnp.matmul(a, b, precision="highest")
        return (self.kernel.astype(jnp.float32) + more.reshape(self.kernel.shape)).astype(self.kernel.dtype)
