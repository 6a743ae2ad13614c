"""Soft prompts: trained vectors before every row, beside a frozen model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import Layout, TensorInfo
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.nn import WeightFormat, as_weight
from jaxscale.step.adaptation import Adapters
from jaxscale.step.unfreeze import Subset

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class SoftPrompt(Adapters):
    """Trains vectors that stand before every row in place of token embeddings (Lester et al. 2021, arXiv:2104.08691).

    All weights are frozen, so that a checkpoint holds `length · width` numbers; a prompt for a model that is stored in
    few bits gives back some of what rounding took (Xu et al. 2023, arXiv:2305.11186). The vectors begin as the
    embeddings of random tokens. They are the first positions of the row's first document (`Transformer.soft_prompt`),
    and later documents of a packed row do not see them.

    Args:
      length: number of vectors.
      seed: chooses the tokens whose embeddings they begin as.
      base: storage format of the frozen matrices; by default that of the run that training starts from.

    Raises:
      ConfigError: `length` is below 1.
    """

    length: int = 20
    seed: int = 0
    base: WeightFormat | None = None

    def __post_init__(self) -> None:
        check_whole("SoftPrompt.length", self.length)

    def model(self, model: ModelConfig, start: ModelConfig) -> ModelConfig:
        """Return the model with a prompt.

        Args:
          model: the run's model.
          start: that of the run that training starts from.

        Raises:
          ConfigError: it is no `Transformer` or has a prompt of another length, or the start has a prompt already.
        """
        if not isinstance(model, TransformerConfig):
            raise ConfigError(f"{type(model).__name__} takes no soft prompt; only a Transformer does")
        if getattr(start, "soft_prompt", 0):
            raise ConfigError(
                "the run that training starts from has a soft prompt already; train that one further with "
                "train.adapters = @Unfreeze(), Unfreeze.targets = ('prompt',)"
            )
        if model.soft_prompt not in (0, self.length):
            raise ConfigError(
                f"SoftPrompt.length = {self.length} and Transformer.soft_prompt = {model.soft_prompt} differ; leave "
                "out Transformer.soft_prompt, which SoftPrompt sets"
            )
        return dataclasses.replace(model, soft_prompt=self.length)

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> Prompted:
        """Split a model's parameters into the prompt and the others.

        Args:
          graphdef: the model's structure.
          infos: a `TensorInfo` per parameter.
          reference: whether the objective needs the initial parameters.

        Raises:
          ConfigError: the model has no prompt, or the objective needs a reference.
        """
        if reference:
            raise ConfigError("SoftPrompt does not hold the model without the prompt for a reference; use LoRA()")
        if "prompt" not in infos:
            raise ConfigError("the model has no soft prompt; set Transformer.soft_prompt = SoftPrompt.length")
        return Prompted(infos, frozenset({infos["prompt"]["weight"].path}), settings=self)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompted(Subset):
    """A model of which only the prompt is trained; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      infos: a `TensorInfo` per parameter of the model.
      chosen: the path of the prompt.
      reference: not used.
      settings: the settings.
    """

    settings: SoftPrompt = SoftPrompt()

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per frozen array, in their storage format."""
        form = self.settings.base
        return self.start_infos if form is None else form.infos(self.start_infos)

    @property
    def start_infos(self) -> Tree:
        """A `TensorInfo` per parameter of the model without the prompt, which training starts from."""
        return self._part(self.infos, trained=False)

    def freeze(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        """Return the frozen parameters in their storage format, sharded."""
        rest, form = self.start_infos, self.settings.base
        return read(rest) if form is None else form.encoded(read(rest, stored=form), rest, layout)

    def first(self, read: Callable[[Tree], Tree]) -> Tree:
        """Return the embeddings of random tokens, from the checkpoint of `train.start`."""
        table = read(self.start_infos)["embed"]["weight"]
        info: TensorInfo = self.infos["prompt"]["weight"]
        rows = np.random.default_rng(self.settings.seed).integers(0, table.shape[0], info.shape[0])
        return {"prompt": {"weight": jnp.take(table, rows, axis=0).astype(info.dtype)}}

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """Return all parameters of the model, prompt included, as plain arrays."""
        return self.dense(self.over(trained, frozen))

    def dense(self, params: Tree) -> Tree:
        """Return parameters as plain arrays of the model's dtypes."""
        return jax.tree.map(lambda i, weight: as_weight(weight).dense(i.dtype), self.infos, params)
