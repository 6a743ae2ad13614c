"""Low-rank adapters: a frozen model, and two small matrices beside each kernel that is adapted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.layout import Layout, TensorInfo, path_name
from jaxscale.nn import Linear, WeightFormat, as_weight
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.linear import truncated_std
from jaxscale.step.adaptation import Adapters

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class LoRA(Adapters):
    """Adapters of a low rank (Hu et al. 2021): a projection `x · W` becomes `x · W + scale · (x · A) · B`.

    Only A and B are trained. A begins as random numbers of variance 1 / fan-in and B as zeros, so that the first step
    sees the model as it was; the scale is `alpha / rank`. The model's own parameters have no gradient and no optimizer
    state, and no step changes them.

    Args:
      rank: of the product.
      alpha: the scale times the rank.
      rank_stabilized: the scale is `alpha / sqrt(rank)` (Kalajdzievski 2023).
      targets: which projections: the name of a module on the way to it, as "q", "attn" or "mlp/up", with `*` for any
        part of it, or one of its logical axes, as "heads".
      dtype: of the adapters.
      base_dtype: what the frozen matrices are kept in, as "bfloat16"; `None` leaves the model's type.
      base: a form in which the frozen matrices that it covers are kept, such as quantised ones (Dettmers et al. 2023).

    Raises:
      ConfigError: a setting out of its range.
    """

    in_formulas: ClassVar[bool] = True
    rank: int = 8
    alpha: float = 16.0
    rank_stabilized: bool = False
    targets: tuple[str, ...] = ("*",)
    dtype: str = "float32"
    base_dtype: str | None = None
    base: WeightFormat | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"LoRA.rank = {self.rank!r}: must be a whole number of at least 1")
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigError(f"LoRA.targets = {self.targets!r}: must be a tuple of names, such as ('q', 'v')")
        object.__setattr__(self, "targets", tuple(self.targets))
        for name in ("dtype", "base_dtype"):
            value = getattr(self, name)
            if value is not None and value not in _TYPES:
                raise ConfigError(f"LoRA.{name} = '{value}' is no type for it{near(str(value), _TYPES)}")

    @property
    def scale(self) -> float:
        """The factor on the product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> LowRank:
        """Puts adapters on a model.

        Args:
          graphdef: its structure.
          infos: a `TensorInfo` per parameter.
          reference: makes no difference: what adapters are on is the reference.

        Raises:
          ConfigError: a target that no projection matches.
        """
        found = list(_projections(graphdef, infos))
        names = {part for site in found for part in (*site.module.split("/"), *site.axes)}
        for target in self.targets:
            if not any(site.matches(target) for site in found):
                raise ConfigError(
                    f"LoRA.targets has '{target}', which no projection of the model matches"
                    f"{near(target, {n for n in names if not n.isdecimal()})}"
                )
        chosen = tuple(site for site in found if any(site.matches(target) for target in self.targets))
        return LowRank(self, chosen, infos)


_TYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Site:
    """A kernel that may be adapted.

    Args:
      keys: its place in the tree of parameters.
      info: what it is.
      axes: logical axes of one layer's.
      inputs: how many of them are contracted, from the first.
    """

    keys: tuple[Any, ...]
    info: TensorInfo
    axes: tuple[str, ...]
    inputs: int

    @property
    def module(self) -> str:
        """The path of its projection, as "runs/0/blocks/0/attn/q"."""
        return self.info.path.rpartition("/")[0]

    def matches(self, target: str) -> bool:
        """Whether a target of `LoRA` means this one."""
        parts, n = self.module.split("/"), target.count("/") + 1
        pieces = ("/".join(parts[i : i + n]) for i in range(len(parts) - n + 1))
        return target in self.axes or fnmatchcase(self.module, target) or any(fnmatchcase(p, target) for p in pieces)

    def adapters(self, rank: int, dtype: Any) -> dict[str, TensorInfo]:
        """What is put beside it."""
        shape, axes = self.info.shape, self.info.axes
        at = len(shape) - len(self.axes)
        cut = at + self.inputs
        made = {
            "a": ((*shape[:cut], rank), (*axes[:cut], "rank")),
            "b": ((*shape[:at], rank, *shape[cut:]), (*axes[:at], "rank", *axes[cut:])),
        }
        return {name: TensorInfo(f"{self.info.path}/{name}", s, dtype, x) for name, (s, x) in made.items()}

    @property
    def fan_in(self) -> int:
        """Numbers that are summed to one output."""
        at = len(self.info.shape) - len(self.axes)
        return math.prod(self.info.shape[at : at + self.inputs])


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """Adapters on a model; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      lora: how they are.
      sites: which kernels have one.
      infos: a `TensorInfo` per parameter of the model.
    """

    lora: LoRA
    sites: tuple[Site, ...]
    infos: Tree
    passes: ClassVar[int] = 3

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per array of the model's parameters as they are kept frozen."""
        return self._typed if self.lora.base is None else self.lora.base.infos(self._typed)

    def freeze(self, read: Callable[[Tree], Tree], layout: Layout | None) -> Tree:
        """The model's parameters as they are kept frozen, laid out.

        Args:
          read: gives parameters in the types of a tree of `TensorInfo`, each device its shards.
          layout: where they are.
        """
        if self.lora.base is None:
            return read(self._typed)
        return self.lora.base.encoded(read(self._typed), self._typed, layout)

    @property
    def _typed(self) -> Tree:
        """A `TensorInfo` per parameter of the model, in the types of frozen ones."""
        kept = self.lora.base_dtype
        if kept is None:
            return self.infos
        matrix = lambda i: len([a for a in i.axes if a != "layers"]) > 1  # noqa: E731
        cast = lambda i: dataclasses.replace(i, dtype=jnp.dtype(kept)) if matrix(i) else i  # noqa: E731
        return jax.tree.map(cast, self.infos)

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per trained parameter: `.../q/kernel/a` and `.../q/kernel/b`."""
        dtype = jnp.dtype(self.lora.dtype)
        tree: dict[Any, Any] = {}
        for site in self.sites:
            _put(tree, site.keys, site.adapters(self.lora.rank, dtype))
        return tree

    def first(self, read: Callable[[Tree], Tree]) -> None:
        """`make` makes them."""

    def make(self, seed: Any, whole: Callable[[Any], Tree]) -> Tree:
        """Their first values."""
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), _STREAM), len(self.sites))
        tree: dict[Any, Any] = {}
        for key, site in zip(keys, self.sites, strict=True):
            a, b = site.adapters(self.lora.rank, jnp.dtype(self.lora.dtype)).values()
            drawn = jax.random.truncated_normal(key, -2, 2, a.shape, jnp.float32) * truncated_std(site.fan_in)
            _put(tree, site.keys, {"a": drawn.astype(a.dtype), "b": jnp.zeros(b.shape, b.dtype)})
        return tree

    def over(self, adapters: Tree, frozen: Tree) -> Tree:
        """The model's parameters, kernels with an adapter being `Adapted`."""
        tree = jax.tree.map(lambda x: x, frozen)  # dicts of its own
        for site in self.sites:
            pair = _get(adapters, site.keys)
            _put(tree, site.keys, Adapted(_get(tree, site.keys), pair["a"], pair["b"], self.lora.scale))
        return tree

    def merged(self, adapters: Tree, frozen: Tree) -> Tree:
        """The model's parameters with the adapters in them, arrays of the model's types."""
        return self.dense(self.over(adapters, frozen))

    def dense(self, params: Tree) -> Tree:
        """The same, of the parameters that `over` gives."""
        return jax.tree.map(lambda i, weight: as_weight(weight).dense(i.dtype), self.infos, params)

    def describe(self) -> str:
        """What is adapted, in words."""
        names: dict[str, int] = {}
        for site in self.sites:
            parts = [p for p in site.module.split("/") if not p.isdecimal() and p not in ("runs", "blocks")]
            layers = site.info.shape[0] if "layers" in site.info.axes else 1
            names["/".join(parts)] = names.get("/".join(parts), 0) + layers
        sizes = [sum(i.size for i in jax.tree.leaves(t)) for t in (self.adapters, self.infos)]
        where = ", ".join(f"{name} ({n})" for name, n in names.items())
        return f"LoRA of rank {self.lora.rank} on {where}: {sizes[0]:,} parameters are trained, {sizes[1]:,} frozen"


_STREAM = 0x10AA
"""Folded into the seed, so that adapters are not the numbers that the model began with."""


def _projections(graphdef: nnx.GraphDef[Any], infos: Tree) -> Iterator[Site]:
    model = nnx.merge(graphdef, infos)
    linear = {path_name((*path, "kernel")): m for path, m in nnx.iter_graph(model) if isinstance(m, Linear)}
    for path, info in jax.tree_util.tree_leaves_with_path(infos):
        if info.path in linear:
            module = linear[info.path]
            yield Site(tuple(p.key for p in path), info, module.axes, len(module.contracted))


def _get(tree: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value
