"""`QMoE`: experts in less than one bit for each weight."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe, refuse_numbers
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import TernaryCode
from jaxscale.nn.formats.ternary_code import check_bits


@register
@dataclasses.dataclass(frozen=True)
class QMoE(Recipe):
    """QMoE (Frantar & Alistarh 2023, arXiv:2310.16795): experts of -1, 0 and 1, in words of a dictionary.

    Which weights of an output are not 0 follows from their size times the root of the input's mean square over the
    calibration tokens. The paper corrects later weights for the error of earlier ones, as GPTQ does; this does not.
    Matrices that are not of experts stay as they are.

    Args:
      bits: for each weight of an expert, scales included.
      group: not used; leave it.
      weights: not used; leave it.

    Raises:
      ConfigError: a setting is out of its range.
    """

    reads_inputs: ClassVar[bool] = True
    bits: float = 0.8  # type: ignore[assignment]

    def __post_init__(self) -> None:
        refuse_numbers(self, "set QMoE.bits", used=("bits",))
        check_bits("QMoE.bits", self.bits)

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The format of experts."""
        return TernaryCode(self.bits)

    def quantize(self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None) -> Any:
        """See `Recipe`; without inputs all have the same weight."""
        if inputs is None:
            return _encoded(self.format, kernel, contracted, None)
        size = jnp.sqrt(jnp.diagonal(inputs.second))
        return _encoded(self.format, kernel, contracted, jnp.maximum(size, 1e-4 * jnp.max(size) + 1e-12))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encoded(form: TernaryCode, kernel: Array, contracted: tuple[int, ...], weights: Array | None) -> Any:
    return form.encode(kernel, contracted, weights)
