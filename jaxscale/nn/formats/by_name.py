"""`ByName`: a weight format for each of several groups of parameters."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn.weight_format import WeightFormat
from jaxscale.parallel import Weight


@register
@dataclasses.dataclass(frozen=True)
class ByName(WeightFormat):
    """Matrices in formats that depend on their names, as an import of a quantised checkpoint keeps them.

    Args:
      formats: the formats.
      paths: for each format the parameters that are in it, such as "runs/0/blocks/0/attn/q/kernel"; other parameters
        are plain arrays.

    Raises:
      ConfigError: there are not as many groups of paths as formats, or a path is in two.
    """

    formats: tuple[WeightFormat, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.formats) != len(self.paths):
            raise ConfigError(f"ByName has {len(self.formats)} formats and {len(self.paths)} groups of paths")
        every = [path for group in self.paths for path in group]
        if len(set(every)) != len(every):
            raise ConfigError(f"ByName.paths has {next(p for p in every if every.count(p) > 1)} twice")

    def of(self, info: TensorInfo) -> WeightFormat:
        """See `WeightFormat`."""
        return next((f for f, group in zip(self.formats, self.paths, strict=True) if info.path in group), self)

    def describe(self) -> str:
        """See `WeightFormat`."""
        return "; ".join(f.describe() for f in self.formats)

    def covers(self, info: TensorInfo) -> bool:
        """See `WeightFormat`; a parameter that no path names is not."""
        own = self.of(info)
        return own is not self and own.covers(info)

    def encode(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> Weight | Array:
        """Raise: the format follows from a parameter's name; see `of`."""
        raise ConfigError("ByName converts parameters by name; use encoded()")
