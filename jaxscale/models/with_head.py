"""A head on the final hidden states of a language model: a reward or a score of each class, in place of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, constrain
from jaxscale.models.base import (
    ChecksDocuments,
    ChecksRows,
    CutsSequences,
    DescribesLayers,
    FindsIdle,
    LanguageModel,
    LanguageModelConfig,
    ModelConfig,
    Parametrised,
)
from jaxscale.nn import Linear
from jaxscale.parallel import as_weight

BACKBONE, HEAD = "backbone", "score"
"""The two parts of the parameters: those of the language model, and the head's."""


@register
@dataclasses.dataclass(frozen=True)
class WithHead:
    """A language model, the backbone, whose final hidden states a linear head maps to a few numbers.

    For `@RewardModel()` and `@Classification()`. The head's weight begins as zeros. With `train.start = @FromRun()` the
    backbone's parameters are those of that run. The backbone's output head stays among the parameters, unused.

    Args:
      backbone: the language model, such as `@Transformer()`; `None` is the model of the run that training starts from.
      outputs: how many numbers the head gives: 1 for a reward, else the number of classes or of a value loss's bins.

    Raises:
      ConfigError: the backbone is no language model or has a parametrisation, or there are no outputs.
    """

    backbone: ModelConfig | None = None
    outputs: int = 1
    module: ClassVar[str] = HEAD

    def __post_init__(self) -> None:
        if isinstance(self.outputs, bool) or not isinstance(self.outputs, int) or self.outputs < 1:
            raise ConfigError(f"WithHead.outputs = {self.outputs!r}: must be a whole number of at least 1")
        if self.backbone is None:
            return
        if not isinstance(self.backbone, LanguageModelConfig):
            raise ConfigError(
                f"WithHead.backbone = {self.backbone!r} is no language model; give one such as @Transformer()"
            )
        if isinstance(self.backbone, Parametrised) and self.backbone.widening is not None:
            name = type(self.backbone.widening.parametrisation).__name__
            raise ConfigError(
                f"{name} has no rule for WithHead's head; set the backbone's parametrisation to None, since its "
                "parameters are already trained"
            )

    def over(self, model: ModelConfig) -> WithHead:
        """Return this config with the backbone of a run's model, if it has none; see `jaxscale.models.base.OverRun`.

        Args:
          model: the model of the run that training starts from.
        """
        below = model.backbone if isinstance(model, WithHead) else model
        return self if self.backbone is not None else dataclasses.replace(self, backbone=below)

    def make(self, rngs: nnx.Rngs) -> ModelWithHead:
        """Make the model.

        Args:
          rngs: random streams of the initial values.

        Raises:
          ConfigError: the backbone is not known.
        """
        if self.backbone is None:
            raise ConfigError(
                "WithHead.backbone is not set; set it to a model such as @Transformer(), or set train.start to the "
                "run whose model it is"
            )
        return ModelWithHead(self, rngs=rngs)

    @property
    def token_ids(self) -> int | None:
        """The number of token ids that the backbone reads."""
        return getattr(self.backbone, "vocab", None)

    def length_unit(self) -> int:
        """Return that of the backbone."""
        return self.backbone.length_unit() if isinstance(self.backbone, CutsSequences) else 1

    def check_row(self, seq_len: int) -> None:
        """Check rows of a length under the layout in force, as the backbone does.

        Args:
          seq_len: tokens per row.
        """
        if isinstance(self.backbone, ChecksRows):
            self.backbone.check_row(seq_len)

    def check_documents(self, segment_ids: np.ndarray) -> None:
        """Check the documents of packed rows, as the backbone does.

        Args:
          segment_ids: the document of each token, (B, S).
        """
        if isinstance(self.backbone, ChecksDocuments):
            self.backbone.check_documents(segment_ids)

    def idle(self, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
        """Yield the backbone's settings without effect.

        Args:
          seq_len: tokens per row.
          layout: the layout of the run, or `None`.
        """
        if isinstance(self.backbone, FindsIdle):
            yield from self.backbone.idle(seq_len, layout)

    def describe(self, layout: Layout | None) -> str:
        """Return a line for the log.

        Args:
          layout: the layout of the run, or `None`.
        """
        below = f"{self.backbone.describe(layout)}; " if isinstance(self.backbone, DescribesLayers) else ""
        return f"{below}a head with {self.outputs} output{'s' if self.outputs > 1 else ''}"


class ModelWithHead(nnx.Module):
    """A language model and a linear head.

    Args:
      config: the settings.
      rngs: random streams of the initial values.

    Attributes:
      backbone: the language model.
      score: the head.
    """

    def __init__(self, config: WithHead, *, rngs: nnx.Rngs):
        assert config.backbone is not None  # see `make`
        self.backbone: Any = config.backbone.make(rngs)
        if not isinstance(self.backbone, LanguageModel):
            raise ConfigError(f"WithHead.backbone makes a {type(self.backbone).__name__}, which has no hidden states")
        width = as_weight(self.backbone.head_weight()).shape[1]
        self.score = Linear({"embed": width}, {"outputs": config.outputs}, scale=0.0, rngs=rngs)

    def scores(self, hidden: Float[Array, "b e"]) -> Float[Array, "b n"]:
        """Return the head's outputs, float32.

        Args:
          hidden: a final hidden state of each row.
        """
        return self.score(constrain(hidden.astype(jnp.float32), "batch", "embed"))
