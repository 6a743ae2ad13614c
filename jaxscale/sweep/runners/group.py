"""A group of runs that share one compiled program each for initial states, steps and evaluations, by `vmap`.

Each run (a member of the group) is an ordinary `fit` in a thread of its own, with its own folder, data, guards and
checkpoints. Only its compiled step is replaced, by its part of a step of all members.
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
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.prepare import Prepared, prepare
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.sweep.runners.turns import Broken, Turns

log = logging.getLogger("jaxscale")

Tree = Any

PER_MEMBER: Mapping[str, tuple[str, ...]] = {
    "": ("clip_norm",),
    "objective": ("z_loss",),
    "optimizer": ("weight_decay",),
}
"""Numbers that may differ between members besides the seed, the learning rate and its schedule, by the part that has
them. If they differ, the program selects them by the member's number instead of compiling them in as constants."""


class RunGroup:
    """The runs of one group.

    Args:
      configs: the members' settings; equal except for seeds, learning rates, schedules and `PER_MEMBER`.
      turns: synchronises their threads.
    """

    def __init__(self, configs: Sequence[TrainConfig], turns: Turns):
        self.configs, self.turns = configs, turns
        self.versions = [0] * len(configs)  # how often each member's state in the stack was replaced
        self._stack: TrainState | None = None
        if any(c.histograms is not None and c.trackers for c in configs):
            log.warning("train.histograms has no effect on trials that are trained together; use another sweep.runner")

    def fit(self, member: int, config: TrainConfig, **options: Any) -> Run:
        """Train one member as `jaxscale.fit` does; alone if the group cannot be trained together.

        Args:
          member: the member's number.
          config: its settings.
          **options: further arguments of `jaxscale.fit`.
        """
        config = dataclasses.replace(config, layout=self.configs[0].layout)  # equal, but already placed on devices
        try:
            return fit(config, prepare=functools.partial(self._prepare, member), **options)
        except Broken as e:
            log.warning("%s: trains alone, since training it together with others failed: %s", options.get("run"), e)
            return fit(config, **options)

    def _prepare(self, member: int, config: TrainConfig) -> Prepared:
        first = self._first
        blueprint, schedule = blueprint_of(config)
        blueprint = _MemberBlueprint(**_fields(blueprint), group=self, member=member)
        loader = dataclasses.replace(first.loader, batch_size=config.batch_size, seed=config.seed)
        own = dataclasses.replace(first, blueprint=blueprint, schedule=schedule, loader=loader)
        return _MemberPrepared(**_fields(own), group=self, member=member)

    @functools.cached_property
    def _first(self) -> Prepared:
        """The first member, prepared; the others share its parts."""
        if why := getattr(self.configs[0].optimizer, "why_no_vmap", None):
            raise Broken(why)
        if self.configs[0].start is not None:
            raise Broken("runs that start from another run's parameters cannot be grouped")
        try:
            prepared = prepare(self.configs[0])
        except JaxscaleError as e:  # the error may be this member's alone, so each is tried by itself
            raise Broken(str(e)) from e
        if prepared.by_degree is not None:
            raise Broken("steps with train.batching have several programs each")
        if any(s.memory_kind == HOST for s in jax.tree.leaves(prepared.blueprint.shardings())):
            raise Broken("state in host memory cannot be stacked")
        return prepared

    # --- batched calls of all members ---------------------------------------------------------------------------------

    def init(self, calls: Mapping[int, None]) -> dict[int, TrainState]:
        """Return initial states.

        Args:
          calls: the members that call; values are unused.
        """
        with self._layout():
            fresh = self._programs.init()
            if self._stack is None:
                self._stack = fresh  # a member that continues from a checkpoint replaces its state later
            else:
                for member in calls:
                    self._put(self._programs.take(fresh, member), member)
        return {member: self._view(member) for member in calls}

    def step(self, calls: Mapping[int, tuple[TrainState, Tree]]) -> dict[int, tuple[TrainState, Tree]]:
        """Take a step of all members, each with its own state and batch.

        Members that do not call step on another's batch, and put their own state back at their next call.

        Args:
          calls: the state and batch of each member that calls.

        Returns:
          their new states and metrics.
        """
        with self._layout():
            if self._stack is None:
                self._stack = self._programs.init()
            for member, (state, _) in calls.items():
                if not (isinstance(state, _MemberState) and state.version == self.versions[member]):
                    self._put(state, member)
            any_batch = next(batch for _, batch in calls.values())
            batches = tuple(calls[i][1] if i in calls else any_batch for i in range(len(self.configs)))
            self._stack, metrics = self._programs.step(self._stack, batches)
        self.versions = [version + 1 for version in self.versions]
        return {member: (self._view(member), metrics[member]) for member in calls}

    def evaluate(self, calls: Mapping[int, tuple[Tree, Tree]]) -> dict[int, tuple[jax.Array, jax.Array]]:
        """Evaluate each member's parameters on its own batch.

        Args:
          calls: the parameters and batch of each member that calls.
        """
        some = next(iter(calls.values()))
        params, batches = zip(*(calls.get(i, some) for i in range(len(self.configs))), strict=True)
        with self._layout():
            sums = self._programs.evaluate(params, batches)
        return {member: sums[member] for member in calls}

    def take(self, member: int, version: int) -> TrainState:
        """Return a copy of a member's state.

        Args:
          member: the member's number.
          version: the version that the caller refers to.

        Raises:
          RuntimeError: the state was replaced by a later version.
        """
        if self._stack is None or version != self.versions[member]:
            raise RuntimeError(f"version {version} of state {member} was replaced by version {self.versions[member]}")
        with self._layout():
            return self._programs.take(self._stack, member)

    def _put(self, state: TrainState, member: int) -> None:
        state = TrainState(*(getattr(state, name) for name in _NAMES))
        self._stack = self._programs.put(self._stack, state, member)
        self.versions[member] += 1

    def _view(self, member: int) -> TrainState:
        return _MemberState(self, member, self.versions[member])

    def _layout(self) -> contextlib.AbstractContextManager[Any]:
        # the thread that runs a batched call may have left its own run's layout already
        return self.configs[0].layout or contextlib.nullcontext()

    @functools.cached_property
    def _programs(self) -> _Programs:
        return _Programs(self.configs, self._first)


class _Programs:
    """The compiled programs. States are stacked along a new first axis, which is not sharded."""

    def __init__(self, configs: Sequence[TrainConfig], first: Prepared):
        count, blueprint = len(configs), first.blueprint
        seeds = np.asarray([c.seed for c in configs], np.uint32)
        alone: Any = blueprint.shardings()
        stack = jax.tree.map(_stacked, alone)
        whole = None if blueprint.layout is None else blueprint.layout.replicated
        batch = first.batch_shardings()

        def init(member: jax.Array, seed: jax.Array) -> TrainState:
            return blueprint_of(_select(configs, member))[0].make(seed)

        def step(member: jax.Array, state: TrainState, batch: Tree) -> tuple[TrainState, Tree]:
            config = _select(configs, member)
            own, schedule = blueprint_of(config)
            run = dataclasses.replace(first, blueprint=own, schedule=schedule)
            return run.plain_step(config)(state, batch)

        def steps(stack: TrainState, batches: tuple[Tree, ...]) -> tuple[TrainState, Tree]:
            stack, metrics = jax.vmap(step)(jnp.arange(count), stack, _stack(batches))
            return stack, _unstack(metrics, count)

        def evaluated(member: jax.Array, params: Tree, batch: Tree) -> Tree:
            return first.eval_of(_select(configs, member))(params, batch)

        def evaluate(params: tuple[Tree, ...], batches: tuple[Tree, ...]) -> tuple[Tree, ...]:
            sums = jax.vmap(evaluated)(jnp.arange(count), _stack(params), _stack(batches))
            return _unstack(sums, count)

        def inits() -> TrainState:
            return jax.vmap(init)(jnp.arange(count), jnp.asarray(seeds))

        def take(stack: TrainState, member: jax.Array) -> TrainState:
            return jax.tree.map(lambda x: x[member], stack)

        def put(stack: TrainState, state: TrainState, member: jax.Array) -> TrainState:
            return jax.tree.map(lambda x, y: x.at[member].set(y), stack, state)

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
class _MemberBlueprint(Blueprint):
    """A blueprint whose initial state is made together with the other members'."""

    group: Any = None
    member: int = 0

    def init(self, seed: int) -> TrainState:
        return self.group.turns.ask(self.member, self.group.init, None)


@dataclasses.dataclass(frozen=True)
class _MemberPrepared(Prepared):
    """A run whose steps and evaluations are batched with the other members'."""

    group: Any = None
    member: int = 0

    @property
    def staged(self) -> Blueprint:
        """The run's own blueprint: the group's steps take states in the order of layers."""
        return self.blueprint

    def step_of(self, config: TrainConfig) -> Callable[..., Any]:
        return lambda state, batch: self.group.turns.ask(self.member, self.group.step, (state, batch))

    def eval_of(self, config: TrainConfig) -> Callable[..., Any]:
        return lambda params, batch: self.group.turns.ask(self.member, self.group.evaluate, (params, batch))


class _MemberState(TrainState):
    """A member's state, left in the stack until an array of it is read; then copied out."""

    def __init__(self, group: RunGroup, member: int, version: int):
        vars(self).update(group=group, member=member, version=version)

    @functools.cached_property
    def whole(self) -> TrainState:
        """The member's state, copied out of the stack."""
        return self.group.take(self.member, self.version)

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return getattr(self.whole, name)
        raise AttributeError(name)


_NAMES = tuple(f.name for f in dataclasses.fields(TrainState))

register_pytree_with_keys(
    _MemberState,
    lambda state: (tuple((GetAttrKey(name), getattr(state, name)) for name in _NAMES), None),
    lambda _, parts: TrainState(*parts),  # type: ignore[arg-type,return-value]  # becomes an ordinary state
)


def _select(configs: Sequence[TrainConfig], member: jax.Array) -> TrainConfig:
    """The settings of a traced member. `copy` skips the checks of ranges, which each config has passed already.

    Args:
      configs: the members' settings.
      member: the member's number, an int32 scalar.
    """
    out = copy.copy(configs[0])
    vars(out)["schedule"] = _Rate(configs, member)
    for part, names in PER_MEMBER.items():
        owners = [getattr(c, part) if part else c for c in configs]
        values = {n: [getattr(o, n) for o in owners] for n in names if hasattr(owners[0], n)}
        changed = {n: _choose(v, member) for n, v in values.items() if len(set(v)) > 1}
        if part and changed:
            vars(out)[part] = copy.copy(owners[0])
        vars(getattr(out, part) if part else out).update(changed)
    return out


@dataclasses.dataclass(frozen=True)
class _Rate:
    """The learning-rate schedule of a traced member, selected from those of all members."""

    configs: Sequence[TrainConfig]
    member: jax.Array

    def make(self, peak: float, steps: int) -> Schedule:
        own = [(c.schedule, c.lr) for c in self.configs]
        made = {each: each[0].make(each[1], steps) for each in own}

        def rate(count: int | jax.Array) -> jax.Array:
            rates = {each: schedule(count) for each, schedule in made.items()}
            return _choose([rates[each] for each in own] if len(rates) > 1 else list(rates.values()), self.member)

        return rate


def _choose(values: Sequence[Any], member: jax.Array) -> Any:
    """The value of a member. Unlike an index into an array, `where` keeps Python numbers weakly typed."""
    chosen = values[0]
    for i, value in enumerate(values[1:], 1):
        chosen = jnp.where(member == i, value, chosen)
    return chosen


def _stacked(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)


def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _unstack(tree: Tree, count: int) -> tuple[Tree, ...]:
    return tuple(jax.tree.map(lambda x: x[i], tree) for i in range(count))  # noqa: B023


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
