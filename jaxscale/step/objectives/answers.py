"""Base of objectives that compare whole answers: the log-probability of each row's learned tokens, and its reference.

A row is one document: a prompt, whose tokens have weight 0, and an answer. `preference_files` makes such rows.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.models.base import LanguageModel
from jaxscale.nn import Stats
from jaxscale.parallel import as_weight
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, Objective, Totals, hidden_of
from jaxscale.step.objectives.pairs import Pairs, sums_of_pairs
from jaxscale.step.objectives.token_objective import ANNOTATE, TokenObjective

CACHED = "reference_logprobs"
"""The array of a batch with the reference's log-probability of each target, float32 (B, S)."""


class Answers(NamedTuple):
    """Some rows' answers; all arrays are float32 (n,).

    Args:
      logprob: the sum of the log-probabilities of its tokens.
      reference: the same of the reference, without a gradient; zeros if the objective has none.
      tokens: number of tokens, at least 1.
    """

    logprob: Float[Array, " n"]
    reference: Float[Array, " n"]
    tokens: Float[Array, " n"]

    @property
    def gain(self) -> Float[Array, " n"]:
        """The log-probability less that of the reference: the implicit reward of DPO, divided by beta."""
        return self.logprob - self.reference

    @property
    def mean(self) -> Float[Array, " n"]:
        """The mean log-probability of a token."""
        return self.logprob / self.tokens


class AnswerObjective(TokenObjective):
    """Base of objectives of whole answers."""

    advice = MappingProxyType({CACHED: ANNOTATE})

    def answers(
        self, model: LanguageModel, batch: Batch, key: Array | None, reference: nnx.Module | None
    ) -> tuple[Answers, Stats]:
        """Return every row's answer, and the statistics of the model's layers.

        Args:
          model: the model in training.
          batch: arrays by name, (B, ...).
          key: random key of dropout; `None` for none. The reference has no dropout.
          reference: the model with the initial parameters, or `None`.
        """
        logprob, stats = self._logprobs(model, batch, key)
        if reference is not None:
            theirs = self._logprobs(reference, batch, None)[0]
        elif CACHED in batch:
            theirs = jnp.sum(batch[CACHED] * batch["weights"], axis=1)
        else:
            assert not self.reference, f"{type(self).__name__} needs a reference"
            theirs = jnp.zeros_like(logprob)
        tokens = jnp.maximum(jnp.sum(batch["weights"], axis=1), 1.0)
        return Answers(logprob, jax.lax.stop_gradient(theirs), tokens), stats

    def _logprobs(self, model: Any, batch: Batch, key: Array | None) -> tuple[Array, Stats]:
        hidden, stats, batch = hidden_of(model, batch, key=key)
        with jax.named_scope("loss"):
            weight = as_weight(model.head_weight()).for_loss()
            nats = self.loss(hidden, weight, batch["targets"], softcap=model.logit_softcap)[0]
            return -jnp.sum(nats * batch["weights"], axis=1), stats


@dataclasses.dataclass(frozen=True)
class Preference(AnswerObjective, Pairs):
    """Base of objectives of pairs: of two consecutive rows, the first answer is preferred to the second.

    Args:
      loss: the loss of each token, as of `NextToken`.
    """

    def losses(self, chosen: Answers, rejected: Answers) -> Float[Array, " n"]:
        """Return the loss of each pair.

        Args:
          chosen: the preferred answers.
          rejected: the others.
        """
        raise NotImplementedError

    def rewards(self, answers: Answers) -> Float[Array, " n"]:
        """Return the reward that the model gives to answers, for metrics.

        Args:
          answers: the answers.
        """
        raise NotImplementedError

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the sums over pairs of the loss and of metrics, and statistics of layers."""
        rows, stats = self.answers(model, batch, key, reference)
        return {**self.sums(rows, batch), "stats": stats}

    def sums(self, rows: Answers, batch: Batch) -> Totals:
        """Return the sums over pairs of the loss and of metrics.

        Args:
          rows: every row's answer.
          batch: arrays by name, (B, ...).
        """
        chosen, rejected = (Answers(*(x[i::2] for x in rows)) for i in range(2))
        return sums_of_pairs(self.losses(chosen, rejected), self.rewards(chosen), self.rewards(rejected), batch)


def uses_reference(objective: Objective, cached: bool) -> None:
    """Set an objective's `reference`: needed unless the reference's log-probabilities are cached.

    Args:
      objective: a frozen dataclass.
      cached: whether they are an array of the batch.
    """
    object.__setattr__(objective, "reference", not cached)


def with_cached(inputs: dict[str, Input], config: TrainConfig, cached: bool) -> dict[str, Input]:
    """Return the inputs, with `reference_logprobs` if they are cached.

    Args:
      inputs: arrays by name.
      config: the run's settings.
      cached: whether they are an array of the batch.
    """
    return {**inputs, CACHED: Input((config.seq_len,), "float32", ("seq",))} if cached else inputs
