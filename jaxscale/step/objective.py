"""What training is for: the arrays of a batch, sums over its rows, and the number to be made small.

An objective is one class: subclass `Objective`, name it in `train.objective`. The next-token loss of language models
is `NextToken`, the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.config import meant, register
from jaxscale.errors import ConfigError
from jaxscale.models.base import LanguageModelConfig, arrange, hidden_and_stats, is_causal, order_of, vocab_of
from jaxscale.nn import Stats, auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.parallel import as_weight
from jaxscale.signatures import check_method
from jaxscale.step.loss import AutoLoss, Loss

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

Batch = Mapping[str, Array]
Totals = dict[str, Any]
"""A tree of float32 scalars, or arrays (counts by class), that add up over rows."""


class Input(NamedTuple):
    """An array of a batch, without its first dimension, which is the batch's rows.

    Args:
      shape: of one row's.
      dtype: as NumPy calls it.
      axes: a logical axis name for each dimension of the shape, or `None`.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


class Objective:
    """What a run is trained and evaluated by.

    The loss of a batch is `value(terms | weights)`: `weights` are sums over the batch that need no model (how many
    tokens count), `terms` are sums over what the model makes of it. Terms of micro-batches, replicas and pipeline
    stages are added up, so `value` must be linear in them; the weights given to it are always those of the whole
    batch. One whose value is not linear in its terms (a contrastive loss over all pairs) says `additive = False`, and
    is then refused with `train.accumulate` above 1 and with pipeline stages.

    Attributes:
      group: how many rows, one after the other, belong together (2 for preference pairs). They stay in one
        micro-batch, on one device.
      additive: whether `value` is linear in the terms.
      staged: whether the last pipeline stage can make the terms; then there are `of_hidden` and `loss`, as `NextToken`
        has them.
      in_formulas: whether the planner's formulas, which are `NextToken`'s, cover it; else it is planned by compiling.
      reference: whether `terms` also takes the model with the parameters that the run started from (`train.start`), as
        preference optimisation does. They are frozen; of a run that trains adapters they are those under the adapters.
      evaluated: which of the `metrics` an evaluation reports, as `eval_NAME`.
    """

    group: ClassVar[int] = 1
    additive: ClassVar[bool] = True
    staged: ClassVar[bool] = False
    in_formulas: ClassVar[bool] = False
    reference: ClassVar[bool] = False
    evaluated: ClassVar[tuple[str, ...]] = ("loss",)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """The arrays of a batch by name.

        A batch also has `rows`, int32 (B,): each row's number in the global batch. Rows that only fill up the last
        batch of an evaluation are zeros in every array, an array `weights` among them; where a source has none of that
        name, the loader adds one of ones, float32 (B,).
        """
        raise NotImplementedError

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Sums that need no model.

        Args:
          batch: the arrays of `inputs`, (B, ...), and `rows`.
          parts: how many calls of `terms` will be added up for this batch: what is a mean of each call is divided by
            it.
        """
        raise NotImplementedError

    def terms(self, model: Any, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        """Sums over what the model makes of a batch, by names that `weights` does not use.

        Args:
          model: the module that the config's `make` returned.
          batch: the arrays of `inputs`, (B, ...), and `rows`; a part of the whole batch where it is accumulated.
          key: randomness of this step; `None` while evaluating.
          reference: the module with the run's first parameters; given where the attribute `reference` is True alone.
        """
        raise NotImplementedError

    def value(self, totals: Totals) -> Float[Array, ""]:
        """The number that training makes small, float32, of terms and weights together."""
        raise NotImplementedError

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """What a step reports, of terms and weights of all the batch (of an evaluation: of all its batches).

        "loss" has to be among them: it is what guards, sweeps and reports look at. What training writes itself (`step`,
        `time`, `lr`, `grad_norm`, `eval_...`) is not.
        """
        return {"loss": self.value(totals)}

    def check(self, config: TrainConfig) -> None:
        """Raises `ConfigError` where the rest of a run's settings does not fit; opens no data and traces nothing."""

    def describe(self, config: TrainConfig) -> str:
        """What is trained for, in words, for the log and run.json."""
        return type(self).__name__


@register
@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of the next token, a mean over the weighted tokens of the global batch.

    Of a model it asks `hidden` and `head_weight` (see `jaxscale.models.LanguageModel`), and never logits, so that the
    loss can avoid holding them. What layers add to the loss (experts' balance, see `jaxscale.nn.stats`) is a
    mean over each micro-batch, averaged over those.

    Args:
      loss: how each token's is made: `AutoLoss()`, `CutLoss()` (holds no logits) or `MaterialisedLoss()`.
      z_loss: weight of the squared log-partition, 1e-4 in PaLM (Chowdhery et al. 2022).

    Raises:
      ConfigError: a loss that is none, or a negative weight.
    """

    staged: ClassVar[bool] = True
    in_formulas: ClassVar[bool] = True
    both_ways: ClassVar[bool] = False
    """Whether tokens may see those behind them."""
    loss: Loss = AutoLoss()
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.loss, type) or not hasattr(self.loss, "describe"):
            raise ConfigError(
                f"NextToken.loss must be a loss such as AutoLoss() or CutLoss(), not {self.loss!r}"
                f"{meant(self.loss, ('describe',))}"
            )
        check_method("NextToken.loss", self.loss, "__call__", ("hidden", "weight", "targets"), ("softcap",))
        if not 0 <= self.z_loss < np.inf:
            raise ConfigError(f"NextToken.z_loss = {self.z_loss}: must be at least 0 and finite")

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        names = ("tokens", "targets", "weights", *(("segment_ids", "positions") if config.segments else ()))
        types = {"weights": "float32"}
        return {name: Input((config.seq_len,), types.get(name, "int32"), ("seq",)) for name in names}

    def weights(self, batch: Batch, parts: int) -> Totals:
        return {"tokens": jnp.sum(batch["weights"]), "parts": jnp.asarray(parts, jnp.float32)}

    def terms(self, model: Any, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        order = order_of(model, batch["tokens"].shape[1])
        if order is not None:  # nothing has to go back to where it was, since all of it is summed
            batch = arrange(batch, order)
        inputs: dict[str, Any] = {k: batch.get(k) for k in ("positions", "segment_ids", "rows")}
        inputs |= {} if order is None else {"arranged": True}
        hidden, stats = hidden_and_stats(model, batch["tokens"], key=key, **inputs)
        return self.of_hidden(model, hidden, stats, batch)

    def of_hidden(self, model: Any, hidden: Float[Array, "b s e"], stats: Stats, batch: Batch, **vocab: int) -> Totals:
        """`terms`, of the final hidden states and what the layers reported: all that the last pipeline stage has."""
        with jax.named_scope("loss"):
            weight = as_weight(model.head_weight()).dense()
            nats, z = self.loss(hidden, weight, batch["targets"], softcap=model.logit_softcap, **vocab)
            weights = batch["weights"]
            return {"nats": jnp.sum(nats * weights), "z": jnp.sum(z * weights), "stats": stats}

    def value(self, totals: Totals) -> Float[Array, ""]:
        tokens = jnp.maximum(totals["tokens"], 1.0)
        return (totals["nats"] + self.z_loss * totals["z"]) / tokens + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        return {"loss": totals["nats"] / jnp.maximum(totals["tokens"], 1.0), **layer_metrics(totals["stats"])}

    def check(self, config: TrainConfig) -> None:
        if not isinstance(config.model, LanguageModelConfig):
            raise ConfigError(
                f"NextToken trains language models, and {type(config.model).__name__} has no 'vocab'; set "
                "train.objective to one that fits it (see jaxscale.step.Objective)"
            )
        if not self.both_ways and not is_causal(config.model):
            raise ConfigError(
                f"{type(self).__name__} needs a model whose tokens see none behind them, and this one's attention is "
                "Bidirectional, so it would read the answers; set train.objective = @MaskedToken()"
            )

    def describe(self, config: TrainConfig) -> str:
        return self.loss.describe(vocab_of(config.model))


def terms_of(objective: Objective, model: Any, batch: Batch, *, key: Array | None = None, reference: Any) -> Totals:
    """`Objective.terms`, with the reference where the objective takes one."""
    more = {"reference": reference} if objective.reference else {}
    return objective.terms(model, batch, key=key, **more)


def check_additive(objective: Objective, setting: str, remedy: str) -> None:
    """Raises `ConfigError` where a batch is taken in parts and the objective is no sum over parts."""
    if not objective.additive:
        raise ConfigError(f"{type(objective).__name__} needs all rows of a batch at once, and {setting}; {remedy}")


def token_loss(config: TrainConfig) -> Loss:
    """How a run's objective makes the loss of each token, as chosen for the model's vocabulary.

    Raises:
      ConfigError: it has no loss of tokens.
    """
    loss = getattr(config.objective, "loss", None)
    if loss is None:
        raise ConfigError(
            f"{type(config.objective).__name__} has no loss of tokens, which this needs; use an objective with one, "
            "such as NextToken()"
        )
    return loss.of(vocab_of(config.model)) if hasattr(loss, "of") else loss
