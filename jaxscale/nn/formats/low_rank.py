"""`WithLowRank`: a stored matrix with a low-rank one beside it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.formats.stored import FLOATS, Stored, dimensions
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
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigError(f"WithLowRank.rank = {self.rank!r}: must be a whole number of at least 1")
        if self.dtype not in FLOATS:
            raise ConfigError(f"WithLowRank.dtype = {self.dtype!r}: must be one of {', '.join(FLOATS)}")
        if not isinstance(self.weights, Stored):
            raise ConfigError(f"WithLowRank.weights must be a Stored format, not {self.weights!r}")

    def covers(self, info: TensorInfo) -> bool:
        """Return whether the format of the matrix covers it.

        Raises:
          ConfigError: it cannot be stored, or its rank is below `rank`.
        """
        if not self.weights.covers(info):
            return False
        assert info.contracted is not None
        _, inputs, outputs = dimensions(len(info.shape), info.contracted)
        most = min(math.prod(info.shape[d] for d in dims) for dims in (inputs, outputs))
        if self.rank > most:
            raise ConfigError(f"WithLowRank.rank = {self.rank} is above the rank of {info.path}, which is {most}")
        return True

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Adapted:
        """See `WeightFormat`; the low-rank part is the error's largest singular vectors."""
        weight = self.weights.encode(kernel, contracted)
        lead, inputs, outputs = dimensions(kernel.ndim, contracted)
        sizes = [[kernel.shape[d] for d in dims] for dims in (lead, inputs, outputs)]
        error = (kernel.astype(jnp.float32) - weight.dense()).reshape(*sizes[0], math.prod(sizes[1]), -1)
        u, s, v = jnp.linalg.svd(error, full_matrices=False)
        a = (u[..., : self.rank] * s[..., None, : self.rank]).reshape(*sizes[0], *sizes[1], self.rank)
        b = v[..., : self.rank, :].reshape(*sizes[0], self.rank, *sizes[2])
        return Adapted(weight, a.astype(self.dtype), b.astype(self.dtype), 1.0)
