"""`BitAdapters`: LoRA adapters for each of several formats of the same frozen matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo
from jaxscale.nn import WeightFormat, as_weight
from jaxscale.nn.formats.presets import FORMATS, named
from jaxscale.nn.linear import truncated_std
from jaxscale.nn.many_bits import ManyBits
from jaxscale.step.adaptation import Adapters
from jaxscale.step.lora import LoRA, Site, get_at, put_at

Tree = Any
_STREAM = 0xB175


@register
@dataclasses.dataclass(frozen=True)
class BitAdapters(Adapters):
    """Frozen matrices in several formats, with a LoRA adapter of its own for each (LLM-QFA, Yi et al. 2024).

    One run is then served in any format, and in any choice of formats by layer (`served`). With
    `train.algorithm = @OnceForAll()` each step trains a random choice; with another algorithm every step trains that of
    `served`. All formats are in memory in training.

    Args:
      formats: weight formats, such as `@int4()`, or their names, from few bits to many.
      served: the format that evaluation, sampling, `merge` and `export` use, counted from 0; or one for each layer.
      rank: rank of an adapter.
      alpha: the scale of an adapter times the rank.
      targets: as of `LoRA`; other matrices are not rounded.

    Raises:
      ConfigError: a setting is out of its range, or a format does not exist.
    """

    formats: tuple[str | WeightFormat, ...] = ("int2", "int3", "int4")
    served: int | tuple[int, ...] = -1
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if len(self.formats) < 2:
            raise ConfigError(f"BitAdapters.formats = {self.formats!r}: must be two or more; for one use @LoRA()")
        object.__setattr__(self, "formats", tuple(named(f, "BitAdapters.formats") for f in self.formats))
        object.__setattr__(self, "targets", LoRA(self.rank, self.alpha, targets=self.targets).targets)
        if not isinstance(self.served, int):
            object.__setattr__(self, "served", tuple(self.served))
        for n in (self.served,) if isinstance(self.served, int) else self.served:
            if not -len(self.formats) <= n < len(self.formats):
                raise ConfigError(f"BitAdapters.served has {n}: must be from 0 to {len(self.formats) - 1}")

    @property
    def scale(self) -> float:
        """Factor on the product of an adapter's matrices."""
        return self.alpha / self.rank

    def adapt(self, graphdef: nnx.GraphDef[Any], infos: Tree, *, reference: bool = False) -> BitLayers:
        """See `Adapters`.

        Raises:
          ConfigError: no projection matches a target, `served` has not one entry for each layer, or the objective needs
            the initial parameters, which no format holds.
        """
        if reference:
            raise ConfigError(
                "BitAdapters does not hold the initial parameters for an objective with a reference; use LoRA()"
            )
        sites = LoRA(self.rank, targets=self.targets).adapt(graphdef, infos).sites
        layers = BitLayers(self, tuple(FORMATS[f][0] if isinstance(f, str) else f for f in self.formats), sites, infos)
        if not isinstance(self.served, int) and len(self.served) != layers.depth:
            raise ConfigError(
                f"BitAdapters.served has {len(self.served)} formats, and the model has {layers.depth} layers; give one "
                "for each, or one number for all"
            )
        return layers


@dataclasses.dataclass(frozen=True, eq=False)
class BitLayers:
    """A model's matrices in several formats; see `jaxscale.step.adaptation.Adaptation`.

    Args:
      settings: the settings.
      formats: the weight formats.
      sites: the kernels with adapters.
      infos: a `TensorInfo` per parameter of the model.
    """

    settings: BitAdapters
    formats: tuple[WeightFormat, ...]
    sites: tuple[Site, ...]
    infos: Tree
    passes: ClassVar[int] = 3
    in_any_order: ClassVar[bool] = True

    @property
    def depth(self) -> int:
        """The number of layers that have a choice."""
        return 1 + max(int(n) for s in self.sites for n in self._layers_of(s).reshape(-1))

    def _layers_of(self, site: Site) -> Int[np.ndarray, "..."]:
        """Return the number of the layer of each matrix of a site."""
        first = 0
        for run in sorted({s.keys[1] for s in self.sites}):
            inside = [s for s in self.sites if s.keys[1] == run]
            blocks = sorted({s.keys[3] for s in inside})
            repeats = max(len(_stack(s)) and _stack(s)[0] or 1 for s in inside)
            if site.keys[1] == run:
                n = first + blocks.index(site.keys[3]) + len(blocks) * np.arange(repeats)
                return n if _stack(site) else n[0]
            first += len(blocks) * repeats
        raise AssertionError(site)

    @property
    def base(self) -> Tree:
        """A `TensorInfo` per frozen array: of each format, of other parameters, and of the choice."""
        choices: dict[Any, Any] = {}
        for s in self.sites:
            info = TensorInfo(f"{s.info.path}/choice", _stack(s), jnp.dtype("int32"), s.info.axes[: len(_stack(s))])
            put_at(choices, s.keys, info)
        bits = {str(n): f.infos(self._only(self.infos, str(n))) for n, f in enumerate(self.formats)}
        return {"plain": self._without(self.infos), "bits": bits, "choice": choices}

    def _only(self, tree: Tree, prefix: str = "") -> Tree:
        """Return the matrices with adapters; `TensorInfo`s get a path that begins with the prefix."""
        part: dict[Any, Any] = {}
        for s in self.sites:
            value = get_at(tree, s.keys)
            named = isinstance(value, TensorInfo) and bool(prefix)
            put_at(part, s.keys, dataclasses.replace(value, path=f"{prefix}/{value.path}") if named else value)
        return part

    def _without(self, tree: Tree) -> Tree:
        adapted = {s.keys for s in self.sites}

        def walk(node: Tree, keys: tuple[Any, ...]) -> Tree:
            if not isinstance(node, dict):
                return node
            parts = {k: walk(v, (*keys, k)) for k, v in node.items() if (*keys, k) not in adapted}
            return {k: v for k, v in parts.items() if not isinstance(v, dict) or v}

        return walk(tree, ())

    def freeze(self, read: Callable[..., Tree], layout: Layout | None) -> Tree:
        """Return the frozen arrays."""
        whole = read(self.infos)
        bits = {}
        for n, f in enumerate(self.formats):
            bits[str(n)] = f.encoded(self._only(whole), self._only(self.infos), layout)
        served = self.settings.served
        every = np.full(self.depth, served) if isinstance(served, int) else np.asarray(served)
        frozen = {"plain": self._without(whole), "bits": bits, "choice": {}}
        return self.chosen(frozen, jnp.asarray(every % len(self.formats), jnp.int32))

    def chosen(self, frozen: Tree, choice: Int[Array, " depth"]) -> Tree:
        """Return the frozen arrays with another choice.

        Args:
          frozen: from `freeze`.
          choice: the format of each layer.
        """
        choices: dict[Any, Any] = {}
        for s in self.sites:
            put_at(choices, s.keys, choice[self._layers_of(s)])
        return {**frozen, "choice": choices}

    @property
    def adapters(self) -> Tree:
        """A `TensorInfo` per trained parameter: `.../q/kernel/a` and `.../q/kernel/b`."""
        tree: dict[Any, Any] = {}
        for s in self.sites:
            put_at(tree, s.keys, {name: self._stacked(i, s) for name, i in self._pair(s).items()})
        return tree

    def _pair(self, site: Site) -> dict[str, TensorInfo]:
        return site.adapters(self.settings.rank, np.dtype("float32"))

    def _stacked(self, info: TensorInfo, site: Site) -> TensorInfo:
        n, lead = len(self.formats), len(_stack(site))
        shape, axes = (*info.shape[:lead], n, *info.shape[lead:]), (*info.axes[:lead], None, *info.axes[lead:])
        return dataclasses.replace(info, shape=shape, axes=axes)

    def first(self, read: Callable[[Tree], Tree]) -> None:
        """Return `None`: `make` initialises the adapters."""

    def make(self, seed: int | jax.Array, whole: Callable[[int | jax.Array], Tree]) -> Tree:
        """Return initial values of the adapters, as those of `LoRA`."""
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), _STREAM), len(self.sites))
        tree: dict[Any, Any] = {}
        for key, s in zip(keys, self.sites, strict=True):
            a, b = (self._stacked(i, s).shape for i in self._pair(s).values())
            random = jax.random.truncated_normal(key, -2, 2, a, jnp.float32) * truncated_std(s.fan_in)
            put_at(tree, s.keys, {"a": random, "b": jnp.zeros(b, jnp.float32)})
        return tree

    def over(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the model's parameters; kernels with adapters are `ManyBits`."""
        tree = jax.tree.map(lambda x: x, frozen["plain"])
        for s in self.sites:
            kernels = tuple(get_at(frozen["bits"][str(n)], s.keys) for n in range(len(self.formats)))
            pair, choice = get_at(trained, s.keys), get_at(frozen["choice"], s.keys)
            put_at(tree, s.keys, ManyBits(kernels, pair["a"], pair["b"], choice, self.settings.scale))
        return tree

    def merged(self, trained: Tree, frozen: Tree) -> Tree:
        """Return the model's parameters as plain arrays, in the formats of `served`."""
        return self.dense(self.over(trained, frozen))

    def dense(self, params: Tree) -> Tree:
        """Return the result of `over` as plain arrays of the model's dtypes."""
        return jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), self.infos, params)

    def describe(self) -> str:
        """Return a sentence about the formats and the trained parameters."""
        trained = sum(i.size for i in jax.tree.leaves(self.adapters))
        names = ", ".join(f if isinstance(f, str) else f.describe() for f in self.settings.formats)
        return f"adapters of rank {self.settings.rank} for each of {names}: {trained:,} parameters are trained"


def _stack(site: Site) -> tuple[int, ...]:
    return site.info.shape[: len(site.info.shape) - len(site.axes)]
