"""DiLoCo between processes, each with devices of its own, that may join and leave while the others train."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.optim import SGD, apply_gradients, averages, state_infos
from jaxscale.optim.base import Optimizer, Schedule
from jaxscale.parallel import Float32Wire, Wire
from jaxscale.peers.coordinator import MOST
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Step, Tree
from jaxscale.step.algorithms.replicas import check_counts, is_wire, on_host, wide_infos, with_prefix
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.guards import Guard
from jaxscale.step.meeting import Meeting
from jaxscale.step.objective import Objective
from jaxscale.step.ranges import is_number
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

WIDE = jnp.dtype("float32")


@register
@dataclasses.dataclass(frozen=True)
class PeerDiLoCo(Algorithm):
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105) between processes that join and leave (as in PCCL, 2505.14065).

    Each process is a run of its own, on a layout of its own. Every `every` steps all that are there exchange their
    outer gradients over TCP, and the outer optimizer updates the shared parameters in the same way in each, to the bit.
    A process that is lost is left out, and the others repeat the mean. One that joins gets shared parameters and outer
    state from another, and begins at that step with an optimizer state of its own.

    `shares` processes with `batch_size` rows are `DiLoCo(replicas=shares)` with `shares * batch_size` rows: of these,
    process p reads the p-th share. With fewer processes the rows of the missing ones are not read. Evaluation, sampling
    and export use a process's own parameters, which are the shared ones after an exchange, such as at the last step.

    Args:
      coordinator: its address, "HOST:PORT"; `jaxscale peers` starts one, and `jaxscale train --peers` sets this.
      shares: the most processes at a time, at most 512.
      every: steps between exchanges; divides `train.steps`.
      outer: the outer optimizer; the paper's is SGD with Nesterov momentum of 0.9.
      outer_lr: its learning rate, which is constant.
      wire: the format of outer gradients: `Float32Wire()`, or `IntegerWire()` for 8 or 4 bits. Rounding errors are kept
        in memory, not in checkpoints.

    Raises:
      ConfigError: a field is out of its range, or `outer` or `wire` is of another kind.
    """

    coordinator: str = "127.0.0.1:29400"
    shares: int = 8
    every: int = 16
    outer: Optimizer = SGD(momentum=0.9, nesterov=True)
    outer_lr: float = 0.7
    wire: Wire = Float32Wire()

    def __post_init__(self) -> None:
        check_counts(self, shares=1, every=1)
        if self.shares > MOST:
            raise ConfigError(f"PeerDiLoCo.shares = {self.shares}: must be at most {MOST}")
        if not isinstance(self.outer, Optimizer):
            example = "such as SGD(0.9, nesterov=True)"
            raise ConfigError(f"PeerDiLoCo.outer = {self.outer!r}: must be an optimizer, {example}")
        if not is_wire(self.wire):
            raise ConfigError(f"PeerDiLoCo.wire = {self.wire!r}: must be Float32Wire() or IntegerWire()")
        if not (is_number(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"PeerDiLoCo.outer_lr = {self.outer_lr!r}: must be above 0, such as 0.7")
        if not isinstance(self.coordinator, str) or ":" not in self.coordinator:
            raise ConfigError(f"PeerDiLoCo.coordinator = {self.coordinator!r}: must be HOST:PORT")

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the infos of `Algorithm`, and in "extra" the shared parameters and the outer state."""
        wide = wide_infos(blueprint)
        extra = {
            "outer": with_prefix(wide, "outer"),
            "outer_state": with_prefix(state_infos(self._tx(wide), wide), "outer_state"),
        }
        return {**super().infos(blueprint), "extra": extra}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return the first state, whose shared parameters are the initial ones."""
        outer = jax.tree.map(lambda x: x.astype(WIDE), params)
        extra = {"outer": outer, "outer_state": self._tx(wide_infos(blueprint)).init(outer)}
        return {**super().init(blueprint, params), "extra": extra}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return the step of `Backprop`: a process's own update."""
        grads = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)
        return make_step(grads, blueprint.tx, schedule, guards)

    def meeting(self, blueprint: Blueprint) -> Meeting:
        """Return the exchange of outer gradients."""
        wide = wide_infos(blueprint)
        tx = self._tx(wide)

        def sent(state: TrainState) -> Tree:
            return jax.tree.map(lambda o, x: o - x.astype(WIDE), state.extra["outer"], state.params)

        def moved(shared: Tree, mean: Tree) -> Tree:
            outer, opt_state = apply_gradients(tx, mean, shared["outer_state"], shared["outer"])
            return {"outer": outer, "outer_state": opt_state}

        def joined(state: TrainState, shared: Tree) -> TrainState:
            params = jax.tree.map(lambda o, x: o.astype(x.dtype), shared["outer"], state.params)
            return state.replace(params=params, extra=shared)

        return Meeting(
            coordinator=self.coordinator,
            shares=self.shares,
            every=self.every,
            wire=self.wire,
            infos=wide,
            shared_infos=self.infos(blueprint)["extra"],
            shared=lambda state: state.extra,
            sent=sent,
            moved=moved,
            joined=joined,
            settings={"outer": str(self.outer), "outer_lr": str(self.outer_lr)},
        )

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check the outer optimizer, the steps, and that the process is alone."""
        if config.algorithm is not self:
            raise ConfigError(
                f"PeerDiLoCo is part of {type(config.algorithm).__name__}, which does not exchange anything with other "
                "processes; set train.algorithm = @PeerDiLoCo()"
            )
        infos = wide_infos(blueprint)
        state = state_infos(self._tx(infos), infos)
        if averages(state) or on_host(state):
            kind = type(self.outer).__name__
            raise ConfigError(f"PeerDiLoCo.outer does not work with {kind}; use SGD(momentum=0.9, nesterov=True)")
        inner = state_infos(blueprint.tx, blueprint.infos)
        if averages(inner):
            raise ConfigError(f"PeerDiLoCo does not work with {type(config.optimizer).__name__}; use AdamW()")
        if config.steps % self.every:
            steps = -(-config.steps // self.every) * self.every
            raise ConfigError(
                f"PeerDiLoCo.every = {self.every} does not divide train.steps = {config.steps}, so that the last steps "
                f"would not be exchanged; set train.steps = {steps}"
            )
        if jax.process_count() > 1:
            raise LayoutError(
                f"PeerDiLoCo: this run has {jax.process_count()} processes, and a peer is one process with all of its "
                "devices; start a peer on each host, without --distributed"
            )

    def _tx(self, infos: Tree) -> optax.GradientTransformation:
        return self.outer.make(lambda _: jnp.asarray(self.outer_lr, WIDE), infos)
