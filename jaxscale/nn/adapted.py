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
        return self.base().matmul(x, axes, contracted, arithmetic) + self.added(x, axes, contracted, arithmetic)

    def base(self) -> Weight:
        """See `Weight`: the frozen kernel."""
        return as_weight(jax.lax.stop_gradient(self.kernel))

    def added(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`: the low-rank product."""
        inputs, outputs = axes[: len(contracted)], axes[len(contracted) :]
        down = arithmetic.plain(arithmetic.dtype)
        h = as_weight(self.a).matmul(x, (*inputs, "rank"), contracted, down) * self.scale
        return as_weight(self.b).matmul(h, ("rank", *outputs), (0,), arithmetic.plain())

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`: the kernel's own, and the kernel's inputs or outputs with the axis "rank"."""
        a, b = infos_of_factors(self.a, self.b, self.a.ndim + self.b.ndim - len(info.shape) - 2, info)
        inner = dataclasses.replace(info, path=f"{info.path}/kernel")
        return Adapted(as_weight(self.kernel).infos(inner), a, b, self.scale)  # type: ignore[arg-type]

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the sum as one array, added in float32; the default dtype is the kernel's."""
        base = as_weight(self.kernel).dense()
        more = self.scale * product_of_factors(self.a, self.b, self.a.ndim + self.b.ndim - base.ndim - 2)
        return (base.astype(jnp.float32) + more).astype(base.dtype if dtype is None else dtype)


def product_of_factors(a: Float[Array, "..."], b: Float[Array, "..."], lead: int) -> Float[Array, "..."]:
    """Return the kernel `a · b`, float32.

    Args:
      a: `(*layers, *inputs, rank)`.
      b: `(*layers, rank, *outputs)`.
      lead: how many dimensions of layers come first.
    """
    stack, rank = a.shape[:lead], a.shape[-1]
    left = a.astype(jnp.float32).reshape(*stack, math.prod(a.shape[lead:-1]), rank)
    right = b.astype(jnp.float32).reshape(*stack, rank, -1)
    return jnp.matmul(left, right, precision="highest").reshape(*a.shape[:-1], *b.shape[lead + 1 :])


def infos_of_factors(
    a: Float[Array, "..."], b: Float[Array, "..."], lead: int, info: TensorInfo
) -> tuple[TensorInfo, TensorInfo]:
    """Return a `TensorInfo` for each factor: the kernel's inputs or outputs, and the axis "rank".

    Args:
      a: see `product_of_factors`.
      b: likewise.
      lead: likewise.
      info: of the kernel.
    """
    axes, inputs = info.axes, a.ndim - 1
    sides = ("a", a, (*axes[:inputs], "rank")), ("b", b, (*axes[:lead], "rank", *axes[inputs:]))
    of_a, of_b = (TensorInfo(f"{info.path}/{name}", tuple(x.shape), x.dtype, own) for name, x, own in sides)
    return of_a, of_b
