"""Objectives: the arrays of a batch, sums over its rows, and the value that training minimises.

To write an objective, subclass `Objective` and set `train.objective`. The default is `NextToken`, the loss of language
models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import meant, register
from jaxscale.errors import ConfigError, DataError
from jaxscale.models.base import (
    LanguageModel,
    LanguageModelConfig,
    arrange,
    hidden_and_stats,
    is_causal,
    order_of,
    vocab_of,
)
from jaxscale.nn import Stats, auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.parallel import as_weight
from jaxscale.parallel.seeds import HEAD, random_products
from jaxscale.signatures import check_method
from jaxscale.step.loss import AutoLoss, Loss
from jaxscale.step.user_metrics import as_terms, collecting

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.start import Start

Batch = Mapping[str, Array]
Totals = dict[str, Any]
"""A tree of float32 scalars, or arrays (such as counts by class), that are sums over rows."""


GROUPINGS = {"pairs": "preference_files", "rated answers": "rated_files"}
"""Corpora that make rows that belong together, by what the rows are."""


class Input(NamedTuple):
    """An array of a batch, without its first dimension, the rows.

    Args:
      shape: shape of one row.
      dtype: NumPy's name of the dtype.
      axes: a logical axis, or `None`, for each dimension of `shape`.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


class Objective:
    """Base of objectives: what training minimises and evaluation measures.

    The loss of a batch is `value(terms | weights)`. `weights` are sums over the batch that need no model (such as the
    number of tokens that count); `terms` are sums over the model's outputs. Terms of micro-batches, replicas and
    pipeline stages are added, so `value` must be linear in them; the weights are always those of the whole batch. An
    objective whose value is not linear in its terms (such as a contrastive loss over all pairs) sets
    `additive = False`; it is then an error to use it with `train.accumulate` above 1 or with pipeline stages.

    Attributes:
      group: number of consecutive rows that belong together (2 for preference pairs). They stay in one micro-batch,
        on one device.
      additive: whether `value` is linear in the terms.
      staged: whether the last pipeline stage can compute the terms; the objective then has `of_hidden` and `loss`, as
        `NextToken` does.
      in_formulas: whether the planner's formulas, which are for `NextToken`, cover it; else the planner compiles it.
      reference: whether `terms` also takes the model with the parameters that the run started from (`train.start`), as
        preference optimisation does. These are frozen; with adapters they are the parameters under the adapters.
      teacher: where the model that `terms` takes as `reference` is from, if it is another one, as in distillation.
      grouping: what consecutive rows are, a key of `GROUPINGS`; `None` if they have nothing in common.
      needs_start: whether runs must begin with trained parameters (`train.start`).
      trains_ahead: whether it trains the modules of `Transformer.multi_token`.
      unit: unit of "loss", for messages, such as "nats per token".
      advice: by name of an array: what to do if the data does not have it.
      evaluated: the `metrics` that an evaluation reports, as `eval_NAME`.
    """

    group: ClassVar[int] = 1
    additive: bool = True
    staged: ClassVar[bool] = False
    in_formulas: ClassVar[bool] = False
    reference: bool = False
    teacher: Start | None = None
    grouping: ClassVar[str | None] = None
    needs_start: ClassVar[bool] = False
    trains_ahead: ClassVar[bool] = False
    unit: ClassVar[str] = ""
    advice: ClassVar[Mapping[str, str]] = MappingProxyType({})
    evaluated: ClassVar[tuple[str, ...]] = ("loss",)

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of a batch by name.

        A batch also has `rows`, int32 (B,), the index of each row in the global batch. Rows that only pad the last
        batch of an evaluation are zero in every array, `weights` included; if a source has no array `weights`, the
        loader adds one of ones, float32 (B,).

        Args:
          config: the run's settings.
        """
        raise NotImplementedError

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the sums over a batch that need no model.

        Args:
          batch: the arrays of `inputs`, (B, ...), and `rows`.
          parts: number of calls of `terms` whose results are added for this batch; `value` divides terms that are means
            of each call by it.
        """
        raise NotImplementedError

    def terms(self, model: Any, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        """Return sums over the model's outputs, by names that `weights` does not use.

        Args:
          model: the module that the model config's `make` returned.
          batch: the arrays of `inputs`, (B, ...), and `rows`; one micro-batch under gradient accumulation.
          key: random key of this step; `None` in an evaluation.
          reference: the module with the run's initial parameters; passed only if the attribute `reference` is True.
        """
        raise NotImplementedError

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the value to minimise, a float32 scalar.

        Args:
          totals: terms and weights together.
        """
        raise NotImplementedError

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the metrics that a step reports; by default "loss", the value.

        "loss" must be among them, since guards, sweeps and reports use it. Names that training writes itself (`step`,
        `time`, `lr`, `grad_norm`, `eval_...`) must not be.

        Args:
          totals: terms and weights of the whole batch; of an evaluation, of all its batches.
        """
        return {"loss": self.value(totals)}

    def check(self, config: TrainConfig) -> None:
        """Check that the objective works with a run's other settings, without data and without tracing.

        Args:
          config: the run's settings.

        Raises:
          ConfigError: it does not work with them.
        """

    def check_data(self, source: Any, config: TrainConfig) -> None:
        """Check the data of a split, which has the arrays of `inputs`, before training.

        Args:
          source: the rows of the split, see `jaxscale.data.batch.Source`.
          config: the run's settings.

        Raises:
          DataError: the objective does not work with it.
        """
        kind = getattr(source, "grouping", None)  # sources of user arrays have none
        if self.grouping is not None and kind not in (None, self.grouping):
            raise DataError(
                f"{type(self).__name__} needs rows that are {self.grouping}, and those of '{source.name}' are {kind}; "
                f"set train.data = @{GROUPINGS[self.grouping]}()"
            )

    def describe(self, config: TrainConfig) -> str:
        """Return a short description for the log and run.json.

        Args:
          config: the run's settings.
        """
        return type(self).__name__


@register
@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of the next token, a weighted mean over the tokens of the global batch.

    It uses a model's `hidden` and `head_weight` (see `jaxscale.models.LanguageModel`) and not its logits, so that the
    loss need not store them. Auxiliary losses of layers (such as load balancing of experts, see `jaxscale.nn.stats`)
    are means over each micro-batch, averaged over micro-batches.

    Args:
      loss: the loss of each token: `AutoLoss()`, `CutLoss()` (stores no logits) or `MaterialisedLoss()`.
      z_loss: weight of the squared log-partition, 1e-4 in PaLM (Chowdhery et al. 2022).

    Raises:
      ConfigError: `loss` is not a loss, or `z_loss` is negative.
    """

    staged: ClassVar[bool] = True
    in_formulas: ClassVar[bool] = True
    unit: ClassVar[str] = "nats per token"
    advice: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"segment_ids": "set train.objective = @BlankInfilling() for rows of @infilled(), else train.segments = False"}
    )
    both_ways: ClassVar[bool] = False
    """Whether tokens may attend to later tokens."""
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
        """Return tokens, targets and weights, and with `train.segments` the segments and positions, each (B, S)."""
        names = ("tokens", "targets", "weights", *(("segment_ids", "positions") if config.segments else ()))
        types = {"weights": "float32"}
        return {name: Input((config.seq_len,), types.get(name, "int32"), ("seq",)) for name in names}

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the sum of the tokens' weights, and `parts`."""
        return {"tokens": jnp.sum(batch["weights"]), "parts": jnp.asarray(parts, jnp.float32)}

    def terms(
        self, model: LanguageModel, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None = None
    ) -> Totals:
        """Return the weighted sums of the cross-entropy and the squared log-partition, and statistics of layers."""
        hidden, stats, batch = hidden_of(model, batch, key=key)
        with random_products(key, batch.get("rows"), HEAD):
            return self.of_hidden(model, hidden, stats, batch)

    def of_hidden(
        self, model: LanguageModel, hidden: Float[Array, "b s e"], stats: Stats, batch: Batch, **vocab: int
    ) -> Totals:
        """Return `terms` from the final hidden states, as the last pipeline stage needs it.

        Args:
          model: the module; only its output head is used.
          hidden: final hidden states, (B, S, E).
          stats: statistics that layers reported.
          batch: targets and weights, (B, S).
          **vocab: size of the vocabulary, as `vocab`, if the head's weight is padded.
        """
        with jax.named_scope("loss"):
            weight = as_weight(model.head_weight()).for_loss()
            nats, z = self.loss(hidden, weight, batch["targets"], softcap=model.logit_softcap, **vocab)
            weights = batch["weights"]
            return {"nats": jnp.sum(nats * weights), "z": jnp.sum(z * weights), "stats": stats}

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean cross-entropy plus the z-loss and the auxiliary losses of layers."""
        tokens = jnp.maximum(totals["tokens"], 1.0)
        return (totals["nats"] + self.z_loss * totals["z"]) / tokens + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the mean cross-entropy in nats as "loss", and the metrics of layers."""
        return {"loss": totals["nats"] / jnp.maximum(totals["tokens"], 1.0), **layer_metrics(totals["stats"])}

    def check(self, config: TrainConfig) -> None:
        """Check that the model is a language model, and causal unless the class has `both_ways`."""
        check_language_model(config, both_ways=self.both_ways)

    def describe(self, config: TrainConfig) -> str:
        """Return the description of the loss of each token."""
        return self.loss.describe(vocab_of(config.model))


def check_language_model(config: TrainConfig, *, both_ways: bool = False) -> None:
    """Check that a run's model is a language model, and causal.

    Args:
      config: the run's settings.
      both_ways: whether tokens may attend to later tokens.

    Raises:
      ConfigError: it is not.
    """
    name = type(config.objective).__name__
    if not isinstance(config.model, LanguageModelConfig):
        raise ConfigError(
            f"{name} trains language models, and {type(config.model).__name__} has no 'vocab'; set "
            "train.objective to one that fits it (see jaxscale.step.Objective)"
        )
    if not both_ways and not is_causal(config.model):
        raise ConfigError(
            f"{name} needs a causal model, but this one's attention is Bidirectional, so it would "
            "see the tokens to predict; set train.objective = @MaskedToken()"
        )


def hidden_of(
    model: LanguageModel, batch: Batch, *, key: Array | None = None
) -> tuple[Float[Array, "b s e"], Stats, Batch]:
    """Return a model's final hidden states for a batch, and the batch in their order.

    Args:
      model: the module.
      batch: arrays by name, (B, ...), "tokens" among them.
      key: random key of dropout; `None` for none.

    Returns:
      Hidden states; statistics of the layers; the batch, whose columns the model's layout may have reordered (the order
      is not restored, since terms are sums over tokens).
    """
    order = order_of(model, batch["tokens"].shape[1])
    if order is not None:
        batch = arrange(batch, order)
    inputs: dict[str, Any] = {k: batch.get(k) for k in ("positions", "segment_ids", "rows")}
    inputs |= {k: batch[k] for k in ("mask_positions",) if k in batch}
    inputs |= {} if order is None else {"arranged": True}
    hidden, stats = hidden_and_stats(model, batch["tokens"], key=key, **inputs)
    return hidden, stats, batch


def terms_of(
    objective: Objective, model: nnx.Module, batch: Batch, *, key: Array | None = None, reference: nnx.Module | None
) -> Totals:
    """Return `Objective.terms`, passing the reference if the objective takes one.

    Args:
      objective: the objective.
      model: the module.
      batch: arrays by name, (B, ...), with `rows`.
      key: random key of the step; `None` in an evaluation.
      reference: the module with the run's initial parameters, or `None`.
    """
    more = {"reference": reference} if objective.reference else {}
    with collecting() as logged:
        terms = objective.terms(model, batch, key=key, **more)
    return {**terms, **as_terms(logged)} if logged else terms


def check_additive(objective: Objective, setting: str, remedy: str) -> None:
    """Check that an objective is a sum over parts of a batch.

    Args:
      objective: the objective.
      setting: a clause saying which setting splits the batch, for the error.
      remedy: what to do instead, for the error.

    Raises:
      ConfigError: the objective has `additive = False`.
    """
    if not objective.additive:
        raise ConfigError(f"{type(objective).__name__} needs all rows of a batch at once, but {setting}; {remedy}")


def token_loss(config: TrainConfig) -> Loss:
    """Return the loss of each token that a run's objective uses for the model's vocabulary.

    Args:
      config: the run's settings.

    Raises:
      ConfigError: the objective has no loss of tokens.
    """
    loss = getattr(config.objective, "loss", None)
    if loss is None:
        raise ConfigError(
            f"this needs a loss of each token, which {type(config.objective).__name__} does not have; use an objective "
            "with one, such as NextToken()"
        )
    return loss.of(vocab_of(config.model)) if hasattr(loss, "of") else loss
