"""Classification of texts, and regression."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError, DataError
from jaxscale.models.with_head import ModelWithHead, WithHead
from jaxscale.nn import auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.signatures import check_method
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, Objective, Totals
from jaxscale.step.objectives.heads import check_head, head_inputs, head_outputs
from jaxscale.step.value_losses import ValueLoss


@register
@dataclasses.dataclass(frozen=True)
class Classification(Objective):
    """Predicts the label of each row (`labelled_files`) with a head (`@WithHead()`) at its last learned token.

    The loss of a row is the cross-entropy of its class, of `WithHead.outputs` classes, or with `value_loss` that of a
    number. Rows have equal weights.

    Args:
      value_loss: the loss of labels that are numbers: `HLGauss(...)`, `TwoHot(...)` or `SquaredError()`; `None` for
        classes.

    Raises:
      ConfigError: `value_loss` is not a loss of values.
    """

    value_loss: ValueLoss | None = None

    def __post_init__(self) -> None:
        loss = self.value_loss
        if loss is not None and (isinstance(loss, type) or not hasattr(loss, "outputs")):
            raise ConfigError(
                f"Classification.value_loss must be a loss such as SquaredError() or HLGauss(), not {loss!r}"
            )
        if loss is not None:
            check_method("Classification.value_loss", loss, "loss", ("logits", "target"), ())
        object.__setattr__(self, "evaluated", ("loss", "accuracy" if loss is None else "error"))

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken` without targets, and `label`, float32 (B,)."""
        return {**head_inputs(config), "label": Input((), "float32", ())}

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the number of rows (padding does not count), and `parts`."""
        return {"labels": jnp.sum(_real(batch)), "parts": jnp.asarray(parts, jnp.float32)}

    def terms(
        self, model: ModelWithHead, batch: Batch, *, key: Array | None = None, reference: object = None
    ) -> Totals:
        """Return the sums over rows of the loss and of what metrics need, and statistics of layers."""
        outputs, stats = head_outputs(model, batch, key=key)
        label, real = batch["label"], _real(batch)
        with jax.named_scope("loss"):
            if self.value_loss is not None:
                losses = self.value_loss.loss(outputs, label)
                more = {"error": jnp.sum(jnp.abs(self.value_loss.mean(outputs) - label) * real)}
            else:
                number = label.astype(jnp.int32)
                logs = jax.nn.log_softmax(outputs)
                losses = -jnp.take_along_axis(logs, number[:, None], axis=1)[:, 0]
                more = {"right": jnp.sum((jnp.argmax(outputs, axis=1) == number) * real)}
            return {"losses": jnp.sum(losses * real), **more, "stats": stats}

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss of a row plus the auxiliary losses of layers."""
        return self._mean(totals, "losses") + auxiliary_loss(totals["stats"]) / totals["parts"]

    def metrics(self, totals: Totals) -> dict[str, Float[Array, ""]]:
        """Return the loss, and the share of right classes or the mean absolute error of values."""
        classes = self.value_loss is None
        more = {"accuracy": self._mean(totals, "right")} if classes else {"error": self._mean(totals, "error")}
        return {"loss": self._mean(totals, "losses"), **more, **layer_metrics(totals["stats"])}

    def check(self, config: TrainConfig) -> None:
        """Check that the model has a head with an output for each class, or those of the loss of values."""
        if self.value_loss is None:
            check_head(config, None, "one for each class")
        else:
            check_head(config, self.value_loss.outputs, f"as {type(self.value_loss).__name__} has them")

    def check_data(self, source: object, config: TrainConfig) -> None:
        """Check that labels are classes that the head has, if the source has an attribute `labels`."""
        labels = getattr(source, "labels", None)
        if self.value_loss is not None or labels is None or not len(labels):
            return
        assert isinstance(config.model, WithHead)  # see `check`
        labels, classes, name = np.asarray(labels), config.model.outputs, getattr(source, "name", "data")
        wrong = labels[(labels != np.floor(labels)) | (labels < 0)]
        if len(wrong):
            raise DataError(
                f"the corpus '{name}' has the label {wrong[0]:g}, which is no class; give whole numbers from 0, or set "
                "Classification.value_loss to predict numbers"
            )
        if labels.max() >= classes:
            raise DataError(
                f"the corpus '{name}' has the label {labels.max():g}, but WithHead.outputs = {classes} gives classes 0 "
                f"to {classes - 1}; set WithHead.outputs = {labels.max() + 1:g}"
            )

    def describe(self, config: TrainConfig) -> str:
        """Return what is predicted."""
        if self.value_loss is not None:
            return f"Classification, values by {type(self.value_loss).__name__}"
        assert isinstance(config.model, WithHead)
        return f"Classification, {config.model.outputs} classes"

    def _mean(self, totals: Totals, name: str) -> Float[Array, ""]:
        return totals[name] / jnp.maximum(totals["labels"], 1.0)


def _real(batch: Batch) -> Float[Array, " n"]:
    """Return 1 for each row of which a token counts, and 0 for padding."""
    return jnp.any(batch["weights"] > 0, axis=1).astype(jnp.float32)
