"""A whole model's cache: what each of its layers keeps, made, measured and handed to the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import ConfigError
from jaxscale.infer.stages import kept_layers, stages_of, turns
from jaxscale.layout import Layout, constrain, current
from jaxscale.nn import Attention, Cache, Kept, Packed, Run, RunCache
from jaxscale.parallel.pipeline import Stages

ModelCache = tuple[tuple[Any, ...], ...]
"""A state for each block of each run."""


def describe_cache(model: Any) -> tuple[tuple[tuple[Kept, int], ...], ...]:
    """What the layers keep: for each run, of each block of its group, and how many copies of it there are.

    Raises:
      ConfigError: a model or a part of it that cannot go on from kept keys.
    """
    runs = getattr(model, "runs", None)
    if runs is None:
        raise ConfigError(f"{type(model).__name__} has no runs of layers, so that nothing can be kept between tokens")
    for run in runs:
        if type(run).__call__ is not Run.__call__:
            raise ConfigError(
                f"{type(run).__name__} cannot go on from kept keys; generate with Transformer.stack = @Run"
            )
    return tuple(tuple((_kept(block.attn), run.repeats) for block in run.blocks) for run in runs)


def _kept(attention: Attention) -> Kept:
    kept = getattr(attention, "kept", None)
    if kept is None:
        raise ConfigError(f"{type(attention).__name__} does not say what it keeps of a token (its `kept`)")
    return kept


def init_cache(model: Any, how: Cache, lanes: int, rows: int, length: int, longest: int | None = None) -> ModelCache:
    """An empty cache, laid out by the layout in force.

    Args:
      model: whose; its arrays are not looked at.
      how: the cache.
      lanes, rows: how many, the rows of each lane.
      length: the places of a row.
      longest: the most tokens that a row will have, by default as many.

    Raises:
      ConfigError: a model that cannot go on from kept keys, or not up to such a length.
      LayoutError: it does not divide.
    """
    kept = describe_cache(model)
    if hasattr(model, "refuse_length"):
        model.refuse_length(length if longest is None else longest)
    axes = getattr(how, "axes", None)

    staged = _Staged.of(model, lanes)

    def make() -> ModelCache:
        of = lambda k, n, run: how.init(k, *staged.sizes(n, lanes, run), rows, length)  # noqa: E731
        states = tuple(tuple(of(k, n, i) for k, n in run) for i, run in enumerate(kept))
        return states if axes is None else jax.tree.map(lambda x: staged.lay_out(x, _names(axes, x)), states)

    return jax.jit(make)()


def _names(axes: tuple[str | None, ...], x: jax.Array) -> tuple[str | None, ...]:
    """One key head is everybody's."""
    return tuple(None if a == "kv_heads" and x.shape[-2] == 1 else a for a in axes)


def cache_bytes(model: Any, how: Cache, lanes: int, rows: int, length: int) -> int:
    """What `init_cache` of the same arguments takes, over all devices."""
    staged = _Staged.of(model, lanes)
    of = lambda k, n, run: how.bytes(k, *staged.sizes(n, lanes, run), rows, length)  # noqa: E731
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

    def lay_out(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        """A state where it lives."""
        layout = current()
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
