"""What may be trained in place of all of a model's parameters; `train.adapters` names it."""

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
      base_dtype: what the frozen matrices are kept in; `None` leaves the model's type.
      base: a form in which they are kept, such as quantised ones.
      in_formulas: whether the planner's formulas know what a step holds; else it is planned by compiling.
    """

    base_dtype: str | None = None
    base: WeightFormat | None = None
    in_formulas: ClassVar[bool] = False

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> Adaptation:
        """Of a model.

        Args:
          graphdef: its structure.
          infos: a `TensorInfo` per parameter.
          reference: the objective compares with the parameters that the run started from.

        Raises:
          ConfigError: it does not go with the model.
        """
        raise NotImplementedError


class Adaptation(Protocol):
    """Parameters that are trained and others that are not, which together are a model's.

    Attributes:
      passes: how often a step multiplies by each trained parameter besides the products of the model itself.
    """

    passes: ClassVar[int]

    @property
    def infos(self) -> Tree:
        """A `TensorInfo` per parameter of the model."""

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per parameter that is trained."""

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per array that stays as it is."""

    def freeze(self, read: Callable[[Tree], Tree], layout: Layout | None) -> Tree:
        """The arrays of `base`, laid out.

        Args:
          read: gives the start's parameters in the types of a tree of `TensorInfo`, each device its shards.
          layout: where they are.
        """

    def first(self, read: Callable[[Tree], Tree]) -> Tree | None:
        """First values of trained parameters, where they are the start's; `None` where `make` makes them."""

    def make(self, seed: Any, whole: Callable[[Any], Tree]) -> Tree:
        """Trained parameters drawn by a seed, traced; `whole` draws a model's."""

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """The model's parameters, as `nnx.merge` wants them."""

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """The same as arrays of the model's types."""

    def dense(self, params: Tree) -> Tree:
        """The same, of what `over` gives."""

    def describe(self) -> str:
        """What is trained, in words."""
