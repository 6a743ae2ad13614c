"""Which runs the planner's formulas cover; any other is planned from its compiled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jaxscale.errors import ConfigError
from jaxscale.models import Plannable, TransformerConfig

if TYPE_CHECKING:
    from jaxscale.step import TrainConfig


class NotCovered(ConfigError):
    """No formula knows a part of a run, which can be planned from its compiled step all the same.

    Args:
      what: that part, in a few words.
    """

    def __init__(self, what: str):
        self.why = f"no formula knows the arithmetic and memory of {what}"
        super().__init__(
            f"{self.why}; `jaxscale plan`, or `jaxscale explain --compile`, reads them off the compiled step, where "
            "the hardware can be compiled for"
        )


def covered(config: TrainConfig, *, adapters: bool = False) -> TransformerConfig:
    """A run's model, where formulas cover the run.

    Args:
      config: the run's settings.
      adapters: whether those of a run are covered, as they are by what it holds and not by what it computes.

    Raises:
      NotCovered: they do not.
    """
    if not config.objective.in_formulas or config.objective.reference:
        raise NotCovered(type(config.objective).__name__)
    if not config.algorithm.in_formulas:
        raise NotCovered(config.algorithm.describe())
    if config.adapters is not None and config.adapters.base is not None:
        raise NotCovered(type(config.adapters.base).__name__)
    if config.adapters is not None and not (adapters and config.adapters.in_formulas):
        raise NotCovered(type(config.adapters).__name__)
    return covered_model(config.model)


def covered_model(model: Any) -> TransformerConfig:
    """A model that formulas cover.

    Raises:
      NotCovered: they do not.
    """
    what = model.not_in_formulas() if isinstance(model, Plannable) else type(model).__name__
    if what is not None:
        raise NotCovered(what)
    return cast(TransformerConfig, model)
