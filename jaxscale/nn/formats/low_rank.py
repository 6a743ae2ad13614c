"""`WithLowRank`: a stored matrix with a low-rank one beside it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.formats.stored import FLOATS, Stored, sizes_of
from jaxscale.nn.weight_format import WeightFormat


@register
@dataclasses.dataclass(frozen=True)
class WithLowRank(WeightFormat):
    """A stored matrix plus the product of two narrow ones (Liu et al. 2024, EoRA).

    Args:
      weights: the format of the matrix.
      rank: of the product.
      dtype: of its factors: "float32", "bfloat16" or "float16".

    Raises:
      ConfigError: a setting is out of its range.
    """

    weights: Stored = Stored()
    rank: int = 8
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_factors("WithLowRank", self.rank, self.dtype)
        if not isinstance(self.weights, Stored):
            raise ConfigError(f"WithLowRank.weights must be a Stored format, not {self.weights!r}")

    def check(self, infos: Tree) -> None:
        """See `WeightFormat`: by the format of the matrix."""
        self.weights.check(infos)

    def covers(self, info: TensorInfo) -> bool:
        """Return whether the format of the matrix covers it.

        Raises:
          ConfigError: it cannot be stored, or its rank is below `rank`.
        """
        return self.weights.covers(info) and refuse_rank("WithLowRank", self.rank, info)

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Adapted:
        """See `WeightFormat`; the low-rank part is the error's largest singular vectors."""
        weight = self.weights.encode(kernel, contracted)
        return Adapted(
            weight, *factors_of(kernel.astype(jnp.float32) - weight.dense(), contracted, self.rank, self.dtype), 1.0
        )


def factors_of(
    kernel: Float[Array, "..."], contracted: tuple[int, ...], rank: int, dtype: str
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return a kernel's factors, `(*layers, *inputs, rank)` and `(*layers, rank, *outputs)`; see `factors`.

    Args:
      kernel: the kernel.
      contracted: its dimensions that a product sums over.
      rank: of the product.
      dtype: of the factors.
    """
    stack, ins, outs = sizes_of(kernel.shape, contracted)
    a, b = factors(kernel.astype(jnp.float32).reshape(*stack, math.prod(ins), -1), rank)
    return a.reshape(*stack, *ins, rank).astype(dtype), b.reshape(*stack, rank, *outs).astype(dtype)


def factors(matrix: Float[Array, "... n o"], rank: int) -> tuple[Float[Array, "... n r"], Float[Array, "... r o"]]:
    """Return the factors of the nearest matrix of a rank, with the root of each singular value in both.

    Args:
      matrix: float32.
      rank: of the product.
    """
    u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
    root = jnp.sqrt(s[..., :rank])
    return u[..., :rank] * root[..., None, :], root[..., None] * v[..., :rank, :]


def check_factors(name: str, rank: int, dtype: str) -> None:
    """Check the settings of factors.

    Args:
      name: of the format.
      rank: of the product.
      dtype: of the factors.

    Raises:
      ConfigError: one is out of its range.
    """
    check_whole(f"{name}.rank", rank)
    if dtype not in FLOATS:
        raise ConfigError(f"{name}.dtype = {dtype!r}: must be one of {', '.join(FLOATS)}")


def refuse_rank(name: str, rank: int, info: TensorInfo) -> bool:
    """Return True if a matrix has at least a rank.

    Args:
      name: of the format.
      rank: the rank.
      info: the matrix.

    Raises:
      ConfigError: it has not.
    """
    assert info.contracted is not None
    most = min(map(math.prod, sizes_of(info.shape, info.contracted)[1:]))
    if rank > most:
        raise ConfigError(f"{name}.rank = {rank} is above the rank of {info.path}, which is {most}")
    return True
