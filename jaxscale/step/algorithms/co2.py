"""CO2: replicas train apart, and the mean of a round arrives one round later, so that nobody waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim.base import Schedule
from jaxscale.parallel import Float32Wire, Wire
from jaxscale.step.algorithm import NEXT_TOKEN, Metrics, Step, Tree
from jaxscale.step.algorithms.replicas import LocalReplicas, check_counts, is_wire, wide_infos, with_prefix
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.ranges import is_number
from jaxscale.step.rounds import Exchange, Round
from jaxscale.step.state import Blueprint, TrainState


@register
@dataclasses.dataclass(frozen=True)
class CO2(LocalReplicas):
    """CO2 (Sun et al. 2024, arXiv:2401.16265): local steps, and an outer momentum of differences one round old.

    A round is `every` steps, in which each replica trains its own parameters from the shared ones. At its end the
    *previous* round's mean difference d (shared minus replicas' parameters) has arrived: the momentum becomes
    momentum · m + d / penalty, clipped to ±clip for each number, the shared parameters move by -outer_lr · m, and all
    replicas continue from them. This round's differences are sent, to arrive at the end of the next one. So the
    exchange has a round's time, and the first round changes nothing until the second has ended. The step at the end of
    a round exchanges arrays that were known before it.

    The penalty is a constant, as in the authors' published code; 1 is none. Rows, metrics and evaluation are those of
    `LocalSteps`. Each device holds its differences in float32, beside shared parameters and momentum.

    Args:
      replicas: number of replicas.
      every: steps of a round.
      outer_lr: how far shared parameters move along the momentum.
      momentum: decay of the momentum; the authors' example uses 0.2.
      penalty: divides differences, since they are a round old; at least 1.
      clip: largest absolute value of the momentum; `None` does not clip.
      wire: the format of differences between replicas, such as `Float32Wire()` or `IntegerWire()`.

    Raises:
      ConfigError: a field is out of its range.
    """

    every: int = 16
    outer_lr: float = 1.0
    momentum: float = 0.2
    penalty: float = 1.0
    clip: float | None = None
    wire: Wire = Float32Wire()

    def __post_init__(self) -> None:
        check_counts(self, replicas=2, every=1)
        if not (is_number(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"CO2.outer_lr = {self.outer_lr!r}: must be above 0, such as 1.0")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigError(f"CO2.momentum = {self.momentum!r}: must be at least 0 and below 1")
        if not (is_number(self.penalty) and self.penalty >= 1):
            raise ConfigError(f"CO2.penalty = {self.penalty!r}: must be at least 1, which is no penalty")
        if self.clip is not None and not (is_number(self.clip) and self.clip > 0):
            raise ConfigError(f"CO2.clip = {self.clip!r}: must be above 0, or None")
        if not is_wire(self.wire):
            raise ConfigError(f"CO2.wire = {self.wire!r}: must be Float32Wire() or IntegerWire()")

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the stacked infos, and in "extra" shared parameters, momentum, differences and the wire's errors."""
        wide = wide_infos(blueprint)

        def stacked(infos: Tree) -> Tree:
            def of(i: Tree) -> Tree:
                return dataclasses.replace(i, shape=(self.replicas, *i.shape), axes=("replicas", *i.axes))

            return jax.tree.map(of, infos)

        extra = {"outer": with_prefix(wide, "outer"), "momentum": with_prefix(wide, "momentum")}
        extra["sent"] = with_prefix(stacked(wide), "sent")
        extra["wire"] = with_prefix(self.wire.infos(wide, self.replicas, blueprint.layout), "wire")
        return {**super().infos(blueprint), "extra": extra}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return equal initial parameters and states for all replicas, and zeros."""
        zeros = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), self.infos(blueprint)["extra"])
        outer = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return {**super().init(blueprint, params), "extra": {**zeros, "outer": outer}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step that updates each replica by itself, and ends a round every `every` steps."""
        local = self.local_step(blueprint, objective, accumulate=accumulate, schedule=schedule, guards=guards)
        wide = wide_infos(blueprint)

        @jax.named_scope(f"every_{self.every}_updates")
        def receive(extra: dict[str, Tree]) -> dict[str, Tree]:
            with jax.named_scope("average_copies"):
                mean, errors = self.wire.mean(extra["sent"], extra["wire"], wide, blueprint.layout)

            def moved(m: jax.Array, d: jax.Array) -> jax.Array:
                m = self.momentum * m + d / self.penalty
                return m if self.clip is None else jnp.clip(m, -self.clip, self.clip)

            return {**extra, "momentum": jax.tree.map(moved, extra["momentum"], mean), "wire": errors}

        @jax.named_scope(f"every_{self.every}_updates")
        def end(params: Tree, extra: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
            sent = jax.tree.map(lambda o, x: o[None] - x.astype(jnp.float32), extra["outer"], params)
            outer = jax.tree.map(lambda o, m: o - self.outer_lr * m, extra["outer"], extra["momentum"])
            params = jax.tree.map(lambda o, x: jnp.broadcast_to(o, x.shape).astype(x.dtype), outer, params)
            return params, {**extra, "outer": outer, "sent": sent}

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            due = (state.step + 1) % self.every == 0
            extra = jax.lax.cond(due, receive, lambda extra: extra, state.extra)
            state, metrics = local(state, batch)
            params, extra = jax.lax.cond(due, end, lambda *same: same, state.params, extra)
            return state.replace(params=params, extra=extra), metrics

        return step

    def round(self, blueprint: Blueprint) -> Round:
        """Return the exchange, whose result is used a round later."""
        sent = self.wire.sent(blueprint.infos, self.replicas, blueprint.layout)
        return Round(self.every, (Exchange(0, self.every, sent),))
