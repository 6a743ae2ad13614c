"""MixLoRA: experts of low rank over the frozen feed-forward layers of a trained model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.nn import FeedForward, WeightFormat
from jaxscale.nn.low_rank_experts import LowRankExperts
from jaxscale.step.adaptation import Adapters
from jaxscale.step.soft_prompt import Prompted

Tree = Any
_TRAINED = re.compile(r".*/mlp/(router|(gate|up|down)_[ab])")


@register
@dataclasses.dataclass(frozen=True)
class MixLoRA(Adapters):
    """Trains a router and experts of low rank in every feed-forward layer (Li et al. 2024, arXiv:2404.15159).

    All weights of the model are frozen. An expert is the layer with a low-rank product of its own added to each matrix
    (see `LowRankExperts`, which becomes `Transformer.mlp`); products are zero at first, so that training starts from
    the model. So different tasks can use different experts.

    Args:
      experts: number of experts.
      top_k: experts per token.
      rank: rank of an expert's product in each matrix.
      alpha: low-rank products are scaled by `alpha / rank`.
      balance_loss: weight of the load-balance loss.
      base: storage format of the frozen matrices; by default that of the run that training starts from.

    Raises:
      ConfigError: sizes out of their range.
    """

    experts: int = 8
    top_k: int = 2
    rank: int = 8
    alpha: float = 16.0
    balance_loss: float = 0.01
    base: WeightFormat | None = None

    def __post_init__(self) -> None:
        try:
            self._experts(FeedForward)
        except ConfigError as e:  # which names the settings of the layers that it makes
            message = str(e)
            for made in ("LowRankExperts.", "MixtureOfExperts."):
                message = message.replace(made, "MixLoRA.")
            raise ConfigError(message) from None

    def _experts(self, dense: type[FeedForward]) -> LowRankExperts:
        return LowRankExperts(self.experts, self.top_k, self.rank, self.alpha, dense, self.balance_loss)

    def model(self, model: ModelConfig, start: ModelConfig) -> ModelConfig:
        """Return the model with experts.

        Args:
          model: the run's model.
          start: that of the run that training starts from.

        Raises:
          ConfigError: it is no `Transformer` of feed-forward layers, or has other experts of low rank.
        """
        mlp = getattr(model, "mlp", None)
        if isinstance(mlp, LowRankExperts):
            if mlp != self._experts(mlp.dense) or getattr(start, "mlp", None) == mlp:
                raise ConfigError(
                    "the model has experts of low rank already; leave out Transformer.mlp, which MixLoRA sets, or "
                    "train those of a run further with train.adapters = @Unfreeze(), Unfreeze.targets = ('mlp/*_a', "
                    "'mlp/*_b', 'mlp/router')"
                )
            return model
        layers = isinstance(mlp, type) and issubclass(mlp, FeedForward)
        if not isinstance(model, TransformerConfig) or model.blocks or not layers:
            raise ConfigError(
                "MixLoRA adds experts to the feed-forward layers that Transformer.mlp names, such as @SwiGLU, and this "
                "model has others; use LoRA()"
            )
        assert isinstance(mlp, type)
        experts: Any = self._experts(mlp)
        return dataclasses.replace(model, mlp=experts)

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> Mixed:
        """Split a model's parameters into routers and products of low rank, and the others.

        Args:
          graphdef: the model's structure.
          infos: a `TensorInfo` per parameter.
          reference: whether the objective needs the initial parameters.

        Raises:
          ConfigError: the model has no experts of low rank, or the objective needs a reference.
        """
        if reference:
            raise ConfigError("MixLoRA does not hold the model without experts for a reference; use LoRA()")
        chosen = frozenset(i.path for i in jax.tree.leaves(infos) if _TRAINED.fullmatch(i.path))
        if not any(path.endswith("_a") for path in chosen):
            raise ConfigError(
                "the model has no experts of low rank; set train.start, or Transformer.mlp = @LowRankExperts()"
            )
        return Mixed(infos, chosen, settings=self)  # type: ignore[arg-type]  # only its `base` is read


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed(Prompted):
    """A model of which routers and products of low rank are trained; see `jaxscale.step.adaptation.Adaptation`."""

    def first(self, read: Callable[[Tree], Tree]) -> None:
        """Return `None`: `make` initialises them."""
