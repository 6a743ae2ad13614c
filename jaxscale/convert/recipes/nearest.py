"""Round to nearest."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe
from jaxscale.nn.formats import Stored, StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class RoundToNearest(Recipe):
    """Each weight becomes the nearest number of its group; needs no data.

    Args:
      bits: see `Recipe`.
      group: see `Recipe`.
      weights: see `Recipe`.
    """

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`."""
        return nearest(self.format, kernel, contracted)


@functools.partial(jax.jit, static_argnums=(0, 2))
def nearest(form: Stored, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> StoredWeight:
    """Return a kernel rounded to nearest.

    Args:
      form: the format.
      kernel: see `Recipe.quantize`.
      contracted: see `Recipe.quantize`.
    """
    return form.encode(kernel, contracted)
