"""Training fewer parameters than a model has: the interface of `train.adapters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx

from jaxscale.layout import Layout
from jaxscale.models import ModelConfig
from jaxscale.nn import WeightFormat

Tree = Any


class Adapters:
    """Base of settings for `train.adapters`. Subclass it, as `LoRA` and `Unfreeze` do.

    Attributes:
      base_dtype: dtype of the frozen matrices; `None` is the model's own.
      base: storage format of the frozen matrices, such as a quantised one.
      in_formulas: whether the planner's formulas cover its memory; otherwise the planner compiles the step.
    """

    base_dtype: str | None = None
    base: WeightFormat | None = None
    in_formulas: ClassVar[bool] = False

    def model(self, model: ModelConfig, start: ModelConfig) -> ModelConfig:
        """Return the model that is trained, by default the run's.

        Args:
          model: the run's model.
          start: that of the run that training starts from.
        """
        return model

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> Adaptation:
        """Split a model's parameters into trained and frozen ones; new trained parameters may be added.

        Args:
          graphdef: the model's structure.
          infos: a `TensorInfo` per parameter of the model.
          reference: whether the objective also needs the parameters that the run started from.

        Raises:
          ConfigError: the settings do not fit the model.
        """
        raise NotImplementedError


class Adaptation(Protocol):
    """A split of a model's parameters into trained and frozen ones.

    Attributes:
      passes: matrix products per trained parameter in a step, in addition to those of the frozen model.
      in_any_order: whether `merged` treats stacked layers alike, so that their order may be that of pipeline stages.
    """

    passes: ClassVar[int]
    in_any_order: ClassVar[bool]

    @property
    def infos(self) -> Tree:
        """A `TensorInfo` per parameter of the model."""

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per trained parameter."""

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per frozen array."""

    def freeze(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        """Return the frozen arrays, sharded; their shapes and dtypes are those of `base`.

        Args:
          read: takes a tree of `TensorInfo` and returns its arrays from the checkpoint of `train.start`, sharded; with
            `stored=` a weight format, those that the checkpoint holds in it as they are.
          layout: the run's layout; `None` is one device.
        """

    def first(self, read: Callable[[Tree], Tree]) -> Tree | None:
        """Return initial trained parameters from the checkpoint of `train.start`; `None` if `make` initialises them.

        Args:
          read: takes a tree of `TensorInfo` and returns its arrays from the checkpoint, sharded.
        """

    def make(self, seed: int | jax.Array, whole: Callable[[int | jax.Array], Tree]) -> Tree:
        """Return initial trained parameters; called under `jit`.

        Args:
          seed: the run's seed, an int or a traced int32 scalar.
          whole: takes a seed and returns initial values of all parameters of the model.
        """

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """Return all parameters of the model, for `nnx.merge`.

        Args:
          trained: the trained parameters.
          frozen: the frozen arrays, from `freeze`.
        """

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """Return all parameters of the model as plain arrays of the model's dtypes.

        Args:
          trained: the trained parameters.
          frozen: the frozen arrays, from `freeze`.
        """

    def dense(self, params: Tree) -> Tree:
        """Return the result of `over` as plain arrays of the model's dtypes.

        Args:
          params: all parameters of the model, from `over`.
        """

    def describe(self) -> str:
        """Return a sentence about what is trained."""
