"""Distillation: a student learns the token distribution of a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import meant, register
from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModel, LanguageModelConfig, logits_of, order_of, vocab_of
from jaxscale.nn import auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.parallel import Logits, logprobs_at, token_logprobs, vocabulary_sum
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, NextToken, Totals, hidden_of
from jaxscale.step.objectives.divergences import Divergence, ForwardKL
from jaxscale.step.objectives.token_objective import ANNOTATE, TokenObjective
from jaxscale.step.ranges import check_number
from jaxscale.step.start import Start

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Arrays of a batch with the teacher's most likely tokens, (B, S, K): int32 ids, and float32 log-probabilities."""
SMALLEST = 1e-7
"""The smallest probability of all other tokens together, about the rounding of a float32 sum of the cached ones."""


@register
@dataclasses.dataclass(frozen=True)
class Distill(TokenObjective):
    """Distillation (Hinton et al. 2015, arXiv:1503.02531): a divergence of the student from a teacher, at every token.

    The loss is the weighted mean over tokens of

        divergence(teacher, student) + cross_entropy * nats of the token + hidden * squared distance of hidden states

    The teacher is another run, frozen beside the student and sharded by the same rules, or with `top` its cached
    log-probabilities in the data (`annotated`). Logits of neither model are stored.

    Args:
      teacher: the run with the teacher, `@FromRun()`; its model may have another size, but needs the same vocabulary.
      divergence: `ForwardKL()`, `ReverseKL()`, `JensenShannon()`, or a hashable function of both log-probabilities.
      temperature: divides both models' logits in the divergence (the loss is not multiplied by its square).
      cross_entropy: weight of the cross-entropy of the data's own tokens.
      hidden: weight of the squared distance between the final hidden states, a mean over their elements.
      top: number of the teacher's most likely tokens that are cached; 0 computes the teacher in each step. All other
        tokens count as one, so that the divergence is a lower bound of the exact one.
      loss: the loss of each token in an evaluation of the student alone, as of `NextToken`.

    Raises:
      ConfigError: there is neither a teacher nor `top`, or both; or a setting is out of range.
    """

    evaluated: ClassVar[tuple[str, ...]] = ("loss", "cross_entropy")
    unit: ClassVar[str] = "nats per token"
    advice: ClassVar[Mapping[str, str]] = MappingProxyType({IDS: ANNOTATE, LOGPROBS: ANNOTATE})
    teacher: Start | None = None
    divergence: Divergence = ForwardKL()
    temperature: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    top: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "temperature", above=0)
        check_number(self, "cross_entropy", least=0)
        check_number(self, "hidden", least=0)
        if not isinstance(self.top, int) or isinstance(self.top, bool) or self.top < 0:
            raise ConfigError(f"Distill.top = {self.top!r}: must be a whole number, 0 or more")
        if isinstance(self.divergence, type) or not callable(self.divergence):
            raise ConfigError(
                f"Distill.divergence must be a divergence such as ForwardKL(), not {self.divergence!r}"
                f"{meant(self.divergence, ('__call__',))}"
            )
        if self.teacher is not None and not all(hasattr(type(self.teacher), m) for m in ("settled", "params", "run")):
            raise ConfigError(f"Distill.teacher must be FromRun('runs/teacher'), not {self.teacher!r}")
        if (self.teacher is None) == (self.top == 0):
            both = "has both" if self.teacher is not None else "has neither"
            raise ConfigError(
                f"Distill {both} a teacher (Distill.teacher = @FromRun()) and cached log-probabilities (Distill.top); "
                "set one of them"
            )
        if self.top and (self.hidden or self.temperature != 1.0):
            name = "hidden" if self.hidden else "temperature"
            raise ConfigError(f"Distill.{name} needs the teacher itself, not what is cached of it; set Distill.teacher")
        object.__setattr__(self, "reference", self.teacher is not None)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken`, and what is cached of the teacher."""
        inputs = super().inputs(config)
        if self.top:
            shape, axes = (config.seq_len, self.top), ("seq", None)
            inputs |= {IDS: Input(shape, "int32", axes), LOGPROBS: Input(shape, "float32", axes)}
        return inputs

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the sum of the tokens' weights, and `parts`."""
        return NextToken().weights(batch, parts)

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the weighted sums of the divergence, the cross-entropy and the distance, and statistics of layers."""
        hidden, stats, arranged = hidden_of(model, batch, key=key)
        student, weights = logits_of(model, hidden), arranged["weights"]
        totals: dict[str, Any] = {"stats": stats, "distance": jnp.zeros([], jnp.float32)}
        if reference is None:
            totals["divergence"] = jnp.sum(self._cached(student, arranged[IDS], arranged[LOGPROBS]) * weights)
        else:
            assert isinstance(reference, LanguageModel)  # see `check`
            orders = [order_of(m, batch["tokens"].shape[1]) for m in (model, reference)]
            if not _same(*orders):
                raise ConfigError(
                    "teacher and student process tokens in different orders; give both the same attention"
                )
            theirs = jax.lax.stop_gradient(hidden_of(reference, batch)[0])
            teacher = jax.lax.stop_gradient(logits_of(reference, theirs))
            both = (teacher.at(self.temperature), student.at(self.temperature))
            totals["divergence"] = jnp.sum(vocabulary_sum(self.divergence, both, trained=(False, True)) * weights)
            if self.hidden:
                apart = (hidden.astype(jnp.float32) - theirs.astype(jnp.float32)) ** 2
                totals["distance"] = jnp.sum(jnp.mean(apart, axis=2) * weights)
        nats = -token_logprobs(student, arranged["targets"])
        totals["nats"] = jnp.sum((nats if self.cross_entropy else jax.lax.stop_gradient(nats)) * weights)
        return totals | self.of_tokens(-nats, arranged)

    def of_tokens(self, logprobs: Float[Array, "b s"], batch: Batch) -> Totals:
        """Return further sums of a subclass; in this class none.

        Args:
          logprobs: of the targets, by the student.
          batch: the batch, in the order of `logprobs`.
        """
        return {}

    def _cached(self, student: Logits, ids: Array, theirs: Float[Array, "b s k"]) -> Float[Array, "b s"]:
        """Return the divergence over the cached tokens, and one that is all others together."""
        ours = logprobs_at(student, ids)

        def with_rest(logprobs: Array) -> Array:
            rest = jnp.log(jnp.maximum(1 - jnp.sum(jnp.exp(logprobs), axis=2, keepdims=True), SMALLEST))
            return jnp.concatenate([logprobs, rest], axis=2)

        return jnp.sum(self.divergence(with_rest(theirs), with_rest(ours)), axis=2)

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of a token plus the auxiliary losses of layers."""
        return self._loss(totals) + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the loss, the divergence, the cross-entropy in nats, and the metrics of layers."""
        tokens = jnp.maximum(totals["tokens"], 1.0)
        more = {"hidden_distance": totals["distance"] / tokens} if self.hidden else {}
        return {
            "loss": self._loss(totals),
            "divergence": totals["divergence"] / tokens,
            "cross_entropy": totals["nats"] / tokens,
            **more,
            **layer_metrics(totals["stats"]),
        }

    def _loss(self, totals: Totals) -> Float[Array, ""]:
        total = totals["divergence"] + self.cross_entropy * totals["nats"] + self.hidden * totals["distance"]
        return total / jnp.maximum(totals["tokens"], 1.0)

    def check(self, config: TrainConfig) -> None:
        """Check that student and teacher are language models with one vocabulary."""
        super().check(config)
        # A default model is replaced by that of the start (see `settled`), and checked then.
        replaced = config.start is not None and config.model == TrainConfig().model
        if self.teacher is None or replaced:
            return
        theirs = self.teacher.run.config
        check_same_tokens(f"the teacher {self.teacher.path}", theirs, config)
        widths = [getattr(c.model, "width", None) for c in (theirs, config)]
        if self.hidden and widths[0] != widths[1]:
            raise ConfigError(
                f"Distill.hidden compares hidden states, but the teacher's have {widths[0]} elements and the student's "
                f"{widths[1]}, and an objective has no parameters for a layer between them; set the student's width to "
                f"{widths[0]}, or Distill.hidden to 0, since distributions of tokens can be compared at any width"
            )

    def describe(self, config: TrainConfig) -> str:
        """Return the divergence and the teacher."""
        if self.teacher is None:
            return f"{type(self.divergence).__name__} of the teacher's {self.top} most likely tokens, from the data"
        return f"{type(self.divergence).__name__} of the teacher, step {self.teacher.step} of {self.teacher.path}"


def check_same_tokens(name: str, theirs: TrainConfig, ours: TrainConfig) -> None:
    """Check that another run's model is a language model with the same vocabulary and tokenizer.

    Args:
      name: the other run, for errors.
      theirs: its settings.
      ours: the settings of this run.

    Raises:
      ConfigError: it is not.
    """
    if not isinstance(theirs.model, LanguageModelConfig):
        raise ConfigError(f"{name} is not a language model; name one that is")
    sizes = vocab_of(theirs.model), vocab_of(ours.model)
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{name} has a vocabulary of {sizes[0]} tokens, and this run's model one of {sizes[1]}; they need the same "
            "tokens, so name another run or set the model's vocab"
        )
    prints = [getattr(c.tokenizer, "fingerprint", None) for c in (theirs, ours)]
    if prints[0] != prints[1]:
        raise ConfigError(
            f"{name} was trained with another tokenizer ({theirs.tokenizer.name}) than this run's "
            f"({ours.tokenizer.name}); set train.tokenizer to that one"
        )


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b if a is None or b is None else np.array_equal(a, b)
