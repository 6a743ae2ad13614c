"""A whole model's cache: what each of its layers keeps, made, measured and handed to the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import ConfigError
from jaxscale.infer.stages import kept_layers, stages_of, turns
from jaxscale.layout import Layout, constrain, current
from jaxscale.models import Decodable
from jaxscale.nn import Cache, DecodeState, Packed, RunCache
from jaxscale.parallel.pipeline import Stages

ModelCache = tuple[tuple[Any, ...], ...]
"""A state for each block of each run."""


def describe_cache(model: Any) -> tuple[tuple[tuple[DecodeState, int], ...], ...]:
    """What the layers keep: for each run, of each block of its group, and how many copies of it there are.

    Raises:
      ConfigError: a model or a part of it that cannot go on from kept keys.
    """
    return tuple(tuple(run.decode_states()) for run in decodable(model).runs)


def decodable(model: Any) -> Decodable:
    """The model, checked to be able to decode with a cache.

    Raises:
      ConfigError: it cannot.
    """
    if not isinstance(model, Decodable):
        raise ConfigError(
            f"{type(model).__name__} cannot decode with a cache, because it is not jaxscale.models.Decodable (it needs "
            "'runs' of blocks, 'max_length', 'refuse_length', 'check_independent' and 'hidden_and_stats')"
        )
    return model


def reuses_prefixes(model: Any, how: Cache) -> bool:
    """Whether a text may go on from what is kept of another that begins alike."""
    return all(state.reusable(how) for run in describe_cache(model) for state, _ in run)


def init_cache(
    model: Any, how: Cache, lanes: int, rows: int, length: int, longest: int | None = None, *, back: int = 0
) -> ModelCache:
    """An empty cache, laid out by the layout in force.

    Args:
      model: whose; its arrays are not looked at.
      how: the cache.
      lanes, rows: how many, the rows of each lane.
      length: the places of a row.
      longest: the most tokens that a row will have, by default as many.
      back: a row may go on from as many tokens before its last one (speculation).

    Raises:
      ConfigError: a model that cannot go on from kept keys, or not up to such a length.
      LayoutError: it does not divide.
    """
    kept = describe_cache(model)
    decodable(model).refuse_length(length if longest is None else longest)
    staged = _Staged.of(model, lanes)

    def make() -> ModelCache:
        def of(k: DecodeState, n: int, run: int) -> Any:
            state = k.init(how, *staged.sizes(n, lanes, run), rows, length, back)
            axes = {name: k.axes(how, name) for name in state} if isinstance(state, dict) else {}
            return {name: staged.lay_out(x, axes[name]) for name, x in state.items()} if axes else state

        return tuple(tuple(of(k, n, i) for k, n in run) for i, run in enumerate(kept))

    return jax.jit(make)()


def cache_bytes(model: Any, how: Cache, lanes: int, rows: int, length: int, *, back: int = 0) -> int:
    """What `init_cache` of the same arguments takes, over all devices."""
    staged = _Staged.of(model, lanes)
    of = lambda k, n, run: k.bytes(how, *staged.sizes(n, lanes, run), rows, length, back)  # noqa: E731
    return sum(of(k, n, i) for i, run in enumerate(describe_cache(model)) for k, n in run)


@dataclasses.dataclass(frozen=True)
class _Staged:
    """How pipeline stages have a cache: layers on theirs, each with a part for every micro-batch of lanes."""

    stages: Stages | None
    turns: int

    @classmethod
    def of(cls, model: Any, lanes: int) -> _Staged:
        layout = current()
        if layout is None or layout.stages == 1:
            return cls(None, 1)
        return cls(stages_of(model.runs, layout), turns(lanes, layout))

    def sizes(self, layers: int, lanes: int, run: int) -> tuple[int, int]:
        """The layers and lanes of a run's states."""
        if self.stages is None:
            return layers, lanes
        return kept_layers(run, self.stages, self.turns), lanes // self.turns

    def lay_out(self, x: jax.Array, names: tuple[str | None, ...] | None) -> jax.Array:
        """A state where it lives, if that is known."""
        layout = current()
        if names is None:
            return x
        if self.stages is None or layout is None:
            return constrain(x, *names)
        rest = layout.spec(names, x.shape, kind="activations", name="the cache")
        return jax.lax.with_sharding_constraint(x, PartitionSpec("pipeline", *rest[1:]))


def run_caches(how: Cache, states: ModelCache, step: Packed) -> list[RunCache]:
    """As `Transformer.hidden_and_stats` takes it; afterwards each has its new `states`."""
    return [RunCache(how, step, run) for run in states]


def generating(layout: Layout | None) -> Layout | None:
    """The same layout for steps of few tokens: what is cut along the sequence is the cache, not the step."""
    if layout is None:
        return None
    rules = layout.resolved_rules.for_generation()
    return dataclasses.replace(layout, rules=rules, sequence_sharded=False, pipeline=None)
