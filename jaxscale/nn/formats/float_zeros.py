"""`FloatZeros`: integers with a zero point that is a float."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.formats.stored import FLOATS, Stored
from jaxscale.nn.formats.weight import StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class FloatZeros(Stored):
    """Unsigned integers with a scale and a zero point for each group, both floats of one type (Badri & Shaji 2023).

    Args:
      numbers: "uint1" to "uint8".
      group: see `Stored`.
      outputs: see `Stored`.
      scale: "float32", "bfloat16" or "float16", also of the zero points.
      zeros: always True.
      centred: see `Stored`.
      word: see `Stored`.

    Raises:
      ConfigError: as `Stored`, or scales that are not floats.
    """

    numbers: str = "uint4"
    zeros: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in FLOATS or not self.zeros or self.centred:
            raise ConfigError(
                f"{self!r}: FloatZeros has a zero point and a scale of {', '.join(FLOATS)} for each group, and nothing "
                "else; use Stored"
            )

    def rounded(
        self,
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
        scale: Float[Array, "..."],
        zero: Float[Array, "..."] | None = None,
    ) -> StoredWeight:
        """See `Stored`; zero points are any numbers, rounded to the scales' type."""
        assert zero is not None
        zero = zero.astype(str(self.scale))
        codes = super().rounded(kernel, contracted, scale, zero.astype(jnp.float32))
        return dataclasses.replace(codes, zero=zero)
