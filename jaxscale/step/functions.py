"""Plain functions in the place of a model config and an objective: `js.fit(model=make, objective=loss, data=records)`.

Redco (Tan et al. 2024) trains a model from three functions, of which none knows about devices. Here they are one that
makes a Flax NNX module, one that returns the loss of each row, and the data's `__getitem__`. Logical axes are inferred
from the traced loss (`jaxscale.layout.infer_names`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.data import records
from jaxscale.errors import ConfigError, DataError
from jaxscale.step.objective import Batch, Input, Objective, Totals

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class FromFunction:
    """A model that a function makes, with or without axis names.

    Args:
      fn: takes `nnx.Rngs` and returns the module; may be the module's class.
    """

    fn: Callable[..., nnx.Module]

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the module."""
        return self.fn(rngs)


@dataclasses.dataclass(frozen=True)
class FromLoss(Objective):
    """The weighted mean over rows of a function's losses; for data whose records are dicts of arrays.

    Rows have the weight 1, or that of the records' scalar "weights".

    Args:
      fn: takes the module and a batch, the arrays of records by name with a first dimension of rows, and returns the
        loss of each row, (rows,).
    """

    fn: Callable[[Any, Batch], Float[Array, " b"]]

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of the data's first record.

        Raises:
          DataError: the data has no records that are dicts of arrays.
        """
        if not isinstance(config.data, records):
            raise DataError(
                "a function as train.objective takes its arrays from data with records by number, such as a list of "
                f"dicts of arrays, and {type(config.data).__name__} has none; pass such data, or an Objective"
            )
        shapes = {k: Input(x.shape, x.dtype.name, (None,) * x.ndim) for k, x in config.data.first().items()}
        return {**shapes, "weights": Input((), "float32", ())}

    def weights(self, batch: Batch, parts: int) -> Totals:
        """Return the sum of the rows' weights."""
        return {"rows": jnp.sum(batch["weights"])}

    def terms(self, model: Any, batch: Batch, *, key: Array | None = None, reference: Any = None) -> Totals:
        """Return the weighted sum of the losses.

        Raises:
          ConfigError: the function does not return a number for each row.
        """
        losses, rows = self.fn(model, batch), batch["weights"]
        if jnp.shape(losses) != rows.shape:
            raise ConfigError(
                f"train.objective = {self.fn!r} returned the shape {jnp.shape(losses)} for {len(rows)} rows; return "
                f"the loss of each row, {rows.shape}, of which training takes the mean"
            )
        # rows that pad an evaluation's last batch are zeros, of which a loss may be infinite
        return {"loss": jnp.sum(jnp.where(rows > 0, losses.astype(jnp.float32) * rows, 0.0))}

    def value(self, totals: Totals) -> Float[Array, ""]:
        """Return the mean loss."""
        return totals["loss"] / jnp.maximum(totals["rows"], 1e-9)

    def describe(self, config: TrainConfig) -> str:
        """Return the function's name."""
        return getattr(self.fn, "__name__", type(self).__name__)


def as_model(value: Any) -> Any:
    """Return a function, or a class of Flax modules, as `FromFunction`, and any other value as it is.

    Args:
      value: the setting `train.model`.
    """
    made = _called(value)
    is_class = isinstance(made, type) and issubclass(made, nnx.Module)
    return FromFunction(value) if is_class or inspect.isfunction(made) else value


def as_objective(value: Any) -> Any:
    """Return a function as `FromLoss`, and any other value as it is.

    Args:
      value: the setting `train.objective`.
    """
    return FromLoss(value) if inspect.isfunction(_called(value)) else value


def _called(value: Any) -> Any:
    """Return what a partial calls; in a gin file, `@Net` without brackets is a partial."""
    return value.func if isinstance(value, functools.partial) else value
