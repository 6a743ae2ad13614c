"""Backpropagation: the gradient of the objective, its norm, and the optimizer's update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.config import register
from jaxscale.layout import constrain
from jaxscale.optim import apply_gradients, gradient_norm
from jaxscale.step.algorithm import NEXT_TOKEN, Algorithm, Metrics, Step, Tree
from jaxscale.step.guards import Guard, judge
from jaxscale.step.objective import Batch, Objective, Totals, check_additive, terms_of
from jaxscale.step.pipeline import is_pipelined, pipelined, split_rows
from jaxscale.step.state import Blueprint, TrainState

LossAndGrads = Callable[..., tuple[Metrics, Tree]]
"""`f(params, batch, key, frozen)`; see `make_loss_and_grads`."""
_NONE: Tree = {}


@register
@dataclasses.dataclass(frozen=True)
class Backprop(Algorithm):
    """The gradient of the objective on the whole batch, and one update of the optimizer a step: the default."""

    @property
    def in_formulas(self) -> bool:
        return True

    def step(
        self,
        blueprint: Blueprint,
        objective: Objective = NEXT_TOKEN,
        *,
        accumulate: int = 1,
        schedule: Callable[[Any], Any] | None = None,
        guards: Sequence[Guard] = (),
    ) -> Step:
        loss_and_grads = make_loss_and_grads(blueprint, objective=objective, accumulate=accumulate)
        return make_step(loss_and_grads, blueprint.tx, schedule, guards)


def make_step(
    loss_and_grads: LossAndGrads,
    tx: optax.GradientTransformation,
    schedule: Callable[[Any], Any] | None = None,
    guards: Sequence[Guard] = (),
    apply: Callable[..., tuple[Tree, Tree]] = apply_gradients,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The step: gradients, their norm, the update.

    Args:
      loss_and_grads: `f(params, batch, key, frozen) -> (metrics, grads)`.
      tx: the optimizer.
      schedule: step -> learning rate, reported as the metric `lr`.
      guards: of which any may refuse the update; the step counts on all the same.
      apply: makes new parameters and optimizer state, as `jaxscale.optim.apply_gradients` does.

    Returns:
      a pure function `(state, batch) -> (state, metrics)`; metrics are float32 scalars.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.rng, state.step)
        metrics, grads = loss_and_grads(state.params, batch, key, state.frozen)
        with jax.named_scope("gradient_norm"):
            norm = gradient_norm(grads)
        metrics = {**metrics, "grad_norm": norm}
        take = lambda: apply(tx, grads, state.opt_state, state.params)  # noqa: E731
        taken, kept, counts = judge(guards, state, metrics)
        # A branch and no select, which would hold old and new state side by side; all devices go the same way.
        leave = lambda: (state.params, state.opt_state)  # noqa: E731
        with jax.named_scope("optimizer"):
            params, opt_state = take() if taken is None else jax.lax.cond(taken, take, leave)
        metrics |= counts
        if schedule is not None:
            metrics["lr"] = jnp.asarray(schedule(state.step), jnp.float32)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, guards=kept), metrics

    return step


def make_loss_and_grads(
    blueprint: Blueprint, *, objective: Objective = NEXT_TOKEN, accumulate: int = 1
) -> LossAndGrads:
    """The default `loss_and_grads`: differentiates the objective, in micro-batches if asked.

    The weights of the objective are those of the *global* batch, so that accumulation changes memory and not the
    gradient.

    Args:
      blueprint: model and layout.
      objective: what is made small.
      accumulate: number of micro-batches; divides the batch.

    Returns:
      `f(params, batch, key, frozen={}) -> (the objective's metrics, grads)`, gradients laid out by the rules for
      them; `frozen` are the parameters that adapters are on. On a layout with pipeline stages, it is its schedule that
      gives each micro-batch's gradients.

    Raises:
      LayoutError, ConfigError: see `pipelined`; an objective that is not a sum over micro-batches.
    """
    if accumulate > 1:
        check_additive(objective, f"accumulate = {accumulate} takes it in parts", "set it to 1")
    stages = pipelined(blueprint.of_model(), objective, accumulate) if is_pipelined(blueprint) else None

    def value(params: Tree, batch: Batch, key: jax.Array, weights: Totals, frozen: Tree) -> tuple[jax.Array, Totals]:
        model = nnx.merge(blueprint.graphdef, blueprint.model_params(params, frozen))
        terms = terms_of(objective, model, batch, key=key, reference=blueprint.reference_of(frozen))
        return objective.value(terms | weights), terms

    def lay_out(grads: Tree) -> Tree:
        return jax.tree.map(lambda g, i: constrain(g, *i.axes, kind="grads"), grads, blueprint.infos)

    def of_stages(params: Tree, batch: Batch, key: jax.Array, weights: Totals, frozen: Tree) -> tuple[Tree, Totals]:
        assert stages is not None
        if blueprint.adaptation is None:
            return stages.gradients(params, batch, key, weights)
        # A stage knows kernels and no adapters: the sum's gradient is made, and from it theirs.
        whole, back = jax.vjp(lambda p: blueprint.adaptation.merged(p, frozen), params)  # type: ignore[union-attr]
        grads, terms = stages.gradients(whole, batch, key, weights)
        return back(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, whole))[0], terms

    def loss_and_grads(params: Tree, batch: Batch, key: jax.Array, frozen: Tree = _NONE) -> tuple[Metrics, Tree]:
        batch = numbered(batch)
        rows = len(batch["rows"])
        parts = accumulate if stages is None else accumulate * stages.microbatches(rows // accumulate)
        weights = objective.weights(batch, parts)
        grad = jax.grad(value, has_aux=True) if stages is None else of_stages
        like_params = lambda grads: jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)  # noqa: E731
        if accumulate == 1:
            grads, terms = grad(params, batch, key, weights, frozen)
            return objective.metrics(terms | weights), lay_out(like_params(grads))

        def micro(carry: Tree, part: Batch) -> tuple[Tree, Totals]:
            grads, terms = grad(params, part, key, weights, frozen)
            return lay_out(jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, grads)), terms

        zeros = lay_out(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
        grads, terms = jax.lax.scan(micro, zeros, split_rows(blueprint, batch, accumulate, objective.group))
        return objective.metrics(jax.tree.map(lambda x: jnp.sum(x, axis=0), terms) | weights), like_params(grads)

    return loss_and_grads


def numbered(batch: Batch) -> Batch:
    """The batch with `rows`, int32 (B,): each row's number."""
    rows = next(iter(batch.values())).shape[0]
    return {**batch, "rows": jnp.arange(rows, dtype=jnp.int32)}
