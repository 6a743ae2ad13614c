"""Backpropagation: the gradient of the objective, and the optimizer's update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.config import register
from jaxscale.layout import TensorInfo, constrain, in_host_memory
from jaxscale.nn.stats import tables
from jaxscale.optim import apply_gradients, gradient_norm
from jaxscale.optim.base import Schedule
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.guards import Guard, judge
from jaxscale.step.histograms import of_gradients
from jaxscale.step.objective import Batch, Objective, Totals, check_additive, terms_of
from jaxscale.step.pipeline import is_pipelined, pipelined, split_rows
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.step.tracking import EXTRA, Tracking, histories, renewed, summed
from jaxscale.step.user_metrics import with_logged

LossAndGrads = Callable[..., tuple[Metrics, Tree]]
"""`f(params, batch, key, frozen, weights)`; see `make_loss_and_grads`."""
_NONE: Tree = {}


@register
@dataclasses.dataclass(frozen=True)
class Backprop(Algorithm):
    """The default algorithm: a step is the gradient of the objective on the whole batch, and one optimizer update."""

    @property
    def in_formulas(self) -> bool:
        """True: the planner's formulas are for this algorithm."""
        return True

    @property
    def keeps_histories(self) -> bool:
        """True."""
        return True

    @property
    def in_any_order(self) -> bool:
        """True."""
        return True

    def infos(self, blueprint: Blueprint) -> dict[str, Tree]:
        """See `Algorithm`; with the histories of delayed scaling, if a product has it."""
        tracked_infos = histories(blueprint)
        return super().infos(blueprint) | {"extra": {EXTRA: tracked_infos} if tracked_infos else {}}

    def init(self, blueprint: Blueprint, params: Tree) -> dict[str, Tree]:
        """See `Algorithm`."""
        zeros = jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), self.infos(blueprint)["extra"])
        return super().init(blueprint, params) | {"extra": zeros}

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Schedule | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        """Return `make_step` of `make_loss_and_grads`."""
        tracked_infos = histories(blueprint)
        if not tracked_infos:
            loss_and_grads = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)
            return make_step(loss_and_grads, blueprint.tx, schedule, guards)
        tracking = Tracking(tuple(tracked_infos))
        tracked = dataclasses.replace(blueprint, infos=tracking.infos(blueprint))
        of_tracked = make_loss_and_grads(tracked, objective=objective, accumulate=accumulate)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            largest: dict[str, jax.Array] = {}

            def loss_and_grads(params: Tree, *rest: Tree) -> tuple[Metrics, Tree]:
                metrics, grads = of_tracked(tracking.over(params, state.extra[EXTRA]), *rest)
                grads, now = tracking.split(grads)
                largest.update(now)
                return metrics, grads

            new, metrics = make_step(loss_and_grads, blueprint.tx, schedule, guards)(state, batch)
            return new.replace(extra={**new.extra, EXTRA: renewed(state.extra[EXTRA], largest)}), metrics

        return step


def make_step(
    loss_and_grads: LossAndGrads,
    tx: optax.GradientTransformation,
    schedule: Schedule | None = None,
    guards: Sequence[Guard] = (),
    apply: Callable[..., tuple[Tree, Tree]] = apply_gradients,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return a training step that computes gradients and their norm, and updates the parameters.

    Args:
      loss_and_grads: `f(params, batch, key, frozen) -> (metrics, grads)`, such as `make_loss_and_grads` returns.
      tx: the optimizer.
      schedule: step -> learning rate, reported as the metric `lr`.
      guards: guards, each of which may skip the update; the step count is increased anyway.
      apply: `(tx, grads, opt_state, params) -> (params, opt_state)`, such as `jaxscale.optim.apply_gradients`.

    Returns:
      A pure function `(state, batch) -> (state, metrics)`; metrics are float32 scalars.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.rng, state.step)
        metrics, grads = loss_and_grads(state.params, batch, key, state.frozen)
        with jax.named_scope("gradient_norm"):
            norm = gradient_norm(grads)
        metrics = {**metrics, "grad_norm": norm}
        counts_of_grads = of_gradients(grads, state.step + 1)
        accepted, memory, counts = judge(guards, state, metrics)

        def updated() -> tuple[Tree, Tree]:
            return apply(tx, grads, state.opt_state, state.params)

        def unchanged() -> tuple[Tree, Tree]:
            return state.params, state.opt_state

        with jax.named_scope("optimizer"):
            # `cond` and not `where`, which would need memory for both old and new state. All devices agree on it.
            params, opt_state = updated() if accepted is None else jax.lax.cond(accepted, updated, unchanged)
        metrics |= counts | counts_of_grads
        if schedule is not None:
            metrics["lr"] = jnp.asarray(schedule(state.step), jnp.float32)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, guards=memory), metrics

    return step


def make_loss_and_grads(
    blueprint: Blueprint, *, objective: Objective = NEXT_TOKEN, accumulate: int = 1
) -> LossAndGrads:
    """Return a function that differentiates the objective, over several micro-batches with `accumulate`.

    The objective's weights are those of the *global* batch, so that accumulation changes memory and not the gradient.

    Args:
      blueprint: model and layout.
      objective: the objective to minimise.
      accumulate: number of micro-batches; must divide the batch.

    Returns:
      `f(params, batch, key, frozen={}, weights=None) -> (the objective's metrics, grads)`. Gradients are sharded by the
      layout's rules for `grads`; `frozen` are the frozen parameters beside adapters; `weights` are the objective's, by
      default of this batch (pass those of the whole batch where this is a part of it). On a layout with pipeline stages
      the pipeline's schedule computes the gradients of each micro-batch.

    Raises:
      LayoutError: see `pipelined`.
      ConfigError: see `pipelined`; or the objective is not a sum over micro-batches.
    """
    if accumulate > 1:
        check_additive(objective, f"accumulate = {accumulate} splits the batch", "set it to 1")
    stages = pipelined(blueprint.of_model(), objective, accumulate) if is_pipelined(blueprint) else None
    value = make_value(blueprint, objective)

    def lay_out(grads: Tree) -> Tree:
        def one(g: jax.Array, i: TensorInfo) -> jax.Array:
            return g if in_host_memory(g) else constrain(g, *i.axes, kind="grads")

        return jax.tree.map(one, grads, blueprint.infos)

    def of_stages(params: Tree, batch: Batch, key: jax.Array, weights: Totals, frozen: Tree) -> tuple[Tree, Totals]:
        assert stages is not None
        if blueprint.adaptation is None:
            return stages.gradients(params, batch, key, weights)
        # Stages work on merged kernels: compute gradients of those, and from them the gradients of the adapters.
        whole, back = jax.vjp(lambda p: blueprint.adaptation.merged(p, blueprint.own(frozen)), params)  # type: ignore[union-attr]
        grads, terms = stages.gradients(whole, batch, key, weights)
        return back(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, whole))[0], terms

    def loss_and_grads(
        params: Tree, batch: Batch, key: jax.Array, frozen: Tree = _NONE, weights: Totals | None = None
    ) -> tuple[Metrics, Tree]:
        batch = numbered(batch)
        rows = len(batch["rows"])
        parts = accumulate if stages is None else accumulate * stages.microbatches(rows // accumulate)
        weights = objective.weights(batch, parts) if weights is None else weights
        grad = jax.grad(value, has_aux=True) if stages is None else of_stages

        def like_params(grads: Tree) -> Tree:
            return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

        if accumulate == 1:
            grads, terms = grad(params, batch, key, weights, frozen)
            return with_logged(objective.metrics(terms | weights), terms, 1) | tables(terms), lay_out(
                like_params(grads)
            )

        def micro(carry: Tree, part: Batch) -> tuple[Tree, Totals]:
            grads, terms = grad(params, part, key, weights, frozen)
            return lay_out(summed(carry, grads)), terms

        zeros = lay_out(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
        grads, terms = jax.lax.scan(micro, zeros, split_rows(blueprint, batch, accumulate, objective.group))
        terms = jax.tree.map(lambda x: jnp.sum(x, axis=0), terms)
        return with_logged(objective.metrics(terms | weights), terms, accumulate) | tables(terms), like_params(grads)

    return loss_and_grads


def make_value(blueprint: Blueprint, objective: Objective) -> Callable[..., tuple[jax.Array, Totals]]:
    """Return `f(params, batch, key, weights, frozen) -> (the objective's value, terms)` for `make_loss_and_grads`.

    Args:
      blueprint: the model.
      objective: the objective.
    """

    def value(params: Tree, batch: Batch, key: jax.Array, weights: Totals, frozen: Tree) -> tuple[jax.Array, Totals]:
        model = nnx.merge(blueprint.graphdef, blueprint.model_params(params, frozen))
        terms = terms_of(objective, model, batch, key=key, reference=blueprint.reference_of(frozen))
        return objective.value(terms | weights), terms

    return value


def numbered(batch: Batch) -> Batch:
    """Return the batch with `rows`, int32 (B,), the index of each row, unless it has them.

    Args:
      batch: arrays by name, (B, ...).
    """
    if "rows" in batch:
        return batch
    rows = next(iter(batch.values())).shape[0]
    return {**batch, "rows": jnp.arange(rows, dtype=jnp.int32)}
