"""`Divided`: scales of few bits that are divided by a float32 number for each matrix, as nvfp4 has them in files."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.formats.stored import Stored
from jaxscale.nn.formats.weight import StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class Divided(Stored):
    """Scales of few bits over a float32 number for each matrix; a value of `Stored.scale`.

    The package compressed-tensors stores that number, which becomes the largest scale in the type's range, and divides
    by it (`weight_global_scale`); multiplication by its reciprocal would differ in the last bit.

    Args:
      numbers: type of the scales; see `Stored`.
      group: most scales that share a number; `None` is all of a matrix.
      outputs: as of `Stored`.
      scale: "float32".
      zeros: False.
      centred: False.
      word: as of `Stored`.
      activations: `None`.

    Raises:
      ConfigError: other settings than numbers, group and outputs.
    """

    numbers: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "float32" or self.zeros or self.centred or self.activations or self.word != "uint8":
            raise ConfigError(f"{self!r}: Divided is of numbers, group and outputs only; use Stored")

    def covers(self, info: TensorInfo) -> bool:
        """Raise: it is a format of scales."""
        raise ConfigError("Divided is a format of scales; write Stored(scale=Divided()) for a matrix")

    def rounded(
        self,
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
        scale: Float[Array, "..."],
        zero: Float[Array, "..."] | None = None,
    ) -> StoredWeight:
        """See `Stored`; the reciprocals of scales are stored."""
        whole = 1.0 / scale
        weight = super().rounded(kernel, contracted, 1.0 / whole)
        return dataclasses.replace(weight, scale=whole, divided=True)
