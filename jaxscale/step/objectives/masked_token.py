"""The objective of encoders: predict masked tokens from all the other tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, UInt

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModel, is_causal, vocab_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, NextToken, Totals


@register
@dataclasses.dataclass(frozen=True)
class MaskedToken(NextToken):
    """Cross-entropy of masked tokens (BERT, Devlin et al. 2019), with new masks in each step (RoBERTa, Liu et al.).

    Each token except padding is replaced by the mask with probability `rate`. In training, the masked positions depend
    only on the step and the row's index in the global batch; in an evaluation only on the row's tokens, whatever the
    batch size. The loss is the sum over masked tokens divided by their expected number, so that it is exact under
    gradient accumulation.

    Args:
      loss: the loss of each token, as of `NextToken`.
      z_loss: weight of the squared log-partition, as of `NextToken`.
      rate: probability that a token is masked, 0.15 in BERT.
      mask: id of the mask token in the model's vocabulary; -1 is the last id.

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
        """Return the sums of `NextToken`, with the expected number of masked tokens as "tokens"."""
        totals = super().weights({"weights": _counted(batch)}, parts)
        return {**totals, "tokens": totals["tokens"] * self.rate}

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the sums of `NextToken` over masked tokens."""
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
        """Check that attention is bidirectional, and that the mask is in the vocabulary."""
        super().check(config)
        if is_causal(config.model):
            raise ConfigError(
                "MaskedToken needs a model whose tokens attend to later tokens; set Transformer.attention = "
                "@Bidirectional()"
            )
        if not isinstance(self.mask, int) or not -1 <= self.mask < vocab_of(config.model):
            raise ConfigError(
                f"MaskedToken.mask = {self.mask} is not one of the model's {vocab_of(config.model)} token ids"
            )

    def describe(self, config: TrainConfig) -> str:
        """Return the rate and the loss."""
        return f"{self.rate:.0%} of tokens masked, {super().describe(config)}"


def _counted(batch: Batch) -> Array:
    """Return 1 for each token that is not padding, else 0."""
    segments = batch.get("segment_ids")
    return (batch["weights"] if segments is None else segments > 0).astype(jnp.float32)


def _digest(tokens: Int[Array, "b s"]) -> UInt[Array, " b"]:
    """Return a hash of each row's tokens and their positions, modulo 2**32."""
    powers = jnp.asarray([pow(0x01000193, i, 2**32) for i in range(tokens.shape[1])], jnp.uint32)
    return jnp.sum(tokens.astype(jnp.uint32) * powers, axis=1, dtype=jnp.uint32)


_STREAM = 0x3A5C
"""Folded into the step's key, so that masks and dropout are drawn from different random streams."""
