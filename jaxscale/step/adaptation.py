"""Training fewer parameters than a model has: the interface of `train.adapters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from flax import nnx

from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

Tree = Any


class Adapters:
    """Makes an `Adaptation`. Subclass it, as `LoRA` and `Unfreeze` do.

    Attributes:
      base_dtype: dtype of the frozen matrices; `None` is the model's own.
      base: storage format of the frozen matrices, such as a quantised one.
      in_formulas: whether the planner's formulas cover its memory; otherwise the step is compiled.
    """

    base_dtype: str | None = None
    base: WeightFormat | None = None
    in_formulas: ClassVar[bool] = False

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> Adaptation:
        """Splits a model's parameters into trained and frozen ones, and may add new ones.

        Args:
          graphdef: its structure.
          infos: a `TensorInfo` per parameter.
          reference: the objective compares with the parameters that the run started from.

        Raises:
          ConfigError: it does not fit the model.
        """
        raise NotImplementedError


class Adaptation(Protocol):
    """Trained and frozen parameters, which together are those of a model.

    Attributes:
      passes: matrix products of a step per trained parameter, besides those of the frozen model.
    """

    passes: ClassVar[int]

    @property
    def infos(self) -> Tree:
        """A `TensorInfo` per parameter of the model."""

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per trained parameter."""

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per frozen array."""

    def freeze(self, read: Callable[[Tree], Tree], layout: Layout | None) -> Tree:
        """The arrays of `base`, laid out.

        Args:
          read: reads the checkpoint of `train.start` as arrays of a tree of `TensorInfo`, sharded.
          layout: their layout; `None` is one device.
        """

    def first(self, read: Callable[[Tree], Tree]) -> Tree | None:
        """Initial trained parameters from the checkpoint of `train.start`; `None` if `make` initialises them."""

    def make(self, seed: Any, whole: Callable[[Any], Tree]) -> Tree:
        """Initial trained parameters from a seed, traced; `whole(seed)` initialises all of the model."""

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """All parameters of the model, for `nnx.merge`."""

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """All parameters of the model as plain arrays of its dtypes."""

    def dense(self, params: Tree) -> Tree:
        """The result of `over` as plain arrays of the model's dtypes."""

    def describe(self) -> str:
        """What is trained, in words."""
