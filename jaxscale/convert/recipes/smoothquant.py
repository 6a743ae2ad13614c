"""SmoothQuant: factors that make activations as easy to round as weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Folding, Inputs
from jaxscale.convert.recipes.nearest import nearest
from jaxscale.errors import ConfigError
from jaxscale.nn.formats import Stored, StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class SmoothQuant(Folding):
    """SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): max |x|^strength / max |w|^(1 - strength) for each input.

    Norms divide by the factors and the matrices after them are multiplied, so that the function is as before. Weights
    are rounded to nearest, by default to 8 bits with a scale for each output; activations are rounded by whoever runs
    the model.

    Args:
      bits: see `Recipe`.
      group: see `Recipe`.
      weights: see `Recipe`; integers of `bits` bits, symmetric around 0, by default.
      strength: how much of the range moves from activations to weights, 0 to 1.

    Raises:
      ConfigError: `strength` is out of its range.
    """

    reads_inputs: ClassVar[bool] = True
    only_norms: ClassVar[bool] = True
    bits: int = 8
    group: int | None = None
    strength: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.strength <= 1:
            raise ConfigError(f"SmoothQuant.strength = {self.strength}: must be from 0 to 1")

    @property
    def format(self) -> Stored:
        """The format of the rounded matrices."""
        return self.weights or Stored(f"int{self.bits}", group=self.group)

    def factors(
        self, kernels: Sequence[Float[Array, "n o"]], inputs: Inputs, repeats: int = 1, width: int = 1
    ) -> Float[Array, " n"]:
        """See `Folding`."""
        return _factors(self.strength, tuple(kernels), inputs.largest)

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`."""
        return nearest(self.format, kernel, contracted)


@jax.jit
def _factors(strength: float, kernels: tuple[Array, ...], largest: Array) -> Array:
    weights = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(k), axis=1) for k in kernels])
    by = jnp.maximum(largest, 1e-5) ** strength / jnp.maximum(weights, 1e-5) ** (1 - strength)
    return jnp.maximum(by, 1e-5)
