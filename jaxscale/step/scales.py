"""Training the scales of quantised weights while their codes are frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxscale.config import meant, register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.nn import Stored, StoredWeight, WeightFormat, as_weight
from jaxscale.step.adaptation import Adapters
from jaxscale.units import human_bytes

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class Scales(Adapters):
    """Trains the scales of stored weights (`train.adapters = @Scales()`): codes and all else are frozen.

    Needs `train.start`, whose matrices are rounded. The codes are not in the run's checkpoints; they are
    rounded again from the checkpoint that the run starts from.

    Args:
      base: the format of the matrices, a `Stored` with float scales.

    Raises:
      ConfigError: `base` is another format.
    """

    base: WeightFormat = Stored()

    def __post_init__(self) -> None:
        if not isinstance(self.base, Stored):
            raise ConfigError(f"Scales.base must be Stored(), which has scales, not {self.base!r}{meant(self.base)}")
        if not self.base.float_scales:
            raise ConfigError(
                f"Scales.base has scales of type {self.base.scale}, which cannot be trained; use 'float32'"
            )

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> ScalesOf:
        """Split a model's parameters.

        Args:
          graphdef: the model's structure.
          infos: a `TensorInfo` per parameter.
          reference: whether the objective needs the initial parameters, which are not stored.

        Raises:
          ConfigError: no parameter is a matrix of a layer, or the objective needs the initial parameters.
        """
        if reference:
            raise ConfigError(
                "Scales stores no second copy of its scales for an objective with a reference; use LoRA()"
            )
        if not _scales(self.base.infos(infos)):
            raise ConfigError("Scales: no parameter of this model is a matrix of a layer; use Unfreeze()")
        return ScalesOf(self.base, infos)


@dataclasses.dataclass(frozen=True, eq=False)
class ScalesOf:
    """The scales of a model's stored weights; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      base_format: the weights' format.
      infos: a `TensorInfo` per parameter of the model.
    """

    base_format: WeightFormat
    infos: Tree
    passes: ClassVar[int] = 1
    in_any_order: ClassVar[bool] = True

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per scale array: `.../q/kernel/scale`."""
        return _scales(self.base_format.infos(self.infos))

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per array of codes, and per other parameter."""
        return _codes(self.base_format.infos(self.infos))

    def freeze(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        """Return the codes and the other parameters."""
        return _codes(self._encoded(read, layout))

    def first(self, read: Callable[..., Tree]) -> Tree:
        """Return the scales of the weights in the checkpoint of `train.start`."""
        return _scales(self._encoded(read, None))

    def _encoded(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        return self.base_format.encoded(read(self.infos, stored=self.base_format), self.infos, layout)

    def make(self, seed: int | jax.Array, whole: Callable[[int | jax.Array], Tree]) -> Tree:
        """Return the scales of randomly initialised weights."""

        def encode(i: TensorInfo, x: jax.Array) -> Any:
            takes = i.contracted is not None and self.base_format.covers(i)
            return self.base_format.encode(x, i.contracted) if takes else x  # type: ignore[arg-type]

        return _scales(jax.tree.map(encode, self.infos, whole(seed)))

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the model's parameters; matrices are `StoredWeight`."""

        def join(frozen: Tree, trained: Tree) -> Tree:
            if isinstance(frozen, dict):
                return {k: join(part, trained.get(k, {})) for k, part in frozen.items()}
            return dataclasses.replace(frozen, scale=trained["scale"]) if is_stored(frozen) else frozen

        return join(frozen, trained)

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the model's parameters as plain arrays."""
        return self.dense(self.over(trained, frozen))

    def dense(self, params: Tree) -> Tree:
        """Return the result of `over` as plain arrays."""
        return jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), self.infos, params)

    def describe(self) -> str:
        """Return a sentence about the trained scales and the bytes of all parameters."""
        trained, frozen, whole = (jax.tree.leaves(t) for t in (self.adapters, self.base, self.infos))
        stored = sum(i.nbytes for i in (*trained, *frozen))
        return (
            f"{sum(i.size for i in trained):,} scales of {len(trained)} quantised matrices are trained; all parameters "
            f"take {human_bytes(stored)}, and {human_bytes(sum(i.nbytes for i in whole))} before"
        )


def is_stored(x: object) -> bool:
    """Return whether a leaf is a `StoredWeight`."""
    return isinstance(x, StoredWeight)


def _scales(tree: Tree) -> Tree:
    """Return the scales of a tree of parameters, as `.../kernel/scale`."""
    if isinstance(tree, dict):
        parts = {k: _scales(part) for k, part in tree.items()}
        return {k: part for k, part in parts.items() if part}
    return {"scale": tree.scale} if is_stored(tree) else {}


def _codes(tree: Tree) -> Tree:
    """Return a tree of parameters without the scales."""

    def without(x: Any) -> Any:
        return dataclasses.replace(x, scale=None) if is_stored(x) else x

    return jax.tree.map(without, tree, is_leaf=is_stored)
