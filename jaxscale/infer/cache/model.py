"""The cache of a whole model: the state of each of its layers, its size in bytes, and how the model is given it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.errors import ConfigError
from jaxscale.infer.stages import micro_batches, stages_of, state_count
from jaxscale.layout import Layout, constrain, current
from jaxscale.layout.tensors import Tree
from jaxscale.models import Decodable
from jaxscale.nn import Cache, DecodeState, Packed, Run, RunCache
from jaxscale.parallel.pipeline import Stages

ModelCache = tuple[tuple[Any, ...], ...]
"""A state for each block of each run of blocks."""


def describe_cache(model: object) -> tuple[tuple[tuple[DecodeState, int], ...], ...]:
    """Return what the layers keep between tokens: for each run of blocks, for each block, its state and its repeats.

    Args:
      model: a language model.

    Raises:
      ConfigError: the model, or one of its layers, cannot decode with a cache.
    """
    return tuple(tuple(run.decode_states()) for run in decodable(model).runs)


def decodable(model: object) -> Decodable:
    """Return the model if it can decode with a cache.

    Args:
      model: a model.

    Raises:
      ConfigError: it cannot.
    """
    if not isinstance(model, Decodable):
        raise ConfigError(
            f"{type(model).__name__} has no KV cache; to give it one, build it from 'runs' of blocks with a "
            "'decode_state', and define 'max_length', 'refuse_length', 'check_independent' and 'hidden_and_stats' "
            "(jaxscale.models.Decodable)"
        )
    return model


def reuses_prefixes(model: object, cache: Cache) -> bool:
    """Return whether sequences that begin alike can share their cached beginning.

    Args:
      model: a language model.
      cache: the kind of KV cache.
    """
    return all(state.reusable(cache) for run in describe_cache(model) for state, _ in run)


def init_cache(
    model: Decodable,
    cache: Cache,
    batch: int,
    slots: int,
    length: int,
    longest: int | None = None,
    *,
    back: int = 0,
    runs: Sequence[Run] | None = None,
) -> ModelCache:
    """Return an empty cache, sharded by the layout in force.

    Args:
      model: a language model; its arrays are not read.
      cache: the kind of KV cache.
      batch: the batch rows of a step.
      slots: sequences of each batch row.
      length: positions of each slot.
      longest: the most tokens that a sequence will have; `length` by default.
      back: how many tokens a sequence may be rolled back (speculative decoding).
      runs: blocks of the model that are not in its `runs`, in their place; not with pipeline stages.

    Raises:
      ConfigError: the model cannot decode with a cache, or not up to this length.
      LayoutError: an array does not divide over its mesh axes.
    """
    states = describe_cache(model) if runs is None else tuple(tuple(run.decode_states()) for run in runs)
    decodable(model).refuse_length(length if longest is None else longest)
    staged = _Staged.of(model, batch)

    def make() -> ModelCache:
        def of(state: DecodeState, layers: int, run: int) -> Tree:
            arrays = state.init(cache, *staged.sizes(layers, batch, run), slots, length, back)
            axes = {name: state.axes(cache, name) for name in arrays} if isinstance(arrays, dict) else {}
            return {name: staged.lay_out(x, axes[name]) for name, x in arrays.items()} if axes else arrays

        return tuple(tuple(of(state, n, i) for state, n in run) for i, run in enumerate(states))

    return jax.jit(make)()


def cache_bytes(model: Decodable, cache: Cache, batch: int, slots: int, length: int, *, back: int = 0) -> int:
    """Return the bytes of `init_cache` with the same arguments, over all devices.

    Args:
      model: a language model; its arrays are not read.
      cache: the kind of KV cache.
      batch: the batch rows of a step.
      slots: sequences of each batch row.
      length: positions of each slot.
      back: how many tokens a sequence may be rolled back.
    """
    staged, total = _Staged.of(model, batch), 0
    for i, run in enumerate(describe_cache(model)):
        for state, layers in run:
            total += state.bytes(cache, *staged.sizes(layers, batch, i), slots, length, back)
    return total


@dataclasses.dataclass(frozen=True)
class _Staged:
    """A cache over pipeline stages: each has the states of its layers, split into the micro-batches of a step."""

    stages: Stages | None
    micro: int

    @classmethod
    def of(cls, model: Decodable, batch: int) -> _Staged:
        layout = current()
        if layout is None or layout.stages == 1:
            return cls(None, 1)
        return cls(stages_of(model.runs, layout), micro_batches(batch, layout))

    def sizes(self, layers: int, batch: int, run: int) -> tuple[int, int]:
        """The first two dimensions of the states of a run of blocks."""
        if self.stages is None:
            return layers, batch
        return state_count(run, self.stages, self.micro), batch // self.micro

    def lay_out(self, x: jax.Array, names: tuple[str | None, ...] | None) -> jax.Array:
        """Constrain an array to the sharding of its logical axes; `None` leaves it to the partitioner."""
        layout = current()
        if names is None:
            return x
        if self.stages is None or layout is None:
            return constrain(x, *names)
        rest = layout.spec(names, x.shape, kind="activations", name="the cache")
        return jax.lax.with_sharding_constraint(x, PartitionSpec("pipeline", *rest[1:]))


def run_caches(cache: Cache, states: ModelCache, step: Packed) -> list[RunCache]:
    """Return the argument `cache` of `Transformer.hidden_and_stats`; the call leaves the new states in it.

    Args:
      cache: the kind of KV cache.
      states: the states of the model's layers.
      step: slot and position of each token.
    """
    return [RunCache(cache, step, run) for run in states]


def generating(layout: Layout | None) -> Layout | None:
    """Return a layout for steps of few tokens: sequence axes shard the cache instead of the step's tokens.

    Args:
      layout: a layout, or `None` for one device.
    """
    if layout is None:
        return None
    layout = dataclasses.replace(layout, pipeline=None)  # first, since `Pipeline.vocabulary` changes rules of training
    return dataclasses.replace(layout, rules=layout.resolved_rules.for_generation(), sequence_sharded=False)
