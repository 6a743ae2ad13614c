"""What objectives of a head share: its outputs at the last learned token of each row, and checks of the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError
from jaxscale.models.base import order_of
from jaxscale.models.with_head import HEAD, ModelWithHead, WithHead
from jaxscale.nn import Stats
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Batch, Input, NextToken, hidden_of
from jaxscale.step.state import describe_model


def head_inputs(config: TrainConfig) -> dict[str, Input]:
    """Return the arrays of `NextToken` without the targets.

    Args:
      config: the run's settings.
    """
    inputs = NextToken().inputs(config)
    del inputs["targets"]
    return inputs


def head_outputs(model: ModelWithHead, batch: Batch, *, key: Array | None = None) -> tuple[Float[Array, "b n"], Stats]:
    """Return the head's outputs at each row's last token whose weight is above 0, and the statistics of layers.

    Args:
      model: the module.
      batch: arrays by name, (B, ...). Rows without such a token have the outputs of a hidden state of zeros.
      key: random key of dropout; `None` for none.

    Returns:
      float32 (B, n); statistics that layers reported.
    """
    order = order_of(model.backbone, batch["tokens"].shape[1])
    hidden, stats, batch = hidden_of(model.backbone, batch, key=key)
    place = jnp.asarray(np.arange(hidden.shape[1]) if order is None else order, jnp.int32)
    place = jnp.where(batch["weights"] > 0, place, -1)
    last = (place == jnp.max(place, axis=1, keepdims=True)) & (place >= 0)
    # a sum and no gather, since devices may hold parts of the sequence
    pooled = jnp.sum(jnp.where(last[..., None], hidden, 0), axis=1, dtype=jnp.float32)
    return model.scores(pooled), stats


def check_head(config: TrainConfig, outputs: int | None, why: str) -> None:
    """Check that a run's model has a head that is trained, with a number of outputs.

    Args:
      config: the run's settings.
      outputs: the number, or `None` for at least 2.
      why: what has as many, for the message.

    Raises:
      ConfigError: it has none, or one of another size, or adapters leave it as it is.
    """
    name, model = type(config.objective).__name__, config.model
    if not isinstance(model, WithHead):
        raise ConfigError(
            f"{name} needs a model with a head, and {type(model).__name__.removesuffix('Config')} has none; set "
            "train.model = @WithHead(), whose backbone is the model of train.start or WithHead.backbone"
        )
    if model.outputs != outputs if outputs is not None else model.outputs < 2:
        number = "at least 2" if outputs is None else str(outputs)
        raise ConfigError(f"{name} needs WithHead.outputs = {number}, {why}, and not {model.outputs}")
    if config.adapters is None or model.backbone is None:
        return
    trained = jax.tree.leaves(config.adapters.adapt(*describe_model(model)).adapters)
    if not any(i.path.startswith(f"{HEAD}/") for i in trained):
        kind = type(config.adapters).__name__
        raise ConfigError(f"{kind}.targets leave the new head as it is, zeros; add '{HEAD}' to {kind}.targets")
