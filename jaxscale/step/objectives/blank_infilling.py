"""Autoregressive blank infilling: spans are predicted from a text around them that sees all of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Input, NextToken


@register
@dataclasses.dataclass(frozen=True)
class BlankInfilling(NextToken):
    """Cross-entropy of the tokens of spans that were cut out of a text (GLM, Du et al. 2022; GLM-130B).

    The data is `@infilled()`. Tokens of the context attend to all of the context; tokens of spans to it, and to earlier
    ones of spans. Attention kernels compute that as a causal mask over `mask_positions`, 0 for all of the context and
    1, 2, ... for what follows, so that every kernel and layout has it, also of a sharded sequence.

    Args:
      loss: the loss of each token, as of `NextToken`.
      z_loss: weight of the squared log-partition, as of `NextToken`.
    """

    in_formulas: ClassVar[bool] = False
    advice: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"mask_positions": "set train.data = @infilled(), with this corpus as infilled.data"}
    )

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return tokens, targets, weights, positions, and the positions that the mask compares, each (B, S)."""
        names = ("tokens", "targets", "weights", "positions", "mask_positions")
        return {n: Input((config.seq_len,), "float32" if n == "weights" else "int32", ("seq",)) for n in names}

    def check(self, config: TrainConfig) -> None:
        """Check that all layers are attention to whole sequences."""
        super().check(config)
        model = config.model
        if not isinstance(model, TransformerConfig):
            raise ConfigError(f"BlankInfilling needs a Transformer, not {type(model).__name__}")
        for layer in model.layer_specs():
            whole = getattr(layer.mixer, "whole", False)
            if not whole or layer.window is not None:
                part = "a window" if whole else type(layer.mixer).__name__
                raise ConfigError(
                    f"BlankInfilling's context attends in both directions, which {part} does not; use MultiHead() and "
                    "no windows in every layer"
                )
