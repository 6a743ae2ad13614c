"""A frozen weight with a low-rank adapter."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.parallel import Arithmetic, Weight, as_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Weight):
    """The weight `kernel + scale · a · b`, in place of the kernel of a `Linear` (LoRA, Hu et al. 2021).

    Each array can have a leading dimension of stacked layers.

    Args:
      kernel: `(*inputs, *outputs)`, an array or another weight, which gets no gradient.
      a: `(*inputs, rank)`.
      b: `(rank, *outputs)`.
      scale: factor on the product.
    """

    kernel: Float[Array, "..."] | Weight
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return tuple(self.kernel.shape)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """Return the product with the frozen kernel plus the low-rank product, which is not rounded further."""
        y = as_weight(jax.lax.stop_gradient(self.kernel)).matmul(x, axes, contracted, arithmetic)
        inputs, outputs = axes[: len(contracted)], axes[len(contracted) :]
        down = arithmetic.plain(arithmetic.dtype)
        h = as_weight(self.a).matmul(x, (*inputs, "rank"), contracted, down) * self.scale
        return y + as_weight(self.b).matmul(h, ("rank", *outputs), (0,), arithmetic.plain())

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`: the kernel's own, and the kernel's inputs or outputs with the axis "rank"."""
        lead = self.a.ndim + self.b.ndim - len(info.shape) - 2
        inputs = self.a.ndim - 1
        sides = (
            ("a", self.a, (*info.axes[:inputs], "rank")),
            ("b", self.b, (*info.axes[:lead], "rank", *info.axes[inputs:])),
        )
        a, b = (TensorInfo(f"{info.path}/{name}", tuple(x.shape), x.dtype, axes) for name, x, axes in sides)
        inner = dataclasses.replace(info, path=f"{info.path}/kernel")
        return Adapted(as_weight(self.kernel).infos(inner), a, b, self.scale)  # type: ignore[arg-type]

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the sum as one array, added in float32; the default dtype is the kernel's."""
        base, rank = as_weight(self.kernel).dense(), self.a.shape[-1]
        lead = self.a.ndim + self.b.ndim - base.ndim - 2
        stack, inputs = self.a.shape[:lead], self.a.shape[lead:-1]
        a = self.a.astype(jnp.float32).reshape(*stack, math.prod(inputs), rank)
        b = self.b.astype(jnp.float32).reshape(*stack, rank, -1)
        more = self.scale * jnp.matmul(a, b, precision="highest")
        return (base.astype(jnp.float32) + more.reshape(base.shape)).astype(base.dtype if dtype is None else dtype)
