"""LoRA: low-rank adapters beside the kernels of a frozen model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_positive, near
from jaxscale.layout import STACKED, Layout, TensorInfo, path_name
from jaxscale.nn import Linear, WeightFormat, as_weight
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.linear import truncated_std
from jaxscale.step.adaptation import Adapters

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class LoRA(Adapters):
    """Low-rank adapters (Hu et al. 2021): a projection `x · W` becomes `x · W + scale · (x · A) · B`.

    Only A and B are trained. Initially A is random with variance 1 / fan-in and B is zero, so that the first step
    computes the same as the original model. The scale is `alpha / rank`. The model's own parameters are frozen: they
    have no gradient and no optimizer state.

    Args:
      rank: rank of the product A · B.
      alpha: the scale times the rank.
      rank_stabilized: whether the scale is `alpha / sqrt(rank)` (Kalajdzievski 2023).
      targets: the projections with adapters: parts of module paths, such as "q", "attn" or "mlp/up", where `*` matches
        any characters, or logical axes, such as "heads".
      dtype: dtype of A and B.
      base_dtype: dtype of the frozen matrices, such as "bfloat16"; `None` is the model's own.
      base: storage format of the frozen matrices, such as a quantised one (Dettmers et al. 2023); by default that of
        the run that training starts from.

    Raises:
      ConfigError: a setting is out of its range.
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
        check_positive("LoRA.alpha", self.alpha)
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigError(f"LoRA.targets = {self.targets!r}: must be a tuple of names, such as ('q', 'v')")
        object.__setattr__(self, "targets", tuple(self.targets))
        for name in ("dtype", "base_dtype"):
            value = getattr(self, name)
            if value is not None and value not in _TYPES:
                raise ConfigError(f"LoRA.{name} = '{value}' does not exist{near(str(value), _TYPES)}")

    @property
    def scale(self) -> float:
        """Factor on the product `(x · A) · B`."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> LowRank:
        """Add adapters to a model.

        Args:
          graphdef: the model's structure.
          infos: a `TensorInfo` per parameter of the model.
          reference: not used: the frozen model is the reference.

        Raises:
          ConfigError: no projection matches a target.
        """
        sites = list(_projections(graphdef, infos))
        names = {part for site in sites for part in (*site.module.split("/"), *site.axes)}
        for target in self.targets:
            if not any(site.matches(target) for site in sites):
                ours = _PEFT.get(target)
                valid = {n for n in names if not n.isdecimal()}
                hint = f"; did you mean '{ours}'?" if ours in (*valid, "*") else near(target, valid)
                raise ConfigError(f"LoRA.targets has '{target}', which no projection of the model matches{hint}")
        chosen = tuple(site for site in sites if any(site.matches(target) for target in self.targets))
        return LowRank(self, chosen, infos)


_TYPES = ("float32", "bfloat16", "float16")
_PEFT = {
    "q_proj": "q", "query": "q", "k_proj": "k", "key": "k", "v_proj": "v", "value": "v", "o_proj": "out",
    "out_proj": "out", "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "all-linear": "*",
}  # fmt: skip
"""Names of projections in PEFT's `target_modules` -> ours."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A kernel that can have an adapter.

    Args:
      keys: keys that lead to it in the tree of parameters.
      info: the kernel.
      axes: logical axes of one layer's kernel.
      inputs: how many of these axes, from the first, are contracted.
    """

    keys: tuple[Any, ...]
    info: TensorInfo
    axes: tuple[str, ...]
    inputs: int

    @property
    def module(self) -> str:
        """Path of its projection, such as "runs/0/blocks/0/attn/q"."""
        return self.info.path.rpartition("/")[0]

    def matches(self, target: str) -> bool:
        """Return whether a target of `LoRA` matches this kernel.

        Args:
          target: an entry of `LoRA.targets`.
        """
        parts, n = self.module.split("/"), target.count("/") + 1
        pieces = ("/".join(parts[i : i + n]) for i in range(len(parts) - n + 1))
        return target in self.axes or fnmatchcase(self.module, target) or any(fnmatchcase(p, target) for p in pieces)

    def adapters(self, rank: int, dtype: np.dtype) -> dict[str, TensorInfo]:
        """Return the `TensorInfo`s of A and B, as "a" and "b".

        Args:
          rank: rank of the adapter.
          dtype: dtype of both.
        """
        shape, axes = self.info.shape, self.info.axes
        stacks = len(shape) - len(self.axes)
        outputs = stacks + self.inputs
        matrices = {
            "a": ((*shape[:outputs], rank), (*axes[:outputs], "rank")),
            "b": ((*shape[:stacks], rank, *shape[outputs:]), (*axes[:stacks], "rank", *axes[outputs:])),
        }
        return {name: TensorInfo(f"{self.info.path}/{name}", s, dtype, x) for name, (s, x) in matrices.items()}

    @property
    def fan_in(self) -> int:
        """Number of inputs that are summed to one output."""
        stacks = len(self.info.shape) - len(self.axes)
        return math.prod(self.info.shape[stacks : stacks + self.inputs])


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """Adapters on a model; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      lora: settings of the adapters.
      sites: the kernels with an adapter.
      infos: a `TensorInfo` per parameter of the model.
    """

    lora: LoRA
    sites: tuple[Site, ...]
    infos: Tree
    passes: ClassVar[int] = 3
    in_any_order: ClassVar[bool] = True

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per array of the frozen parameters, in their storage format."""
        return self._typed if self.lora.base is None else self.lora.base.infos(self._typed)

    def freeze(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        """Return the frozen parameters in their storage format, sharded."""
        if self.lora.base is None:
            return read(self._typed)
        base = self.lora.base
        return base.encoded(read(self._typed, stored=base), self._typed, layout)

    @property
    def _typed(self) -> Tree:
        """A `TensorInfo` per parameter of the model, matrices with `LoRA.base_dtype`."""
        base_dtype = self.lora.base_dtype
        if base_dtype is None:
            return self.infos

        def matrix(i: TensorInfo) -> bool:
            return len([a for a in i.axes if a not in STACKED]) > 1

        def cast(i: TensorInfo) -> TensorInfo:
            return dataclasses.replace(i, dtype=jnp.dtype(base_dtype)) if matrix(i) else i

        return jax.tree.map(cast, self.infos)

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per trained parameter: `.../q/kernel/a` and `.../q/kernel/b`."""
        dtype = jnp.dtype(self.lora.dtype)
        tree: dict[Any, Any] = {}
        for site in self.sites:
            put_at(tree, site.keys, site.adapters(self.lora.rank, dtype))
        return tree

    def first(self, read: Callable[[Tree], Tree]) -> None:
        """Return `None`: `make` initialises the adapters."""

    def make(self, seed: int | jax.Array, whole: Callable[[int | jax.Array], Tree]) -> Tree:
        """Return initial values of the adapters: A random, B zero."""
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), _STREAM), len(self.sites))
        tree: dict[Any, Any] = {}
        for key, site in zip(keys, self.sites, strict=True):
            a, b = site.adapters(self.lora.rank, jnp.dtype(self.lora.dtype)).values()
            random = jax.random.truncated_normal(key, -2, 2, a.shape, jnp.float32) * truncated_std(site.fan_in)
            put_at(tree, site.keys, {"a": random.astype(a.dtype), "b": jnp.zeros(b.shape, b.dtype)})
        return tree

    def over(self, adapters: Tree, frozen: Tree) -> Tree:
        """Return the model's parameters; kernels with an adapter are `Adapted`."""
        tree = jax.tree.map(lambda x: x, frozen)  # copies the dicts
        for site in self.sites:
            pair = get_at(adapters, site.keys)
            put_at(tree, site.keys, Adapted(get_at(tree, site.keys), pair["a"], pair["b"], self.lora.scale))
        return tree

    def merged(self, adapters: Tree, frozen: Tree) -> Tree:
        """Return the model's parameters with the adapters added to their kernels, in the model's dtypes."""
        return self.dense(self.over(adapters, frozen))

    def dense(self, params: Tree) -> Tree:
        """Return the result of `over` as plain arrays of the model's dtypes."""
        return jax.tree.map(lambda i, weight: as_weight(weight).dense(i.dtype), self.infos, params)

    def describe(self) -> str:
        """Return a sentence about the projections with adapters and the numbers of parameters."""
        names: dict[str, int] = {}
        for site in self.sites:
            parts = [p for p in site.module.split("/") if not p.isdecimal() and p not in ("runs", "blocks")]
            layers = site.info.shape[0] if "layers" in site.info.axes else 1
            names["/".join(parts)] = names.get("/".join(parts), 0) + layers
        sizes = [sum(i.size for i in jax.tree.leaves(t)) for t in (self.adapters, self.infos)]
        where = ", ".join(f"{name} ({n})" for name, n in names.items())
        stored = "" if self.lora.base is None else f", their matrices stored as {self.lora.base.describe()}"
        trained = f"{sizes[0]:,} parameters are trained, {sizes[1]:,} frozen{stored}"
        return f"LoRA of rank {self.lora.rank} on {where}: {trained}"


_STREAM = 0x10AA
"""Folded into the seed, so that adapters and the model are drawn from different random streams."""


def _projections(graphdef: nnx.GraphDef[Any], infos: Tree) -> Iterator[Site]:
    model = nnx.merge(graphdef, infos)
    linear = {path_name((*path, "kernel")): m for path, m in nnx.iter_graph(model) if isinstance(m, Linear)}
    for path, info in jax.tree_util.tree_leaves_with_path(infos):
        if info.path in linear:
            module = linear[info.path]
            yield Site(tuple(p.key for p in path), info, module.axes, len(module.contracted))


def get_at(tree: Tree, keys: tuple[Any, ...]) -> Tree:
    """Return the part of nested dicts at a path.

    Args:
      tree: the dicts.
      keys: the keys that lead to it.
    """
    for key in keys:
        tree = tree[key]
    return tree


def put_at(tree: dict[Any, Any], keys: tuple[Any, ...], value: object) -> None:
    """Set the part of nested dicts at a path, and make the dicts that lead to it.

    Args:
      tree: the dicts, changed in place.
      keys: the keys that lead to it.
      value: the part.
    """
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value
