"""Gradients that are exact within a replica and cross the slow link between replicas in a few bits, in every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.optim import apply_gradients, state_infos
from jaxscale.optim.base import Schedule
from jaxscale.parallel import IntegerWire, Wire
from jaxscale.reading import clipped
from jaxscale.step.algorithm import NEXT_TOKEN, Step, Tree
from jaxscale.step.algorithms.replicas import Replicas, check_counts, is_wire, wide_infos, with_prefix
from jaxscale.step.backprop import make_step
from jaxscale.step.guards import Guard
from jaxscale.step.objective import Objective
from jaxscale.step.rounds import Exchange, Round
from jaxscale.step.state import Blueprint

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig


@register
@dataclasses.dataclass(frozen=True)
class CompressedGradients(Replicas):
    """Gradients of each replica's rows, whose mean over replicas is sent in a few bits, and one update by it.

    Within a replica gradients are reduced in their own type over the fast links, as the layout says; only `wire`
    crosses the mesh axis `replica` (of several TPU slices: `Layout.across = "replica"`). With error feedback (Seide et
    al. 2014; Karimireddy et al. 2019, arXiv:1901.09847) what was rounded off is added to the next step's gradient, so
    that the sum of all updates' gradients is that of exact ones up to one step's rounding. A step that a guard skips
    leaves these errors as they are. `grad_norm` is the norm of all replicas' gradients together.

    Args:
      replicas: number of replicas, which divide the batch.
      wire: the format of gradients: `IntegerWire()` for 8 or 4 bits, `SignWire()`, or `Float32Wire()`, which is exact.

    Raises:
      ConfigError: fewer than 2 replicas, or `wire` is no format.
    """

    wire: Wire = IntegerWire()

    def __post_init__(self) -> None:
        check_counts(self, replicas=2)
        if not is_wire(self.wire):
            raise ConfigError(
                f"CompressedGradients.wire = {clipped(repr(self.wire))}: must be IntegerWire(), SignWire() or "
                "Float32Wire()"
            )

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the parameters, and in "opt_state" the optimizer's state and the wire's errors."""
        errors = self.wire.infos(wide_infos(blueprint), self.replicas, blueprint.layout)
        state = {"optimizer": state_infos(blueprint.tx, blueprint.infos), "wire": with_prefix(errors, "wire")}
        return {"params": blueprint.infos, "opt_state": state, "extra": {}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return the parameters, the optimizer's first state, and errors of 0."""
        errors = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), self.infos(blueprint)["opt_state"]["wire"])
        return {"params": params, "opt_state": {"optimizer": blueprint.tx.init(params), "wire": errors}, "extra": {}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step of the optimizer on the mean that crossed `replica`."""
        of_replicas = self.loss_and_grads(blueprint, objective, accumulate, copies=False)
        wide = wide_infos(blueprint)

        def apply(tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            with jax.named_scope("average_copies"):
                grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
                mean, errors = self.wire.mean(grads, state["wire"], wide, blueprint.layout)
                mean = jax.tree.map(lambda g, p: g.astype(p.dtype), mean, params)
            params, inner = apply_gradients(tx, mean, state["optimizer"], params)
            return params, {"optimizer": inner, "wire": errors}

        return make_step(of_replicas, blueprint.tx, schedule, guards, apply=apply)

    def weights_in(self, blueprint: Blueprint) -> str:
        """Return "params"."""
        return "params"

    def round(self, blueprint: Blueprint) -> Round:
        """Return the exchange of a step."""
        return Round(1, (Exchange(0, 0, self.wire.sent(wide_infos(blueprint), self.replicas, blueprint.layout)),))

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that the axis over slices is the one whose transfers are compressed, and what `Replicas` does."""
        across = None if config.layout is None else config.layout.across
        if across not in (None, "replica"):
            raise LayoutError(
                f"CompressedGradients compresses what crosses the mesh axis replica, but Layout.across = {across!r}; "
                f"set it to 'replica', with the mesh 'replica={self.replicas},...' in place of {across}={self.replicas}"
            )
        super().check(config, blueprint)
