"""The config of a transformer at another width."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError
from jaxscale.nn import MixtureOfExperts

if TYPE_CHECKING:
    from jaxscale.models.transformer_config import TransformerConfig


def at_width(config: TransformerConfig, width: int) -> TransformerConfig:
    """Return the config of the same model with another residual width, and hidden widths and heads in proportion.

    Sizes that are `None` still follow from the width. If `head_dim` is set, the numbers of heads and key heads
    scale; else heads become wider.

    Args:
      config: the config.
      width: the new width of the residual stream.

    Raises:
      ConfigError: a size that does not scale to a whole number, or an attention whose sizes do not depend on the
        width.
    """
    was = config.sizes
    for layer in config.layer_specs():
        if not layer.mixer.widens:
            raise ConfigError(
                f"{type(layer.mixer).__name__} has its own widths, which do not scale with the model's; use MultiHead()"
            )

    def scaled(name: str, value: int | None, new: int, old: int) -> int | None:
        if value is not None and value * new % old:
            raise ConfigError(
                f"{name} = {value} at width {was.width} does not scale to a whole number at width {width}; choose "
                f"another width, or leave out {name}, which then follows from the width"
            )
        return None if value is None else value * new // old

    heads = config.heads if config.head_dim is None else scaled("Transformer.heads", config.heads, width, was.width)
    hidden = scaled("Transformer.hidden", config.hidden, width, was.width)

    def widened(mlp: Any) -> Any:
        if not isinstance(mlp, MixtureOfExperts):
            return mlp
        return dataclasses.replace(mlp, hidden=scaled("MixtureOfExperts.hidden", mlp.hidden, width, was.width))

    blocks = tuple(dataclasses.replace(b, mlp=widened(b.mlp)) for b in config.blocks)
    sizes: dict[str, Any] = dict(width=width, heads=heads, kv_heads=None, hidden=hidden)
    wide = dataclasses.replace(config, **sizes, mlp=widened(config.mlp), blocks=blocks)
    key_heads = scaled("Transformer.kv_heads", config.kv_heads, wide.sizes.heads, was.heads)
    return dataclasses.replace(wide, kv_heads=key_heads)
