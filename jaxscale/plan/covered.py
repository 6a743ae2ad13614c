"""Decide which runs the planner's formulas cover; other runs are planned from their traced step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from jaxscale.errors import ConfigError
from jaxscale.models import Plannable, TransformerConfig
from jaxscale.nn import MultiHeadLatent, dot_product_attention
from jaxscale.nn.context_parallel import ContextParallel

if TYPE_CHECKING:
    from jaxscale.layout import Layout
    from jaxscale.step import TrainConfig


class NotCovered(ConfigError):
    """The planner's formulas do not cover a part of a run, which can still be planned from its traced step.

    Args:
      what: that part, in a few words.
    """

    def __init__(self, what: str):
        self.why = f"no formula covers FLOPs and memory of {what}"
        super().__init__(f"{self.why}; `jaxscale plan` takes them from the traced step")


def covered(config: TrainConfig, *, adapters: bool = False) -> TransformerConfig:
    """Return a run's model if formulas cover the run.

    Args:
      config: the run's settings.
      adapters: whether to accept a run with adapters, which formulas of memory cover and formulas of FLOPs do not.

    Raises:
      NotCovered: formulas do not cover the run.
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


def check_attention(model: TransformerConfig, layout: Layout) -> None:
    """Check that formulas cover a model's attention on a layout.

    Raises:
      NotCovered: latent attention with a sharded sequence or in a block whose sub-layers are parallel, or a kernel of
        the user's own with a sharded sequence.
    """
    sharded = layout.split("seq") > 1
    if isinstance(model.attention_layer, MultiHeadLatent) and (model.parallel or sharded):
        raise NotCovered("MultiHeadLatent where a sequence is sharded or sub-layers are parallel")
    kernel = model.attention.func if isinstance(model.attention, functools.partial) else model.attention
    if sharded and kernel is not dot_product_attention and not isinstance(kernel, ContextParallel):
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise NotCovered(f"the attention {name} over a sequence that {layout} shards")


def covered_model(model: object) -> TransformerConfig:
    """Return a model if formulas cover it.

    Raises:
      NotCovered: formulas do not cover the model.
    """
    what = model.not_in_formulas() if isinstance(model, Plannable) else type(model).__name__
    if what is not None:
        raise NotCovered(what)
    return cast(TransformerConfig, model)
