"""1-bit Adam: after a warm-up the variance is frozen, and replicas exchange the signs of their momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.optim import adamw, decay_mask, state_infos, without_biases
from jaxscale.optim.adamw import AdamWState, fractions, not_negative
from jaxscale.optim.base import FusedTransformation, Schedule
from jaxscale.parallel import Float32Wire, SignWire, Wire
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
class OneBitAdam(Replicas):
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888): momentum is exchanged in a bit per number, with error feedback.

    For `exact_steps` steps, the warm-up, this is `AdamW` on the mean of the replicas' gradients. From then on the
    second moment is frozen and each replica moves the common first moment by its own gradient; the mean of these, as
    `wire` sends it, is the next common moment. An update divides it by the root of the frozen second moment, with the
    its bias correction of the last warm-up step. A number whose gradient was 0 in the whole warm-up is not updated
    afterwards. `grad_norm` is the norm of all replicas' gradients together. `train.optimizer` and `train.clip_norm`
    are not used.

    Args:
      replicas: number of replicas, which divide the batch.
      exact_steps: updates with exact gradients; the paper uses the time until the second moment is stable, 15% to 25%.
      b1: decay of the first moment.
      b2: decay of the second moment during the warm-up.
      eps: added to the root of the second moment.
      weight_decay: a step subtracts weight_decay · learning rate · parameter; not for norms and biases.
      wire: the format of moments after the warm-up: `SignWire()`, or `IntegerWire()` for 8 or 4 bits.

    Raises:
      ConfigError: a field is out of its range.
    """

    exact_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    wire: Wire = SignWire()

    def __post_init__(self) -> None:
        check_counts(self, replicas=2, exact_steps=1)
        fractions(self, "b1", "b2")
        not_negative(self, "eps", "weight_decay")
        if not is_wire(self.wire):
            raise ConfigError(f"OneBitAdam.wire = {self.wire!r}: must be SignWire() or IntegerWire()")

    @property
    def unused(self) -> tuple[str, ...]:
        """The optimizer and its settings."""
        return ("optimizer", "clip_norm")

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the parameters, both moments, and the wire's errors, all in one "opt_state"."""
        wide = wide_infos(blueprint)
        errors = self.wire.infos(wide, self.replicas, blueprint.layout)
        state = {"adam": state_infos(self._adam(blueprint, None), wide), "wire": with_prefix(errors, "wire")}
        return {"params": blueprint.infos, "opt_state": state, "extra": {}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return the parameters and zeros."""
        zeros = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), self.infos(blueprint)["opt_state"])
        return {"params": params, "opt_state": zeros, "extra": {}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step of Adam or, after the warm-up, of compressed momentum."""
        grads = self.loss_and_grads(blueprint, objective, accumulate, copies=False)
        adam, wide, decays = self._adam(blueprint, schedule), wide_infos(blueprint), decay_mask(blueprint.infos)
        rate = schedule if schedule is not None else lambda _: jnp.zeros([])

        def exact(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            mean, _ = Float32Wire().mean(grads, {}, wide, blueprint.layout)
            params, inner = adam.update_and_apply(mean, state["adam"], params)
            return params, {"adam": inner, "wire": state["wire"]}

        def compressed(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            count, mu, nu = state["adam"]
            lr, count = rate(count), optax.safe_increment(count)
            moved = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, mu, grads)
            mean, errors = self.wire.mean(moved, state["wire"], wide, blueprint.layout)
            mean = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0), mean, nu)
            fix1, fix2 = 1 - self.b1**count, 1 - self.b2**self.exact_steps

            def one(p: jax.Array, m: jax.Array, v: jax.Array, decay: bool) -> jax.Array:
                update = (m / fix1) / (jnp.sqrt(v / fix2) + self.eps)
                return (p - lr * (update + self.weight_decay * p if decay else update)).astype(p.dtype)

            params = jax.tree.map(one, params, mean, nu, decays)
            return params, {"adam": AdamWState(count, mean, nu), "wire": errors}

        def apply(_: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            with jax.named_scope("average_copies"):
                return jax.lax.cond(state["adam"].count < self.exact_steps, exact, compressed, grads, state, params)

        return make_step(grads, blueprint.tx, schedule, guards, apply=apply)

    def weights_in(self, blueprint: Blueprint) -> str:
        """Return "params"."""
        return "params"

    def round(self, blueprint: Blueprint) -> Round:
        """Return the exchange of a step after the warm-up."""
        return Round(1, (Exchange(0, 0, self.wire.sent(blueprint.infos, self.replicas, blueprint.layout)),))

    def describe(self) -> str:
        """Return the name, and that bytes are those after the warm-up."""
        return "OneBitAdam after its warm-up"

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check what `Replicas` does, and that the learning rate is known."""
        super().check(config, blueprint)
        if isinstance(config.optimizer, optax.GradientTransformation):
            raise ConfigError(
                "OneBitAdam takes its learning rate from train.lr and train.schedule, but train.optimizer is an optax "
                "transformation with its own; use AdamW()"
            )
        if len(jax.tree.leaves(without_biases(blueprint.infos))) < len(jax.tree.leaves(blueprint.infos)):
            raise ConfigError("OneBitAdam has no rule for the load biases of routers; use another router, or DiLoCo()")

    def _adam(self, blueprint: Blueprint, schedule: Schedule | None) -> FusedTransformation:
        more = dict(b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay)
        return adamw(0.0 if schedule is None else schedule, mask=decay_mask(blueprint.infos), **more)
