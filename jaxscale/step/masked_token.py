"""The objective of encoders: predict masked tokens from all the other tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.models.base import is_causal, vocab_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, NextToken, Totals


@register
@dataclasses.dataclass(frozen=True)
class MaskedToken(NextToken):
    """Cross-entropy of masked tokens (BERT, Devlin et al. 2019), masks drawn anew each step (RoBERTa, Liu et al. 2019).

    Each token but padding is replaced by the mask with probability `rate`. Which ones depends on the step and the row's
    number in the global batch alone; in an evaluation on the row's tokens alone, whatever the batches. The loss is a
    sum over masked tokens divided by how many there are on average, so that it is exact under accumulation.

    Args:
      loss, z_loss: as of `NextToken`.
      rate: the share of tokens that are masked, 0.15 in BERT.
      mask: the id of the mask token, which the model's vocabulary must have; -1 is its last id.

    Raises:
      ConfigError: a rate that is not between 0 and 1.
    """

    staged: ClassVar[bool] = False  # the first pipeline stage would have to draw the masks
    in_formulas: ClassVar[bool] = False
    both_ways: ClassVar[bool] = True
    rate: float = 0.15
    mask: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate < 1:
            raise ConfigError(f"MaskedToken.rate = {self.rate}: must be above 0 and below 1")

    def weights(self, batch: Batch, parts: int) -> Totals:
        totals = super().weights({"weights": _counted(batch)}, parts)
        return {**totals, "tokens": totals["tokens"] * self.rate}

    def terms(self, model: Any, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        masks = jax.random.key(0) if key is None else jax.random.fold_in(key, _STREAM)
        width = batch["tokens"].shape[1:]

        def masked(row: Array) -> Array:
            return jax.random.bernoulli(jax.random.fold_in(masks, row), self.rate, width)

        drawn = jax.vmap(masked)(batch["rows"] if key is not None else _digest(batch["tokens"]))
        mask = self.mask % model.head_weight().shape[0]
        tokens = jnp.where(drawn, mask, batch["tokens"])
        chosen = {"targets": batch["tokens"], "weights": _counted(batch) * drawn}
        return super().terms(model, {**batch, **chosen, "tokens": tokens}, key=key)

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if is_causal(config.model):
            raise ConfigError(
                "MaskedToken needs a model whose tokens see those behind them; set Transformer.attention = "
                "@Bidirectional()"
            )
        if not isinstance(self.mask, int) or not -1 <= self.mask < vocab_of(config.model):
            raise ConfigError(f"MaskedToken.mask = {self.mask} is none of the model's {vocab_of(config.model)} ids")

    def describe(self, config: TrainConfig) -> str:
        return f"{self.rate:.0%} of tokens masked, {super().describe(config)}"


def _counted(batch: Batch) -> Array:
    """1 for each token that is not padding."""
    segments = batch.get("segment_ids")
    return (batch["weights"] if segments is None else segments > 0).astype(jnp.float32)


def _digest(tokens: Int[Array, "b s"]) -> UInt[Array, " b"]:
    """A number of each row that depends on its tokens and their places, modulo 2**32."""
    powers = jnp.asarray([pow(0x01000193, i, 2**32) for i in range(tokens.shape[1])], jnp.uint32)
    return jnp.sum(tokens.astype(jnp.uint32) * powers, axis=1, dtype=jnp.uint32)


_STREAM = 0x3A5C
"""Folded into the step's key, so that masks are not drawn by the numbers of dropout."""
