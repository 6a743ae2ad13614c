"""A frozen weight in several formats, each with a low-rank adapter, of which a layer uses one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.adapted import Adapted
from jaxscale.parallel import Arithmetic, Weight, as_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ManyBits(Weight):
    """The weight `kernels[choice] + scale · a[choice] · b[choice]` (LLM-QFA, Yi et al. 2024).

    Each array can have a leading dimension of stacked layers, before that of the choices.

    Args:
      kernels: the frozen matrix in each format.
      a: `(n, *inputs, rank)`.
      b: `(n, rank, *outputs)`.
      choice: int32, the format that the layer uses.
      scale: factor on the product of `a` and `b`.
    """

    kernels: tuple[Float[Array, "..."] | Weight, ...]
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    choice: Int[Array, "..."]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return tuple(self.kernels[0].shape)

    def adapted(self, n: int) -> Adapted:
        """Return the weight of one format.

        Args:
          n: the format.
        """
        a, b = (x[:, n] if self.choice.ndim else x[n] for x in (self.a, self.b))
        return Adapted(self.kernels[n], a, b, self.scale)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """Return the product with the chosen weight; no other one is computed."""

        def one(n: int) -> Float[Array, "..."]:
            return self.adapted(n).matmul(x, axes, contracted, arithmetic)

        return jax.lax.switch(self.choice, [lambda n=n: one(n) for n in range(len(self.kernels))])

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`: those of each format, with a dimension of formats before the adapters' own."""
        lead = self.choice.ndim
        inner = [dataclasses.replace(info, path=f"{info.path}/{n}") for n in range(len(self.kernels))]
        kernels = tuple(as_weight(k).infos(i) for k, i in zip(self.kernels, inner, strict=True))
        sides = {
            "a": (self.a, (*info.axes[: self.a.ndim - 2], "rank")),
            "b": (self.b, (*info.axes[:lead], "rank", *info.axes[len(info.axes) - (self.b.ndim - lead - 2) :])),
        }
        a, b = (
            TensorInfo(f"{info.path}/{name}", tuple(x.shape), x.dtype, (*axes[:lead], None, *axes[lead:]))
            for name, (x, axes) in sides.items()
        )
        choice = TensorInfo(f"{info.path}/choice", tuple(self.choice.shape), self.choice.dtype, info.axes[:lead])
        return ManyBits(kernels, a, b, choice, self.scale)  # type: ignore[arg-type]

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the chosen weight as one array; the others are computed too."""
        options = [self.adapted(n).dense(dtype) for n in range(len(self.kernels))]
        chosen = self.choice.reshape(*self.choice.shape, *(1,) * (options[0].ndim - self.choice.ndim))
        whole = options[0]
        for n, option in enumerate(options[1:], 1):
            whole = jnp.where(chosen == n, option, whole)
        return whole
