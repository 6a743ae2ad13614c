"""Several runs whose first states, steps and evaluations are each one compiled program, by `vmap`.

Each is an ordinary `fit` in a thread of its own, with its own folder, data, guards and checkpoints; what it takes for
the compiled step is a lane of a step over all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from jaxscale.errors import JaxscaleError
from jaxscale.layout import HOST
from jaxscale.optim.base import Schedule
from jaxscale.run import Run, fit
from jaxscale.step import TrainConfig
from jaxscale.step.prepare import Prepared, blueprint_of, prepare
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.sweep.runners.turns import Broken, Turns

log = logging.getLogger("jaxscale")

Tree = Any

LOOKED_UP: Mapping[str, tuple[str, ...]] = {
    "": ("clip_norm",),
    "objective": ("z_loss",),
    "optimizer": ("weight_decay",),
}
"""Numbers that may differ between lanes besides the seed, the learning rate and its schedule, by the part they are of.
Where they do, they are constants of the program no longer, and looked up by the number of the lane."""


class Lanes:
    """The runs of one group.

    Args:
      configs: by lane; alike but for seeds, learning rates, schedules and `LOOKED_UP`.
      turns: of their threads.
    """

    def __init__(self, configs: Sequence[TrainConfig], turns: Turns):
        self.configs, self.turns = configs, turns
        self.versions = [0] * len(configs)  # how often what the stack holds of a lane was replaced
        self._stack: TrainState | None = None

    def fit(self, lane: int, config: TrainConfig, **how: Any) -> Run:
        """`jaxscale.fit` of one of the runs, in its turn; alone where they cannot go together."""
        config = dataclasses.replace(config, layout=self.configs[0].layout)  # equal, and its devices are known
        try:
            return fit(config, prepare=functools.partial(self._prepare, lane), **how)
        except Broken as e:
            log.warning("%s: goes on alone, since training it together with others failed: %s", how.get("run"), e)
            return fit(config, **how)

    def _prepare(self, lane: int, config: TrainConfig) -> Prepared:
        first = self._first
        blueprint, schedule = blueprint_of(config)
        blueprint = _LaneBlueprint(**_fields(blueprint), lanes=self, lane=lane)
        loader = dataclasses.replace(first.loader, batch_size=config.batch_size, seed=config.seed)
        own = dataclasses.replace(first, blueprint=blueprint, schedule=schedule, loader=loader)
        return _LanePrepared(**_fields(own), lanes=self, lane=lane)

    @functools.cached_property
    def _first(self) -> Prepared:
        """What the runs have in common is prepared once."""
        if why := getattr(self.configs[0].optimizer, "why_no_vmap", None):
            raise Broken(why)
        if self.configs[0].start is not None:
            raise Broken("parameters of another run are read for each run by itself")
        try:
            prepared = prepare(self.configs[0])
        except JaxscaleError as e:  # perhaps this one's alone
            raise Broken(str(e)) from e
        if any(s.memory_kind == HOST for s in jax.tree.leaves(prepared.blueprint.shardings())):
            raise Broken("state in host memory cannot be stacked")
        return prepared

    # --- what is done for all of them at once -------------------------------------------------------------------------

    def init(self, asked: Mapping[int, None]) -> dict[int, TrainState]:
        """First states."""
        with self._in_force():
            fresh = self._programs.init()
            if self._stack is None:
                self._stack = fresh  # a lane that goes on from a checkpoint puts its own there
            else:
                for lane in asked:
                    self._put(self._programs.take(fresh, lane), lane)
        return {lane: self._look(lane) for lane in asked}

    def step(self, asked: Mapping[int, tuple[TrainState, Tree]]) -> dict[int, tuple[TrainState, Tree]]:
        """Steps, each on its own state and batch.

        Lanes that did not ask step on somebody's batch, and put their own state back when they ask again.
        """
        with self._in_force():
            if self._stack is None:
                self._stack = self._programs.init()
            for lane, (state, _) in asked.items():
                if not (isinstance(state, _LaneState) and state.version == self.versions[lane]):
                    self._put(state, lane)
            any_batch = next(batch for _, batch in asked.values())
            batches = tuple(asked[i][1] if i in asked else any_batch for i in range(len(self.configs)))
            self._stack, metrics = self._programs.step(self._stack, batches)
        self.versions = [version + 1 for version in self.versions]
        return {lane: (self._look(lane), metrics[lane]) for lane in asked}

    def evaluate(self, asked: Mapping[int, tuple[Tree, Tree]]) -> dict[int, tuple[jax.Array, jax.Array]]:
        """Evaluations, each of its own parameters on its own batch."""
        some = next(iter(asked.values()))
        params, batches = zip(*(asked.get(i, some) for i in range(len(self.configs))), strict=True)
        with self._in_force():
            sums = self._programs.evaluate(params, batches)
        return {lane: sums[lane] for lane in asked}

    def take(self, lane: int, version: int) -> TrainState:
        """The state of a lane, as an ordinary run has it."""
        if self._stack is None or version != self.versions[lane]:
            raise RuntimeError(f"the state {version} of lane {lane} is no more; it is at {self.versions[lane]}")
        with self._in_force():
            return self._programs.take(self._stack, lane)

    def _put(self, state: TrainState, lane: int) -> None:
        state = TrainState(*(getattr(state, name) for name in _NAMES))
        self._stack = self._programs.put(self._stack, state, lane)
        self.versions[lane] += 1

    def _look(self, lane: int) -> TrainState:
        return _LaneState(self, lane, self.versions[lane])

    def _in_force(self) -> Any:
        # whoever happens to answer may have left its own run's layout already
        return self.configs[0].layout or contextlib.nullcontext()

    @functools.cached_property
    def _programs(self) -> _Programs:
        return _Programs(self.configs, self._first)


class _Programs:
    """What is compiled, once each. States are stacked along a new first axis, which no mesh axis cuts."""

    def __init__(self, configs: Sequence[TrainConfig], first: Prepared):
        count, blueprint = len(configs), first.blueprint
        seeds = np.asarray([c.seed for c in configs], np.uint32)
        alone: Any = blueprint.shardings()
        stack = jax.tree.map(_stacked, alone)
        whole = None if blueprint.layout is None else blueprint.layout.replicated
        batch = first.batch_shardings()

        def init(lane: jax.Array, seed: jax.Array) -> TrainState:
            return blueprint_of(_looked_up(configs, lane))[0].make(seed)

        def step(lane: jax.Array, state: TrainState, batch: Tree) -> tuple[TrainState, Tree]:
            config = _looked_up(configs, lane)
            own, schedule = blueprint_of(config)
            run = dataclasses.replace(first, blueprint=own, schedule=schedule)
            return run.plain_step(config)(state, batch)

        def steps(stack: TrainState, batches: tuple[Tree, ...]) -> tuple[TrainState, Tree]:
            stack, metrics = jax.vmap(step)(jnp.arange(count), stack, _stack(batches))
            return stack, _unstack(metrics, count)

        def evaluated(lane: jax.Array, params: Tree, batch: Tree) -> Tree:
            return first.eval_of(_looked_up(configs, lane))(params, batch)

        def evaluate(params: tuple[Tree, ...], batches: tuple[Tree, ...]) -> tuple[Tree, ...]:
            sums = jax.vmap(evaluated)(jnp.arange(count), _stack(params), _stack(batches))
            return _unstack(sums, count)

        inits = lambda: jax.vmap(init)(jnp.arange(count), jnp.asarray(seeds))  # noqa: E731
        take = lambda stack, lane: jax.tree.map(lambda x: x[lane], stack)  # noqa: E731
        put = lambda stack, state, lane: jax.tree.map(lambda x, y: x.at[lane].set(y), stack, state)  # noqa: E731
        if whole is None:
            self.init, self.take = jax.jit(inits), jax.jit(take)
            self.put, self.step = jax.jit(put, donate_argnums=0), jax.jit(steps, donate_argnums=0)
            self.evaluate = jax.jit(evaluate)
            return
        self.init = jax.jit(inits, out_shardings=stack)
        self.take = jax.jit(take, in_shardings=(stack, whole), out_shardings=alone)
        self.put = jax.jit(put, donate_argnums=0, in_shardings=(stack, alone, whole), out_shardings=stack)
        self.step = jax.jit(
            steps, donate_argnums=0, in_shardings=(stack, (batch,) * count), out_shardings=(stack, whole)
        )
        self.evaluate = jax.jit(
            evaluate, in_shardings=((alone.params,) * count, (batch,) * count), out_shardings=whole
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _LaneBlueprint(Blueprint):
    """A blueprint whose first state is made together with the other lanes'."""

    lanes: Any = None
    lane: int = 0

    def init(self, seed: int) -> TrainState:
        return self.lanes.turns.ask(self.lane, self.lanes.init, None)


@dataclasses.dataclass(frozen=True)
class _LanePrepared(Prepared):
    """A run whose step and evaluation are lanes of those of all."""

    lanes: Any = None
    lane: int = 0

    def step_of(self, config: TrainConfig) -> Callable[..., Any]:
        return lambda state, batch: self.lanes.turns.ask(self.lane, self.lanes.step, (state, batch))

    def eval_of(self, config: TrainConfig) -> Callable[..., Any]:
        return lambda params, batch: self.lanes.turns.ask(self.lane, self.lanes.evaluate, (params, batch))


class _LaneState(TrainState):
    """The state of a lane, left in the stack until something looks at it; then it has a copy of its own."""

    def __init__(self, lanes: Lanes, lane: int, version: int):
        vars(self).update(lanes=lanes, lane=lane, version=version)

    @functools.cached_property
    def whole(self) -> TrainState:
        """The arrays."""
        return self.lanes.take(self.lane, self.version)

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return getattr(self.whole, name)
        raise AttributeError(name)


_NAMES = tuple(f.name for f in dataclasses.fields(TrainState))

register_pytree_with_keys(
    _LaneState,
    lambda state: (tuple((GetAttrKey(name), getattr(state, name)) for name in _NAMES), None),
    lambda _, parts: TrainState(*parts),  # type: ignore[arg-type,return-value]  # nothing of a lane any more
)


def _looked_up(configs: Sequence[TrainConfig], lane: jax.Array) -> TrainConfig:
    """The settings of a traced lane. They are not asked again whether they are in range: each was, in its own config.

    Args:
      configs: by lane.
      lane: its number, an int32 scalar.
    """
    out = copy.copy(configs[0])
    vars(out)["schedule"] = _Rate(configs, lane)
    for part, names in LOOKED_UP.items():
        owners = [getattr(c, part) if part else c for c in configs]
        values = {n: [getattr(o, n) for o in owners] for n in names if hasattr(owners[0], n)}
        changed = {n: _choose(v, lane) for n, v in values.items() if len(set(v)) > 1}
        if part and changed:
            vars(out)[part] = copy.copy(owners[0])
        vars(getattr(out, part) if part else out).update(changed)
    return out


@dataclasses.dataclass(frozen=True)
class _Rate:
    """The schedules of all lanes, of which it follows that of one."""

    configs: Sequence[TrainConfig]
    lane: Any

    def make(self, peak: float, steps: int) -> Schedule:
        own = [(c.schedule, c.lr) for c in self.configs]
        made = {each: each[0].make(each[1], steps) for each in own}

        def rate(count: int | jax.Array) -> jax.Array:
            rates = {each: schedule(count) for each, schedule in made.items()}
            return _choose([rates[each] for each in own] if len(rates) > 1 else list(rates.values()), self.lane)

        return rate


def _choose(values: Sequence[Any], lane: Any) -> Any:
    """The value of a lane. Unlike an index into an array, it leaves a Python number's dtype to what it meets."""
    found = values[0]
    for i, value in enumerate(values[1:], 1):
        found = jnp.where(lane == i, value, found)
    return found


def _stacked(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)


def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _unstack(tree: Tree, count: int) -> tuple[Tree, ...]:
    return tuple(jax.tree.map(lambda x: x[i], tree) for i in range(count))  # noqa: B023


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
