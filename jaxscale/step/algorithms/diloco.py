"""DiLoCo: replicas train apart, and an outer optimizer moves shared parameters by the mean of their differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim import SGD, apply_gradients, averages, state_infos
from jaxscale.optim.base import Optimizer, Schedule
from jaxscale.parallel import Float32Wire, Wire
from jaxscale.step.algorithm import NEXT_TOKEN, Metrics, Step, Tree
from jaxscale.step.algorithms.fragments import Fragment, fragments_of
from jaxscale.step.algorithms.replicas import LocalReplicas, check_counts, is_wire, on_host, wide_infos, with_prefix
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.ranges import is_number
from jaxscale.step.rounds import Exchange, Round
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

WIDE = jnp.dtype("float32")


@register
@dataclasses.dataclass(frozen=True)
class DiLoCo(LocalReplicas):
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105), and with fragments its streaming form (2025, arXiv:2501.18512).

    Each replica trains its own parameters with the run's optimizer. Every `every` steps the *outer gradient*, the
    shared parameters minus the mean of the replicas', goes to the outer optimizer, which updates the shared parameters,
    and all replicas continue from them. Shared parameters and outer state are float32 and in `extra`. Rows, metrics and
    evaluation are those of `LocalSteps`, which is DiLoCo with `outer = @SGD()`, no momentum, and `outer_lr = 1`.

    With `fragments = P` the groups of consecutive layers are exchanged at P different times: fragment p after the steps
    s for which (s - p · every // P) is a multiple of `every`, the first time after fewer local steps. Embedding, final
    norm and head go to one fragment each. The bytes are those of one fragment at a time; their sum is the same.

    With `delay = d` the exchange reads the parameters before a step, so that it does not depend on that step's
    gradients and may overlap with them, and its result is used d steps later. A replica then continues from mix · its
    own parameters + (1 - mix) · the shared ones.

    Args:
      replicas: number of replicas.
      every: steps between two exchanges of the same parameters. The paper uses 500 with a trained model.
      outer: the outer optimizer; the paper's is SGD with Nesterov momentum of 0.9.
      outer_lr: its learning rate, which is constant.
      wire: the format of outer gradients between replicas: `Float32Wire()`, or `IntegerWire()` for 8 or 4 bits.
      fragments: groups of layers that are exchanged at different times.
      delay: steps from an exchange to the use of its result; 0 exchanges after the step and waits.
      mix: weight of a replica's own parameters, at least 0 and below 1; for a `delay` the paper uses 0.5.

    Raises:
      ConfigError: a field is out of its range, or `outer` or `wire` is of another kind.
    """

    every: int = 16
    outer: Optimizer = SGD(momentum=0.9, nesterov=True)
    outer_lr: float = 0.7
    wire: Wire = Float32Wire()
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        check_counts(self, replicas=2, every=1, fragments=1, delay=0)
        if not isinstance(self.outer, Optimizer):
            raise ConfigError(f"DiLoCo.outer = {self.outer!r}: must be an optimizer, such as SGD(0.9, nesterov=True)")
        if not is_wire(self.wire):
            raise ConfigError(f"DiLoCo.wire = {self.wire!r}: must be Float32Wire() or IntegerWire()")
        if not (is_number(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"DiLoCo.outer_lr = {self.outer_lr!r}: must be above 0, such as 0.7")
        if not (is_number(self.mix) and 0 <= self.mix < 1):
            raise ConfigError(f"DiLoCo.mix = {self.mix!r}: must be at least 0 and below 1")
        if self.delay >= self.every:
            raise ConfigError(f"DiLoCo.delay = {self.delay}: must be below every = {self.every}")
        if self.fragments > self.every:
            raise ConfigError(
                f"DiLoCo.fragments = {self.fragments}: must be at most every = {self.every}, since fragments are "
                "exchanged after different steps"
            )

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the stacked infos, and in "extra" the shared parameters, outer states and the wire's errors."""
        infos, wide = super().infos(blueprint), wide_infos(blueprint)
        parts = {str(p): f.infos(wide) for p, f in enumerate(self._parts(blueprint))}
        extra: dict[str, Tree] = {"outer": with_prefix(wide, "outer")}
        extra["outer_state"] = {
            p: with_prefix(state_infos(self._tx(i), i), f"outer_state/{p}") for p, i in parts.items()
        }
        wires = {p: self.wire.infos(i, self.replicas, blueprint.layout) for p, i in parts.items()}
        extra["wire"] = {p: with_prefix(w, f"wire/{p}") for p, w in wires.items()}
        return {**infos, "extra": extra}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return equal initial parameters and states for all replicas, and as shared parameters."""
        infos, wide = self.infos(blueprint)["extra"], wide_infos(blueprint)
        outer = jax.tree.map(lambda x: x.astype(WIDE), params)
        parts = {str(p): f for p, f in enumerate(self._parts(blueprint))}
        states = {p: self._tx(f.infos(wide)).init(f.take(outer, wide)) for p, f in parts.items()}
        errors = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), infos["wire"])
        extra = {"outer": outer, "outer_state": states, "wire": errors}
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
        """Return a step that updates each replica by itself, exchanges what is due, and merges what has arrived."""
        local = self.local_step(blueprint, objective, accumulate=accumulate, schedule=schedule, guards=guards)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            extra = self._exchanged(blueprint, state) if self.delay else state.extra
            state, metrics = local(state, batch)
            state = state.replace(extra=extra)
            if not self.delay:
                state = state.replace(extra=self._exchanged(blueprint, state))
            return state.replace(params=self._merged(blueprint, state)), metrics

        return step

    def round(self, blueprint: Blueprint) -> Round:
        """Return the exchange of each fragment."""
        wide = wide_infos(blueprint)
        parts = [f.infos(wide) for f in self._parts(blueprint)]
        sent = [self.wire.sent(i, self.replicas, blueprint.layout) for i in parts]
        exchanges = [Exchange(p * self.every // self.fragments, self.delay, s) for p, s in enumerate(sent)]
        return Round(self.every, tuple(exchanges))

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check what `Replicas` does, the outer optimizer, and that no fragment is empty."""
        super().check(config, blueprint)
        infos = wide_infos(blueprint)
        state = state_infos(self._tx(infos), infos)
        if averages(state) or on_host(state):
            kind = type(self.outer).__name__
            raise ConfigError(f"DiLoCo.outer does not work with {kind}; use SGD(momentum=0.9, nesterov=True)")
        filled = sum(bool(f.slices) for f in self._parts(blueprint))
        if filled < self.fragments:
            raise ConfigError(
                f"DiLoCo.fragments = {self.fragments}: the model has layers and other parameters for {filled}; set it "
                f"to {filled}"
            )

    def _exchanged(self, blueprint: Blueprint, state: TrainState) -> dict[str, Tree]:
        """Return the shared parameters and outer state after the exchanges that are due at this step."""
        wide, extra = wide_infos(blueprint), state.extra
        for p, fragment in enumerate(self._parts(blueprint)):
            infos, key = fragment.infos(wide), str(p)

            @jax.named_scope(f"every_{self.every}_updates")
            def exchange(
                extra: dict[str, Any], fragment: Fragment = fragment, infos: Tree = infos, key: str = key
            ) -> dict[str, Tree]:
                mine = fragment.take(state.params, wide, lead=1)
                outer = fragment.take(extra["outer"], wide)
                apart = jax.tree.map(lambda o, x: o[None] - x.astype(WIDE), outer, mine)
                with jax.named_scope("average_copies"):
                    mean, errors = self.wire.mean(apart, extra["wire"][key], infos, blueprint.layout)
                outer, opt_state = apply_gradients(self._tx(infos), mean, extra["outer_state"][key], outer)
                return {
                    "outer": fragment.put(extra["outer"], outer, wide),
                    "outer_state": {**extra["outer_state"], key: opt_state},
                    "wire": {**extra["wire"], key: errors},
                }

            extra = jax.lax.cond(self._due(state.step, p), exchange, lambda extra: extra, extra)
        return extra

    def _merged(self, blueprint: Blueprint, state: TrainState) -> Tree:
        """Return the replicas' parameters after the results that have arrived at this step."""
        wide, params = wide_infos(blueprint), state.params
        for p, fragment in enumerate(self._parts(blueprint)):

            @jax.named_scope(f"every_{self.every}_updates")
            def merge(params: Tree, fragment: Fragment = fragment) -> Tree:
                mine, outer = fragment.take(params, wide, lead=1), fragment.take(state.extra["outer"], wide)

                def mixed(x: jax.Array, o: jax.Array) -> jax.Array:
                    shared = jnp.broadcast_to((1 - self.mix) * o, x.shape)
                    return self.mix * x.astype(WIDE) + shared if self.mix else shared

                return fragment.put(params, jax.tree.map(mixed, mine, outer), wide, lead=1)

            params = jax.lax.cond(self._due(state.step - self.delay, p), merge, lambda params: params, params)
        return params

    def _due(self, steps: jax.Array, p: int) -> jax.Array:
        return (steps > 0) & ((steps - p * self.every // self.fragments) % self.every == 0)

    def _parts(self, blueprint: Blueprint) -> tuple[Fragment, ...]:
        return fragments_of(blueprint.infos, self.fragments)

    def _tx(self, infos: Tree) -> optax.GradientTransformation:
        return self.outer.make(lambda _: jnp.asarray(self.outer_lr, WIDE), infos)
