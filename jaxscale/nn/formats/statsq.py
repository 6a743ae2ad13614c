"""`StatsQ`: integers with scales from the mean magnitude, which oscillate less in training."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.formats.blocks import cut
from jaxscale.nn.formats.stored import Stored, above_zero, dimensions
from jaxscale.nn.formats.weight import StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class StatsQ(Stored):
    """Statistical weight quantisation of OFQ (Liu et al. 2023, "Oscillation-free Quantization").

    The numbers of b bits are (k + 1/2) · s for k from -2^(b-1) to 2^(b-1) - 1, so that none is 0, and s is 2 / 2^(b-1)
    times the mean magnitude of a group. Scales follow the weights' statistics and are not learned, which in training
    (`Rounded(weights=@StatsQ())`) makes fewer weights jump between two numbers.

    Args:
      numbers: "int2" to "int8".
      group: as of `Stored`.
      outputs: as of `Stored`.
      scale: as of `Stored`.
      zeros: False.
      centred: False.
      word: as of `Stored`.

    Raises:
      ConfigError: other numbers, or zero points or means.
    """

    numbers: str = "int2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.numbers.startswith("int"):
            raise ConfigError(f"StatsQ.numbers = '{self.numbers}': must be 'int2' to 'int8'")
        if self.zeros or self.centred:
            name = "zeros" if self.zeros else "centred"
            raise ConfigError(f"StatsQ.{name} = True: its numbers lie evenly around 0; leave it False, or use Stored")

    def scales(self, kernel: Float[Array, "..."], contracted: tuple[int, ...]) -> tuple[Float[Array, "..."], None]:
        """See `Stored`."""
        blocks, entries = cut(kernel.astype(jnp.float32), self.block(kernel.shape, contracted))
        return above_zero(2.0 ** (2 - self.bits) * jnp.mean(jnp.abs(blocks), entries)), None

    def rounded(
        self,
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
        scale: Float[Array, "..."],
        zero: Float[Array, "..."] | None = None,
    ) -> StoredWeight:
        """See `Stored`; the stored zero point is -1/2."""
        stored, spread_scale = self._stored_scale(scale, kernel.shape, contracted)
        codes = self._kind.encode(kernel.astype(jnp.float32) / spread_scale - 0.5)
        lead = kernel.shape[: len(dimensions(kernel.ndim, contracted)[0])]
        half = jnp.full((*lead, *(1 for _ in kernel.shape[len(lead) :])), -0.5, jnp.float32)
        axis = self.axis(kernel.shape, contracted)
        assert axis is not None, "covers() checks this"
        return StoredWeight.of(codes, self._kind.name, axis, self.word, scale=stored, zero=half)
