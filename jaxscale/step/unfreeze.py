"""Training some of a model's parameters while the others are frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.layout import Layout, TensorInfo
from jaxscale.step.adaptation import Adapters

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class Unfreeze(Adapters):
    """Trains the named parameters of a model and freezes the others (`train.adapters = @Unfreeze()`).

    Needs `train.start`. Frozen parameters have no gradient and no optimizer state and are not in the run's checkpoints;
    they are read from the checkpoint that the run starts from. A scanned stack of layers is trained or frozen as a
    whole.

    Args:
      targets: parts of parameter paths, such as "norm", "head", "attn/q" or "bias"; `*` matches any characters.

    Raises:
      ConfigError: there are no targets, or they are not a tuple.
    """

    targets: tuple[str, ...] = ("*norm*",)

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigError(
                f"Unfreeze.targets = {self.targets!r}: must be a tuple of names, such as ('norm', 'head')"
            )
        object.__setattr__(self, "targets", tuple(self.targets))

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> Subset:
        """Split a model's parameters.

        Args:
          graphdef: the model's structure.
          infos: a `TensorInfo` per parameter.
          reference: whether to store the initial values of the trained parameters as well, for the objective.

        Raises:
          ConfigError: no parameter matches a target.
        """
        paths = [i.path for i in jax.tree.leaves(infos)]
        for target in self.targets:
            if not any(matches(path, target) for path in paths):
                names = {part for path in paths for part in path.split("/") if not part.isdecimal()}
                raise ConfigError(
                    f"Unfreeze.targets has '{target}', which no parameter of the model matches{near(target, names)}"
                )
        return Subset(infos, frozenset(p for p in paths if any(matches(p, t) for t in self.targets)), reference)


def matches(path: str, target: str) -> bool:
    """Return whether a path matches a target, or as many consecutive components of it as the target has.

    Args:
      path: a parameter's path, such as "runs/0/blocks/0/attn/q/kernel".
      target: a pattern such as "attn/q", with `*` for any characters.
    """
    parts, n = path.split("/"), target.count("/") + 1
    pieces = ("/".join(parts[i : i + n]) for i in range(len(parts) - n + 1))
    return fnmatchcase(path, target) or any(fnmatchcase(p, target) for p in pieces)


@dataclasses.dataclass(frozen=True, eq=False)
class Subset:
    """A choice of a model's parameters to train; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      infos: a `TensorInfo` per parameter of the model.
      chosen: paths of the trained parameters.
      reference: whether the initial values of the trained parameters are stored as well.
    """

    infos: Tree
    chosen: frozenset[str]
    reference: bool = False
    passes: ClassVar[int] = 1
    in_any_order: ClassVar[bool] = True

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per trained parameter."""
        return self._part(self.infos, trained=True)

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per frozen parameter."""

        def named(i: TensorInfo) -> TensorInfo:
            return dataclasses.replace(i, path=f"frozen/{i.path}") if i.path in self.chosen else i

        return jax.tree.map(named, self.infos) if self.reference else self._part(self.infos, trained=False)

    def freeze(self, read: Callable[[Tree], Tree], layout: Layout | None) -> Tree:
        """Return the parameters of `base`."""
        whole = read(self.infos)
        return whole if self.reference else self._part(whole, trained=False)

    def first(self, read: Callable[[Tree], Tree]) -> Tree:
        """Return the initial trained parameters, from the checkpoint of `train.start`."""
        return self._part(read(self.infos), trained=True)

    def make(self, seed: int | jax.Array, whole: Callable[[int | jax.Array], Tree]) -> Tree:
        """Return initial trained parameters from a seed."""
        return self._part(whole(seed), trained=True)

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """Return all of the model's parameters."""
        return _merged(frozen, trained)

    merged = over

    def dense(self, params: Tree) -> Tree:
        """Return the parameters unchanged."""
        return params

    def describe(self) -> str:
        """Return a sentence about the trained parameters."""
        sizes = [sum(i.size for i in jax.tree.leaves(t)) for t in (self.adapters, self.infos)]
        names = sorted({"/".join(p for p in path.split("/")[-2:] if not p.isdecimal()) for path in self.chosen})
        return f"{sizes[0]:,} of {sizes[1]:,} parameters are trained: {', '.join(names)}"

    def _part(self, tree: Tree, *, trained: bool) -> Tree:
        def pick(infos: Tree, values: Tree) -> Tree:
            if not isinstance(infos, dict):
                return values if (infos.path in self.chosen) == trained else None
            picked = {k: pick(infos[k], values[k]) for k in infos}
            return {k: v for k, v in picked.items() if v is not None} or None

        return pick(self.infos, tree) or {}


def _merged(below: Tree, above: Tree) -> Tree:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    keys = [*below, *(k for k in above if k not in below)]
    return {k: _merged(below.get(k, above.get(k)), above[k]) if k in above else below[k] for k in keys}
