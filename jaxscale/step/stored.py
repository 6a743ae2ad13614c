"""Runs whose checkpoint holds matrices in a weight format (`train.stored`), such as quantised ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.nn import Weight, WeightFormat, as_weight
from jaxscale.step.state import describe_model
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

Tree = Any


def is_weight(x: object) -> bool:
    """Return whether a node of a tree of parameters is a `Weight`."""
    return isinstance(x, Weight)


def stored_infos(config: TrainConfig) -> Tree:
    """Return a `TensorInfo` per array of the parameters in a run's checkpoint.

    Args:
      config: the run's settings; with `stored`, a matrix is the arrays of its weight, such as `.../kernel/codes`.
    """
    infos = describe_model(config.model)[1]
    return infos if config.stored is None else config.stored.infos(infos)


def as_arrays(params: Tree, infos: Tree) -> Tree:
    """Return a model's parameters as plain arrays of the model's dtypes.

    Args:
      params: the parameters, arrays and `Weight`s.
      infos: the model's tree of `TensorInfo`.
    """

    def dense(weight: Any, info: Any) -> Any:
        return weight.dense(info.dtype) if is_weight(weight) else weight

    return jax.tree.map(dense, params, infos, is_leaf=is_weight)


def refuse_training(config: TrainConfig) -> None:
    """Check that a run can be trained.

    Args:
      config: the run's settings.

    Raises:
      ConfigError: its matrices are stored in a weight format, which has no gradient.
    """
    if config.stored is not None:
        raise ConfigError(
            f"train.stored ({config.stored.describe()}): "
            "matrices in a weight format are not trained; train adapters beside "
            "them in a new run (train.start = @FromRun(), train.adapters = @LoRA()), or write plain arrays with "
            "jaxscale merge"
        )


def adapted_to(config: TrainConfig, stored: WeightFormat | None, place: str) -> TrainConfig:
    """Return settings of a run whose adapters keep frozen matrices as the run that it starts from stores them.

    Args:
      config: the run's settings.
      stored: the format of the run that it starts from; `None` changes nothing.
      place: that run, for messages.

    Raises:
      ConfigError: all parameters would be trained.
    """
    if stored is None:
        return config
    adapters = config.adapters
    if adapters is None:
        raise ConfigError(
            f"{place} stores its matrices as {stored.describe()}, "
            "which cannot be trained; set train.adapters = @LoRA(), or "
            f"start from plain arrays: jaxscale merge {place} OUT"
        )
    own = dataclasses.is_dataclass(adapters) and "base" in {f.name for f in dataclasses.fields(adapters)}
    if own and adapters.base is None:
        adapters = dataclasses.replace(adapters, base=stored)  # type: ignore[type-var]
    return dataclasses.replace(config, adapters=adapters)


@dataclasses.dataclass(frozen=True, eq=False)
class NothingTrained:
    """A model with nothing to train, for plans and explanations; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      format: the format of the matrices.
      infos: a `TensorInfo` per parameter of the model.
    """

    format: WeightFormat
    infos: Tree
    passes: ClassVar[int] = 0
    in_any_order: ClassVar[bool] = False

    @property
    def adapters(self) -> Tree:
        """Nothing: `{}`."""
        return {}

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per stored array."""
        return self.format.infos(self.infos)

    def freeze(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        """Raise: the arrays are in the run's own checkpoint (`RunFolder.weights`)."""
        raise ConfigError("the parameters of a run with train.stored are in its own checkpoint; use Run.weights()")

    def first(self, read: Callable[..., Tree]) -> Tree:
        """Nothing: `{}`."""
        return {}

    def make(self, seed: int | jax.Array, whole: Callable[[int | jax.Array], Tree]) -> Tree:
        """Nothing: `{}`."""
        return {}

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the stored weights."""
        return frozen

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the parameters as plain arrays."""
        return self.dense(frozen)

    def dense(self, params: Tree) -> Tree:
        """Return the parameters as plain arrays."""
        return jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), self.infos, params)

    def describe(self) -> str:
        """Return a sentence about the bytes of the parameters, as arrays in memory."""
        sizes = [sum(i.nbytes for i in jax.tree.leaves(t)) for t in (self.base, self.infos)]
        return (
            f"matrices are stored as {self.format.describe()} "
            f"and not trained: all parameters take {human_bytes(sizes[0])}, and "
            f"{human_bytes(sizes[1])} as plain arrays"
        )
