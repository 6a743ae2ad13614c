"""Experts outside the device: a cache of some of all layers' experts, and the rest of each layer streamed as before."""

from __future__ import annotations

import abc
import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxscale.errors import ConfigError, check_whole
from jaxscale.infer.streaming.layers import Layers, Resident, Source
from jaxscale.layout import TensorInfo, path_name
from jaxscale.layout.tensors import Tree
from jaxscale.nn import Packed

Layer = tuple[int, int, Any]
"""A layer of experts: the run of blocks, the repeat, and the key of the block in its group."""
Key = tuple[Layer, int]


class Eviction(abc.ABC):
    """Which expert leaves a full cache: the one of the least worth."""

    @abc.abstractmethod
    def saw(self, layer: Layer, chosen: np.ndarray, scores: Float[np.ndarray, " experts"]) -> None:
        """Take note of a step of a layer.

        Args:
          layer: the layer.
          chosen: the experts of the step's tokens.
          scores: the router's mean probability of every expert.
        """

    @abc.abstractmethod
    def worth(self, key: Key) -> float:
        """Return the worth of an expert.

        Args:
          key: the layer and the expert's number.
        """


class LeastRecent(Eviction):
    """The expert that was not chosen for longest leaves."""

    def __init__(self) -> None:
        self._step, self._last = 0, dict[Key, int]()

    def saw(self, layer: Layer, chosen: np.ndarray, scores: Float[np.ndarray, " experts"]) -> None:
        """See `Eviction`."""
        self._step += 1
        self._last |= {(layer, int(e)): self._step for e in chosen}

    def worth(self, key: Key) -> float:
        """See `Eviction`."""
        return self._last.get(key, 0)


class RecentScores(Eviction):
    """The expert of the least average of recent scores leaves (HybriMoE's minus recent score, arXiv:2504.05897).

    A score is the router's probability if it is among the `best` largest of the layer, and else 0: an expert that was
    nearly chosen is worth more than one that was far from it.

    Args:
      rate: weight of the newest score.
      best: how many scores of a layer count.

    Raises:
      ConfigError: a setting is out of its range.
    """

    def __init__(self, rate: float = 0.3, best: int = 4):
        if not 0 < rate <= 1:
            raise ConfigError(f"RecentScores.rate = {rate}: must be above 0 and at most 1")
        check_whole("RecentScores.best", best)
        self._rate, self._best = rate, best
        self._mean: dict[Layer, np.ndarray] = {}

    def saw(self, layer: Layer, chosen: np.ndarray, scores: Float[np.ndarray, " experts"]) -> None:
        """See `Eviction`."""
        largest = np.where(np.argsort(np.argsort(-scores, kind="stable")) < self._best, scores, 0.0)
        self._mean[layer] = self._rate * largest + (1 - self._rate) * self._mean.get(layer, np.zeros(len(scores)))

    def worth(self, key: Key) -> float:
        """See `Eviction`."""
        layer, expert = key
        return float(self._mean[layer][expert]) if layer in self._mean else 0.0


@dataclasses.dataclass
class Hits:
    """How the experts that steps chose got to the device.

    Args:
      cached: were there.
      guessed: were loaded before the layer computed, since its router had guessed them.
      missed: were loaded after the router's choice, so that the layer computed again.
      wasted: were guessed, loaded, and not chosen.
      bytes: loaded for all of these.
    """

    cached: int = 0
    guessed: int = 0
    missed: int = 0
    wasted: int = 0
    bytes: int = 0

    @property
    def rate(self) -> float:
        """The share of the choices that were cached."""
        return self.cached / max(1, self.cached + self.guessed + self.missed)


class Guess(NamedTuple):
    """What a layer's router says of its input before the layer computes.

    Args:
      load: how often it would choose each expert.
      scores: its mean probability of each.
    """

    load: Float[Array, " x"]
    scores: Float[Array, " x"]


class ExpertLayers(Layers):
    """A model's parameters of which experts wait outside the device, all but a number of them.

    Everything else of a layer is streamed as by `Layers`. Before a layer computes, its router reads its input and the
    experts that it guesses are loaded; with `MixtureOfExperts.before_attention` the guess is its choice. If the layer
    then chose others, these are loaded and it computes again, so that tokens are those of the whole model.

    Args:
      infos: a `TensorInfo` for each parameter.
      source: the parameters, named by `prefix` and the path in their info.
      capacity: experts on the device, of all layers together; a layer's experts must fit.
      eviction: which expert leaves when another one is loaded.
      guess: whether guessed experts are loaded before a layer computes.
      prefix: of the source's names.

    Raises:
      ConfigError: the model has no experts, or a layer has more than `capacity`.
    """

    def __init__(
        self,
        infos: Tree,
        source: Source,
        capacity: int,
        eviction: Eviction | None = None,
        guess: bool = True,
        prefix: str = "",
    ):
        runs = list(infos["runs"].values())
        self._experts = [_experts_of(run) for run in runs]
        most = max((sum(own.values()) for own in self._experts), default=0)
        if not most:
            raise ConfigError("this model has no experts, so that none can be cached; stream whole layers (Layers)")
        check_whole("capacity", capacity)
        if capacity < most:
            raise ConfigError(f"capacity = {capacity} experts: a layer may need all of its {most}; set at least {most}")
        self.capacity, self.eviction, self.guess = capacity, eviction or LeastRecent(), guess
        self.hits = Hits()
        self._cache: collections.OrderedDict[Key, dict[str, Array]] = collections.OrderedDict()
        self._seen: dict[Layer, tuple[set[int], set[int], np.ndarray]] = {}
        super().__init__(infos, source, None, prefix)
        blocks = [run["blocks"][key] for run, own in zip(runs, self._experts, strict=True) for key in own]
        self._one = max(
            sum(i.nbytes // (i.shape[0] * i.shape[1]) for i in jax.tree.leaves(block) if self.elsewhere(i))
            for block in blocks
        )
        self._copy = self._one * most
        of_layers = [sum(i.nbytes // i.shape[0] for i in jax.tree.leaves(r) if not self.elsewhere(i)) for r in runs]
        self.largest = 2 * max(of_layers)

    @property
    def resident(self) -> Resident:
        """Bytes of parameters on the devices; at most two layers without experts, the cache, and a layer's experts."""
        base = super().resident
        return base._replace(peak=base.peak + self._copy, bound=base.bound + self.capacity * self._one + self._copy)

    def elsewhere(self, info: TensorInfo) -> bool:
        """See `Layers`: experts are."""
        return "experts" in info.axes and info.path.startswith("runs/")

    def expect(self, run: int, repeat: int, guesses: dict[Any, Guess]) -> None:
        """Load the experts that the routers guess.

        Args:
          run: the run of blocks.
          repeat: the repeat of its group.
          guesses: of each block with experts.
        """
        self._seen = {}
        for key, guess in guesses.items():
            layer = (run, repeat, key)
            likely = set(np.flatnonzero(np.asarray(guess.load)).tolist()) if self.guess else set()
            cached = {e for e in range(self._experts[run][key]) if (layer, e) in self._cache}
            self._seen[layer] = (cached, likely - cached, np.asarray(guess.scores, np.float64))
            self._fetch(layer, likely - cached)

    def with_experts(self, params: Tree, run: int, repeat: int) -> Tree:
        """Return a layer's parameters with the experts that are on the device, and zeros for the others.

        Args:
          params: of the layer, from `each`.
          run: the run of blocks.
          repeat: the repeat of its group.
        """
        blocks = dict(params["blocks"])
        for key, count in self._experts[run].items():
            layer = (run, repeat, key)

            def stacked(path: tuple[Any, ...], x: Any, layer: Layer = layer, count: int = count) -> Any:
                if not isinstance(x, TensorInfo):
                    return x
                zeros, name = jnp.zeros(x.shape[2:], x.dtype), path_name(path)
                own = [self._cache.get((layer, e), {}).get(name, zeros) for e in range(count)]
                return jnp.stack(own)[None]

            blocks[key] = jax.tree_util.tree_map_with_path(stacked, blocks[key])
        return {**params, "blocks": blocks}

    def complete(self, run: int, repeat: int, loads: dict[Any, np.ndarray]) -> bool:
        """Return whether a layer had all experts that it chose; if not, load them.

        Args:
          run: the run of blocks.
          repeat: the repeat of its group.
          loads: how often each expert of each block was chosen.
        """
        missing = {}
        for key, load in loads.items():
            layer = (run, repeat, key)
            chosen = set(np.flatnonzero(load).tolist())
            missing[layer] = {e for e in chosen if (layer, e) not in self._cache}
        for layer, own in missing.items():
            self._fetch(layer, own)
        if any(missing.values()):
            return False
        for key, load in loads.items():
            layer = (run, repeat, key)
            cached, guessed, scores = self._seen[layer]
            chosen = set(np.flatnonzero(load).tolist())
            self.hits.cached += len(chosen & cached)
            self.hits.guessed += len(chosen & guessed)
            self.hits.missed += len(chosen - cached - guessed)
            self.hits.wasted += len(guessed - chosen)
            self.eviction.saw(layer, np.flatnonzero(load), scores)
        return True

    def close(self) -> None:
        """See `Layers`; also delete the cached experts."""
        for arrays in self._cache.values():
            self._delete(arrays)
        self._cache.clear()
        super().close()

    def _fetch(self, layer: Layer, experts: set[int]) -> None:
        """Load experts in place of the least worth ones of other repeats."""
        run, repeat, key = layer
        block = list(self.infos["runs"].values())[run]["blocks"][key]
        for expert in sorted(experts):
            while len(self._cache) >= self.capacity:
                leaves = min((k for k in self._cache if k[0][:2] != (run, repeat)), key=self.eviction.worth)
                self._delete(self._cache.pop(leaves))
            arrays = {}
            for path, info in jax.tree_util.tree_leaves_with_path(block):
                if self.elsewhere(info):
                    arrays[path_name(path)] = self.put(self._read(info, repeat, expert)[0, 0])
            self.hits.bytes += sum(x.nbytes for x in arrays.values())
            self._cache[layer, expert] = arrays


def guesses_of(model: Any, run: int, x: Float[Array, "b s e"], step: Packed) -> dict[int, Guess]:
    """Return what the routers of a layer say of its input, by the place of the block in its group.

    Args:
      model: a model whose run has one repeat's parameters, without experts.
      run: the run of blocks.
      x: the input of the layer.
      step: whose tokens they are.
    """
    guesses, real = {}, step.slots >= 0
    for n, block in enumerate(model.runs[run].blocks):
        mlp = block.mlp
        if not hasattr(mlp, "router"):
            continue
        c, one = mlp.config, jax.tree.map(lambda a: a if isinstance(a, TensorInfo) else a[0], block)
        early = c.before_attention or one.mlp_norm is None
        scores = one.mlp.scores(x if early else one.mlp_norm(x))
        bias = None if one.mlp.load_bias is None else one.mlp.load_bias.get_value()
        routed = c.router(scores, bias, top_k=c.top_k, capacity=None, real=real)
        load = jnp.sum(jax.nn.one_hot(routed.ids, c.experts), axis=(0, 1, 2))
        mean = jnp.sum(jnp.where(real[..., None], c.router.probabilities(scores), 0.0), axis=(0, 1))
        guesses[n] = Guess(load, mean / jnp.maximum(jnp.sum(real), 1))
    return guesses


def _experts_of(run: Tree) -> dict[Any, int]:
    """Return how many experts each block of a run's group has, by its key; blocks without are left out."""
    return {
        key: block["mlp"]["router"].shape[-1]
        for key, block in run["blocks"].items()
        if isinstance(block.get("mlp"), dict) and "router" in block["mlp"]
    }
