"""`D2MoE`: 8-bit integers of which the first bits can be read alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe, refuse_numbers
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import NestedBits


@register
@dataclasses.dataclass(frozen=True)
class D2MoE(Recipe):
    """Nested bits (D²MoE, arXiv:2504.15299): one run is one of 4, 6 and 8 bits. Rounds to nearest, without data.

    Args:
      bits: not used; leave it.
      group: consecutive inputs that share a scale; `None` is all.
      weights: not used; leave it.
      widths: bits of each slice, the first bits first.

    Raises:
      ConfigError: a setting is out of its range.
    """

    group: int | None = 64
    widths: tuple[int, ...] = (4, 2, 2)

    def __post_init__(self) -> None:
        refuse_numbers(self, "set D2MoE.widths", used=("group",))
        _ = self.format

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of the slices."""
        return NestedBits(self.widths, self.group)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`."""
        return _encoded(self.format, kernel, contracted)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encoded(form: NestedBits, kernel: Array, contracted: tuple[int, ...]) -> Any:
    return form.encode(kernel, contracted)
