"""`BCT`: weights and all operations of the layers are quantised by blocks, without training and without data."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.convert.recipes.base import Inputs, Recipe
from jaxscale.convert.recipes.nearest import nearest
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import dot_product_attention, flash_attention
from jaxscale.nn.blockwise import BlockwiseAttention, BlockwiseFeedForward, BlockwiseNorm
from jaxscale.nn.formats import Stored, StoredWeight


@register
@dataclasses.dataclass(frozen=True)
class BCT(Recipe):
    """Blockwise compression without retraining (Dong et al. 2023, arXiv:2304.01483).

    Blocks of weights are integers with a power of two. The new run's model has `BlockwiseAttention`,
    `BlockwiseFeedForward` and `BlockwiseNorm`, so that softmax, activation functions, norms and what is between them
    are rounded to integers, too. The residual stream, the embedding and the output head are not.

    Args:
      bits: of a weight, 2 to 8.
      group: inputs of a block of weights.
      weights: see `Recipe`; integers in blocks of `group` × `group` with a power of two by default.
      activations: bits of the numbers that operations read and write, 2 to 8.
      size: consecutive numbers of a token that share a power of two.
      softmax: quantise attention, too. KV caches do not compute that; leave it out for long generations.

    Raises:
      ConfigError: a setting is out of its range.
    """

    group: int | None = 32
    activations: int = 8
    size: int = 32
    softmax: bool = True

    def __post_init__(self) -> None:
        if self.weights is None and self.bits == 1:
            raise ConfigError(f"BCT.bits = {self.bits}: integers have a sign; use 2 to 8")
        super().__post_init__()
        try:
            BlockwiseAttention(self.activations, self.size)
        except ConfigError as e:
            message = str(e).replace("BlockwiseAttention.bits", "BCT.activations")
            raise ConfigError(message.replace("BlockwiseAttention.", "BCT.")) from None

    @property
    def format(self) -> Stored:
        """The format of the rounded matrices."""
        return self.weights or Stored(f"int{self.bits}", group=self.group, outputs=self.group or 1, scale="e8m0")

    def model(self, config: Any) -> Any:
        """See `Recipe`.

        Raises:
          ConfigError: the model is no `Transformer` of dense layers, or has another attention kernel than softmax.
        """
        if not isinstance(config, TransformerConfig) or config.blocks:
            name = "one with Transformer.blocks" if isinstance(config, TransformerConfig) else type(config).__name__
            raise ConfigError(f"BCT needs a Transformer whose layers are alike, and this is {name}; use GPTQ")
        if self.softmax and config.attention not in (dot_product_attention, flash_attention):
            raise ConfigError(
                f"BCT rounds the weights of causal softmax attention, not of {config.attention!r}; set BCT.softmax = "
                "False"
            )
        own: dict[str, Any] = dict(bits=self.activations, size=self.size)
        layers: dict[str, Any] = {
            name: BlockwiseFeedForward(layer=getattr(config, name), **own)
            for name in ("mlp", "dense_mlp")
            if getattr(config, name) in config.layer_mlps()
        }
        attention = BlockwiseAttention(**own) if self.softmax else config.attention
        norm = BlockwiseNorm(norm=config.norm, **own)
        return dataclasses.replace(config, norm=norm, attention=attention, **layers)

    def quantize(
        self, kernel: Float[Array, "..."], contracted: tuple[int, ...], inputs: Inputs | None = None
    ) -> StoredWeight:
        """See `Recipe`."""
        return nearest(self.format, kernel, contracted)
