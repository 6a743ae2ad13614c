"""Base of objectives that train causal language models on rows of tokens."""

from __future__ import annotations

import dataclasses

from jaxscale.config import meant
from jaxscale.errors import ConfigError
from jaxscale.models.base import vocab_of
from jaxscale.signatures import check_method
from jaxscale.step.config import TrainConfig
from jaxscale.step.loss import AutoLoss, Loss
from jaxscale.step.objective import Input, NextToken, Objective, check_language_model

ANNOTATE = "write it with jaxscale annotate CONFIG --by RUN, and read it with train.data = @annotated()"
"""What to do if the data has no array that another model computes."""


@dataclasses.dataclass(frozen=True)
class TokenObjective(Objective):
    """Base of objectives of causal language models, with the arrays of `NextToken`.

    Args:
      loss: the loss of each token, as of `NextToken`.
    """

    loss: Loss = dataclasses.field(default=AutoLoss(), kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.loss, type) or not hasattr(self.loss, "describe"):
            raise ConfigError(
                f"{name}.loss must be a loss such as AutoLoss() or CutLoss(), not {self.loss!r}"
                f"{meant(self.loss, ('describe',))}"
            )
        check_method(f"{name}.loss", self.loss, "__call__", ("hidden", "weight", "targets"), ("softcap",))

    def inputs(self, config: TrainConfig) -> dict[str, Input]:
        """Return the arrays of `NextToken`."""
        return NextToken().inputs(config)

    def check(self, config: TrainConfig) -> None:
        """Check that the model is a causal language model."""
        check_language_model(config)

    def describe(self, config: TrainConfig) -> str:
        """Return the objective's name and the loss of each token."""
        return f"{type(self).__name__}, {self.loss.describe(vocab_of(config.model))}"
