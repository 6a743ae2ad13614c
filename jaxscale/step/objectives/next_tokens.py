"""Multi-token prediction: the next token, and further ones by modules of their own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.models.base import LanguageModel, PredictsAhead
from jaxscale.nn.stats import total
from jaxscale.parallel.seeds import HEAD, random_products
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, NextToken, Totals, hidden_of
from jaxscale.step.ranges import check_number


@register
@dataclasses.dataclass(frozen=True)
class NextTokens(NextToken):
    """Cross-entropy of the next token and of further ones (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    The loss is that of `NextToken` plus `weight` times the mean over depths of the mean cross-entropy of the token
    k + 1 ahead, which module k of `Transformer.multi_token` predicts from the tokens between. A target counts with its
    own weight, if it is in the document; as in the paper, the sum over those that count is divided by the number of all
    tokens. "loss" is that of the next token, as of `NextToken`; `loss_ahead_1` and so on are means over the targets of
    module 1 and so on.

    Args:
      loss: the loss of each token, as of `NextToken`.
      z_loss: weight of the squared log-partition of the next token, as of `NextToken`.
      weight: weight of the modules' loss: 0.3 at first in DeepSeek-V3, 0.1 later.

    Raises:
      ConfigError: a weight that is not above 0.
    """

    staged: ClassVar[bool] = False  # modules read the embedding, which the last pipeline stage does not hold
    in_formulas: ClassVar[bool] = False
    trains_ahead: ClassVar[bool] = True
    weight: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "weight", above=0)

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the sums of `NextToken`, and of each depth the weighted cross-entropy and the weights."""
        assert isinstance(model, PredictsAhead)  # see `check`
        depths = range(1, model.ahead + 1)
        further = {name: x for k in depths for name, x in _ahead(batch, k).items()}
        hidden, stats, arranged = hidden_of(model, {**batch, **further}, key=key)
        inputs: dict[str, Any] = {k: arranged.get(k) for k in ("positions", "segment_ids", "rows")}
        tokens = [arranged[f"ahead_tokens_{k}"] for k in depths]
        states, more = model.hidden_ahead(hidden, tokens, key=key, arranged=True, **inputs)
        with random_products(key, batch.get("rows"), HEAD):
            terms = self.of_hidden(model, hidden, total([stats, more]), arranged)
            terms |= {"ahead": [], "ahead_tokens": []}
            for k, state in zip(depths, states, strict=True):
                of = {name: arranged[f"ahead_{name}_{k}"] for name in ("targets", "weights")}
                with jax.named_scope(f"ahead_{k}"):
                    terms["ahead"].append(self.of_hidden(model, state, {}, of)["nats"])
                terms["ahead_tokens"].append(jnp.sum(of["weights"]))
        return terms

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the value of `NextToken` plus that of the modules."""
        # divided by the number of all tokens, as in the paper: it needs no model
        ahead = sum(totals["ahead"]) / len(totals["ahead"]) / jnp.maximum(totals["tokens"], 1.0)
        return super().value(totals) + self.weight * ahead

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the metrics of `NextToken`, and the mean cross-entropy of each depth in nats."""
        pairs = zip(totals["ahead"], totals["ahead_tokens"], strict=True)
        ahead = {f"loss_ahead_{k}": nats / jnp.maximum(n, 1.0) for k, (nats, n) in enumerate(pairs, 1)}
        return super().metrics(totals) | ahead

    def check(self, config: TrainConfig) -> None:
        """Check that the model has modules for further tokens."""
        super().check(config)
        # a default model is replaced by that of the start, and checked then
        replaced = config.start is not None and config.model == TrainConfig().model
        if not replaced and not getattr(config.model, "multi_token", 0):
            raise ConfigError(
                "NextTokens trains modules that predict further tokens, and the model has none; set "
                "Transformer.multi_token = 1, or train.objective = @NextToken()"
            )

    def describe(self, config: TrainConfig) -> str:
        """Return the number of further tokens and the loss of each token."""
        modules = getattr(config.model, "multi_token", 0)
        return f"{super().describe(config)}, and {modules} further, weight {self.weight:g}"


def _ahead(batch: Batch, k: int) -> dict[str, Array]:
    """Return the inputs, targets and weights of depth k, (B, S), by the names that `terms` uses."""
    weights, segments = _shifted(batch["weights"], k), batch.get("segment_ids")
    if segments is not None:
        weights = weights * (_shifted(segments, k) == segments)
    return {
        f"ahead_tokens_{k}": _shifted(batch["targets"], k - 1),
        f"ahead_targets_{k}": _shifted(batch["targets"], k),
        f"ahead_weights_{k}": weights,
    }


def _shifted(x: Shaped[Array, "b s"], k: int) -> Shaped[Array, "b s"]:
    """Return the column k further on, zeros after the last."""
    return constrain(jnp.pad(x[:, k:], ((0, 0), (0, min(k, x.shape[1])))), "batch", "seq")
