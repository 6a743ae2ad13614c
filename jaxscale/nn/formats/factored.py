"""`Factors`: matrices as products of two narrow ones, which are never multiplied with each other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.adapted import infos_of_factors, product_of_factors
from jaxscale.nn.formats.low_rank import check_factors, factors_of, refuse_rank
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Arithmetic, Weight, as_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factored(Weight):
    """The kernel `a · b`.

    Args:
      a: `(*layers, *inputs, rank)`.
      b: `(*layers, rank, *outputs)`.
      inputs: how many dimensions the kernel's inputs have.
    """

    a: Float[Array, "..."]
    b: Float[Array, "..."]
    inputs: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def _lead(self) -> int:
        return self.a.ndim - 1 - self.inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return (*self.a.shape[:-1], *self.b.shape[self._lead + 1 :])

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`; in float32 by default."""
        return product_of_factors(self.a, self.b, self._lead).astype(dtype or jnp.float32)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`: the product with `a`, then with `b`."""
        ins, outs = axes[: self.inputs], axes[self.inputs :]
        if contracted[0] != 0:
            return super().matmul(x, axes, contracted, arithmetic)
        h = as_weight(self.a).matmul(x, (*ins, "rank"), contracted, arithmetic.plain(arithmetic.dtype))
        return as_weight(self.b).matmul(h, ("rank", *outs), (0,), arithmetic.plain())

    def infos(self, info: TensorInfo) -> Tree:
        """See `Weight`: the kernel's inputs or outputs, and the axis "rank"."""
        return Factored(*infos_of_factors(self.a, self.b, self._lead, info), self.inputs)  # type: ignore[arg-type]


@register
@dataclasses.dataclass(frozen=True)
class Factors(WeightFormat):
    """Matrices as products of two narrow ones, from their largest singular values.

    Args:
      rank: of the product.
      dtype: of its factors: "float32", "bfloat16" or "float16".

    Raises:
      ConfigError: a setting is out of its range.
    """

    rank: int = 32
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_factors("Factors", self.rank, self.dtype)

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of a layer.

        Raises:
          ConfigError: its rank is below `rank`.
        """
        return super().covers(info) and refuse_rank("Factors", self.rank, info)

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Factored:
        """See `WeightFormat`."""
        return Factored(*factors_of(kernel, contracted, self.rank, self.dtype), len(contracted))
