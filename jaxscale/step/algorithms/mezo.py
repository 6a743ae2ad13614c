"""MeZO: zeroth-order training by forward passes at randomly perturbed parameters."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.optim.base import Schedule
from jaxscale.parallel import each_copy
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.algorithms.perturbations import Value, forward_value, move
from jaxscale.step.guards import Guard, judge
from jaxscale.step.objective import Batch, Objective
from jaxscale.step.state import Blueprint, TrainState

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig

log = logging.getLogger("jaxscale")
_STREAM = 0x4D655A4F  # folded into the step's key, so that perturbations are not dropout's random numbers


@register
@dataclasses.dataclass(frozen=True)
class MeZO(Algorithm):
    """Zeroth-order SGD in the memory of a forward pass (Malladi et al. 2023, arXiv:2305.17333).

    For each perturbation z (standard normal), `d = (L(θ + eps z) - L(θ - eps z)) / (2 eps)` estimates the derivative of
    the objective L along z, and a step is `θ ← θ - lr (weight_decay θ + mean of d z)`. There is no backward pass and no
    optimizer state: any objective works, also one without gradients. z is not stored but drawn again from the step's
    key, one key for each tensor and layer, and the parameters are moved in place and back. So between steps they change
    by rounding, also where d is zero or a guard refuses the update: by some 1e-7 of a weight in float32, and by much
    more in bfloat16. Both evaluations have the same dropout. Adapters and unfrozen parameters are perturbed alone.

    The metrics are means over all evaluations, and `grad_norm` is the root mean square of d, which estimates the norm
    of the gradient. `train.optimizer` and `train.clip_norm` are not used.

    Where the layout has a mesh axis `replica` over which rows are not sharded (`Layout.rules = @shared_rows()`), the
    `2 · perturbations` evaluations are shared between its devices, each on all rows (DistZO2, Wang et al. 2025,
    arXiv:2507.03211). Only values of the objective cross devices then; a device holds a second, perturbed copy of its
    parameters while it evaluates.

    Args:
      eps: distance of the two evaluations from the parameters, in standard deviations of z.
      perturbations: number of perturbations of a step; their updates are averaged.
      weight_decay: as of `AdamW`: not for norms and biases.
      clip: largest absolute value of d (Shang et al. 2025, arXiv:2505.13430); `None` does not clip.

    Raises:
      ConfigError: a setting is out of its range.
    """

    eps: float = 1e-3
    perturbations: int = 1
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        name, n = type(self).__name__, self.perturbations
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ConfigError(f"{name}.perturbations = {n!r}: must be a whole number of at least 1")
        for field, low in (("eps", True), ("clip", True), ("weight_decay", False)):
            value = getattr(self, field)
            if value is None and field == "clip":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not (0 < value < math.inf if low else 0 <= value < math.inf):
                bound = "above 0" if low else "at least 0"
                raise ConfigError(f"{name}.{field} = {value!r}: must be a finite number {bound}")

    @property
    def unused(self) -> tuple[str, ...]:
        """The optimizer and its settings."""
        return ("optimizer", "clip_norm", "balance_rate")

    @property
    def spreads(self) -> bool:
        """True: they share the evaluations."""
        return True

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """Return the infos of the parameters; there is no other state."""
        return {"params": blueprint.infos, "opt_state": {}, "extra": {}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """Return the parameters."""
        return {"params": params, "opt_state": {}, "extra": {}}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return a step of `2 · perturbations` forward passes and an update along the perturbations."""
        if schedule is None:
            raise ConfigError(_no_schedule(self))
        rate, n = schedule, self.perturbations
        value = forward_value(blueprint, objective, accumulate)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            key = jax.random.fold_in(state.rng, state.step)
            keys = perturbation_keys(key, n)
            params, values, metrics = self._evaluate(blueprint, value, state, batch, key, keys)
            slopes = (values[:, 0] - values[:, 1]) / (2 * self.eps)
            metrics = jax.tree.map(jnp.mean, metrics) | {"grad_norm": jnp.sqrt(jnp.mean(slopes**2))}
            # The guards read the parameters after they are moved back: read before, XLA would copy them.
            accepted, memory, counts = judge(guards, state.replace(params=params), metrics)
            if self.clip is not None:
                slopes = jnp.clip(slopes, -self.clip, self.clip)
            lr = jnp.asarray(rate(state.step), jnp.float32)
            by, decay = -lr * slopes / n, lr * self.weight_decay
            if accepted is not None:
                by, decay = jnp.where(accepted, by, 0.0), jnp.where(accepted, decay, 0.0)

            with jax.named_scope("optimizer"):
                shrink = jnp.where(jnp.arange(n) == 0, 1 - decay, 1.0)  # weights decay once a step
                params = self._update(blueprint, params, keys, by, shrink if self.weight_decay else None)
            metrics |= counts | {"lr": lr}
            return state.replace(step=state.step + 1, params=params, guards=memory), metrics

        return step

    def _evaluate(
        self, blueprint: Blueprint, value: Value, state: TrainState, batch: Batch, key: jax.Array, keys: jax.Array
    ) -> tuple[Tree, jax.Array, Metrics]:
        """Evaluate both sides of each perturbation; return the parameters, values (n, 2), and metrics with more axes.

        The parameters are moved there and back. XLA runs the loops in place: a device holds one copy of them.
        """
        if spreads(blueprint.layout):
            return self._spread(blueprint, value, state, batch, key, keys)
        infos = blueprint.infos

        def both(params: Tree, own: jax.Array) -> tuple[Tree, tuple[jax.Array, Metrics]]:
            def side(params: Tree, by: jax.Array) -> tuple[Tree, tuple[jax.Array, Metrics]]:
                params = move(params, infos, own, by)
                return params, value(params, batch, key, state.frozen)

            params, results = jax.lax.scan(side, params, jnp.asarray([self.eps, -2 * self.eps], jnp.float32))
            return move(params, infos, own, self.eps), results

        params, (values, metrics) = jax.lax.scan(both, state.params, keys)
        return params, values, metrics

    def _spread(
        self, blueprint: Blueprint, value: Value, state: TrainState, batch: Batch, key: jax.Array, keys: jax.Array
    ) -> tuple[Tree, jax.Array, Metrics]:
        """Evaluate the sides of all perturbations on the devices along `replica`, each at a copy of the parameters."""

        def side(shared: Tree, own: jax.Array, by: jax.Array) -> tuple[jax.Array, Metrics]:
            params, batch, key, frozen = shared
            moved = move(params, blueprint.infos, jax.random.wrap_key_data(own), by)
            return value(moved, batch, jax.random.wrap_key_data(key), frozen)

        shared = (state.params, batch, jax.random.key_data(key), state.frozen)
        sides = jnp.tile(jnp.asarray([self.eps, -self.eps], jnp.float32), self.perturbations)
        own = jnp.repeat(jax.random.key_data(keys), 2, axis=0)
        values, metrics = each_copy(side, shared, own, sides, layout=blueprint.layout)
        return state.params, values.reshape(-1, 2), metrics

    def _update(
        self, blueprint: Blueprint, params: Tree, keys: jax.Array, by: jax.Array, shrink: jax.Array | None
    ) -> Tree:
        """Move the parameters along all perturbations; `by` and `shrink` are (n,)."""

        def one(params: Tree, own: tuple[jax.Array, ...]) -> tuple[Tree, None]:
            return move(params, blueprint.infos, *own), None

        return jax.lax.scan(one, params, (keys, by, *(() if shrink is None else (shrink,))))[0]

    def weights(self, state: TrainState) -> Tree:
        """Return the parameters."""
        return state.params

    def weights_in(self, blueprint: Blueprint) -> str | None:
        """Return "params"."""
        return "params"

    def check(self, config: TrainConfig, blueprint: Blueprint) -> None:
        """Check that there is a learning rate, and that the layout divides the evaluations."""
        if isinstance(config.optimizer, optax.GradientTransformation):
            raise ConfigError(_no_schedule(self))
        layout = config.layout
        dtypes = {str(i.dtype) for i in jax.tree.leaves(self.infos(blueprint)["params"]) if not i.host} - {"float32"}
        if dtypes and not spreads(layout):
            log.warning(
                "%s moves parameters by eps = %g and back in place, which %s rounds in every step; train float32 "
                "parameters (Transformer.param_dtype)",
                type(self).__name__,
                self.eps,
                " and ".join(sorted(dtypes)),
            )
        if layout is None:
            return
        if layout.stages > 1 and any(getattr(config.model, name, 0) for name in ("dropout", "attention_dropout")):
            raise ConfigError(
                f"{type(self).__name__} computes pipeline stages without dropout; set the model's dropout to 0, or use "
                "a mesh without pipeline"
            )
        if not spreads(layout):
            return
        replicas = layout.sizes["replica"]
        if (2 * self.perturbations) % replicas:
            nearest = math.lcm(2, replicas) // 2 * -(-2 * self.perturbations // math.lcm(2, replicas))
            raise ConfigError(
                f"{type(self).__name__}.perturbations = {self.perturbations} has {2 * self.perturbations} evaluations, "
                f"which replica={replicas} does not divide; set it to {nearest}"
            )
        if layout.stages > 1:
            raise ConfigError(
                f"{type(self).__name__} cannot share evaluations over replica with pipeline stages; use a mesh without "
                "pipeline"
            )


def spreads(layout: Layout | None) -> bool:
    """Return whether evaluations are shared over the mesh axis `replica`: it exists, and does not shard rows.

    Args:
      layout: the layout, or `None`.
    """
    return layout is not None and layout.sizes["replica"] > 1 and "replica" not in layout.cut("batch")


def perturbation_keys(key: jax.Array, n: int) -> jax.Array:
    """Return the keys of a step's perturbations, (n,).

    Args:
      key: the step's key.
      n: number of perturbations.
    """
    stream = jax.random.fold_in(key, _STREAM)
    return jax.vmap(lambda i: jax.random.fold_in(stream, i))(jnp.arange(n))


def _no_schedule(algorithm: Algorithm) -> str:
    return (
        f"{type(algorithm).__name__} takes its learning rate from train.lr and train.schedule, and an optax "
        "transformation has one of its own; remove train.optimizer"
    )
