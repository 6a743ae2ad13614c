"""The training step: a pure function of state and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.layout import Layout, constrain, shardings_of
from jaxscale.models.base import arrange, order_of
from jaxscale.nn import Stats, auxiliary_loss
from jaxscale.nn import metrics as layer_metrics
from jaxscale.optim import apply_gradients, gradient_norm
from jaxscale.train.guards import Guard, judge
from jaxscale.train.loss import AutoLoss, Loss
from jaxscale.train.pipeline import is_pipelined, pipelined, split_rows
from jaxscale.train.state import Blueprint, TrainState

Tree = Any
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
LossAndGrads = Callable[..., tuple[Metrics, Tree]]
"""`f(params, batch, key)`, and with adapters the frozen parameters behind; see `make_loss_and_grads`."""
_LOSS = AutoLoss()
_NONE: Tree = {}


def make_loss_and_grads(
    blueprint: Blueprint, *, z_loss: float = 0.0, accumulate: int = 1, loss: Loss = _LOSS
) -> LossAndGrads:
    """The default `loss_and_grads`: differentiates the model, in micro-batches if asked.

    The loss is the mean over the weighted tokens of the *global* batch, so that accumulation changes memory and not
    the gradient. What layers add to it (experts' balance, see `jaxscale.nn.stats`) is of each micro-batch, averaged.

    Args:
      blueprint: model and layout.
      z_loss: weight of the squared log-partition.
      accumulate: number of micro-batches; divides the batch.
      loss: of each token.

    Returns:
      `f(params, batch, key, frozen={}) -> ({"loss": nats per token, ...}, grads)`, gradients laid out by the rules for
      them; the other metrics are the layers', and `frozen` the parameters that adapters are on. On a layout with
      pipeline stages, it is its schedule that gives each micro-batch's gradients.

    Raises:
      LayoutError, ConfigError: see `pipelined`.
    """
    stages = pipelined(blueprint.of_model(), loss, z_loss, accumulate) if is_pipelined(blueprint) else None

    def loss_of(
        params: Tree, batch: Batch, key: jax.Array, total: jax.Array, frozen: Tree
    ) -> tuple[jax.Array, Metrics]:
        nats, z, stats = weighted_sums(blueprint.graphdef, blueprint.model_params(params, frozen), batch, key, loss)
        # what layers add is a mean over the tokens they were given, a micro-batch at a time
        whole = (nats + z_loss * z) / total + auxiliary_loss(stats) / accumulate
        return whole, {"loss": nats / total, **{k: v / accumulate for k, v in layer_metrics(stats).items()}}

    def lay_out(grads: Tree) -> Tree:
        return jax.tree.map(lambda g, i: constrain(g, *i.axes, kind="grads"), grads, blueprint.infos)

    def of_stages(params: Tree, batch: Batch, key: jax.Array, total: jax.Array, frozen: Tree) -> Any:
        assert stages is not None
        if blueprint.adaptation is None:
            return stages.gradients(params, batch, key, total)
        # A stage knows kernels and no adapters: the sum's gradient is made, and from it theirs.
        whole, back = jax.vjp(lambda p: blueprint.adaptation.merged(p, frozen), params)  # type: ignore[union-attr]
        grads, metrics = stages.gradients(whole, batch, key, total)
        return back(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, whole))[0], metrics

    def loss_and_grads(params: Tree, batch: Batch, key: jax.Array, frozen: Tree = _NONE) -> tuple[Metrics, Tree]:
        total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        batch = {**batch, "rows": jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32)}
        grad = jax.grad(loss_of, has_aux=True) if stages is None else of_stages
        like_params = lambda grads: jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)  # noqa: E731
        if accumulate == 1:
            grads, metrics = grad(params, batch, key, total, frozen)
            return metrics, lay_out(like_params(grads))

        def micro(carry: Tree, part: Batch) -> tuple[Tree, Metrics]:
            grads, metrics = grad(params, part, key, total, frozen)
            return lay_out(jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry, grads)), metrics

        zeros = lay_out(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
        grads, metrics = jax.lax.scan(micro, zeros, {k: split_rows(v, accumulate) for k, v in batch.items()})
        return jax.tree.map(jnp.sum, metrics), like_params(grads)

    return loss_and_grads


def weighted_sums(
    graphdef: nnx.GraphDef, params: Tree, batch: Batch, key: jax.Array | None, loss: Loss = _LOSS
) -> tuple[jax.Array, jax.Array, Stats]:
    """Cross-entropy and squared log-partition summed over a batch's weighted tokens, float32; what layers report."""
    model = nnx.merge(graphdef, params)
    order = order_of(model, batch["tokens"].shape[1])
    if order is not None:  # nothing has to go back to where it was, since all of it is summed
        batch = arrange(batch, order)
    forward: Any = getattr(model, "hidden_and_stats", lambda *args, **kwargs: (model.hidden(*args, **kwargs), {}))
    told: dict[str, Any] = {k: batch.get(k) for k in ("positions", "segment_ids", "rows")}
    hidden, stats = forward(batch["tokens"], key=key, **told, **({} if order is None else {"arranged": True}))
    with jax.named_scope("loss"):
        nats, z = loss(hidden, model.head_weight(), batch["targets"], softcap=model.logit_softcap)
        return jnp.sum(nats * batch["weights"]), jnp.sum(z * batch["weights"]), stats


def make_step(
    loss_and_grads: LossAndGrads,
    tx: optax.GradientTransformation,
    schedule: Callable[[Any], Any] | None = None,
    guards: Sequence[Guard] = (),
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The step: gradients, their norm, the update.

    Args:
      loss_and_grads: `f(params, batch, key, *frozen) -> (metrics, grads)`; a pipeline supplies its own.
      tx: the optimizer.
      schedule: step -> learning rate, reported as the metric `lr`.
      guards: of which any may refuse the update; the step counts on all the same.

    Returns:
      a pure function `(state, batch, *frozen) -> (state, metrics)`; metrics are float32 scalars, and `frozen` the one
      tree of parameters that adapters are on.
    """

    def step(state: TrainState, batch: Batch, *frozen: Tree) -> tuple[TrainState, Metrics]:
        metrics, grads = loss_and_grads(state.params, batch, jax.random.fold_in(state.rng, state.step), *frozen)
        with jax.named_scope("gradient_norm"):
            norm = gradient_norm(grads)
        metrics = {**metrics, "grad_norm": norm}
        take = lambda: apply_gradients(tx, grads, state.opt_state, state.params)  # noqa: E731
        taken, kept, counts = judge(guards, state, metrics)
        # A branch and no select, which would hold old and new state side by side; all devices go the same way.
        leave = lambda: (state.params, state.opt_state)  # noqa: E731
        with jax.named_scope("optimizer"):
            params, opt_state = take() if taken is None else jax.lax.cond(taken, take, leave)
        metrics |= counts
        if schedule is not None:
            metrics["lr"] = jnp.asarray(schedule(state.step), jnp.float32)
        return TrainState(state.step + 1, params, opt_state, state.rng, kept), metrics

    return step


def batch_sharding(layout: Layout | None, batch_size: int, seq_len: int) -> Any:
    """Where a batch's (B, S) arrays live.

    Raises:
      LayoutError: the batch does not divide.
    """
    if layout is None:
        return None
    return layout.sharding(("batch", "seq"), (batch_size, seq_len), kind="activations", name="the batch")


def jit_step(step: Callable, blueprint: Blueprint, batch: Any) -> Callable:
    """`jit`, donating the state, both sides pinned: without that small parameters drift to other layouts.

    Args:
      step: from `make_step`.
      blueprint: what gives the state's shardings.
      batch: the batch's sharding, or `None`.
    """
    if blueprint.layout is None:
        return jax.jit(step, donate_argnums=0)
    state = blueprint.shardings()
    given = (state, batch, *_frozen_shardings(blueprint))
    return jax.jit(step, donate_argnums=0, in_shardings=given, out_shardings=(state, blueprint.layout.replicated))


def make_eval(blueprint: Blueprint, batch: Any, loss: Loss = _LOSS) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Jitted `(params, batch, *frozen) -> (summed cross-entropy, summed weights)`, without dropout.

    On a layout with pipeline stages the forward phases of its schedule run alone: no stage holds another's layers.
    """
    stages = pipelined(blueprint.of_model(), loss, 0.0) if is_pipelined(blueprint) else None

    def evaluate(params: Tree, batch: Batch, frozen: Tree = _NONE) -> tuple[jax.Array, jax.Array]:
        if blueprint.adaptation is not None:
            join = blueprint.adaptation.over if stages is None else blueprint.adaptation.merged
            params = join(params, frozen)
        plain = lambda: weighted_sums(blueprint.graphdef, params, batch, None, loss)  # noqa: E731
        nats, *_ = plain() if stages is None else stages.sums(params, batch)
        return nats, jnp.sum(batch["weights"])

    if blueprint.layout is None:
        return jax.jit(evaluate)
    params = blueprint.shardings().params  # type: ignore[union-attr]
    given = (params, batch, *_frozen_shardings(blueprint))
    return jax.jit(evaluate, in_shardings=given, out_shardings=blueprint.layout.replicated)


def _frozen_shardings(blueprint: Blueprint) -> list[Tree]:
    """Of the third argument, where there is one."""
    return [] if blueprint.adaptation is None else [shardings_of(blueprint.frozen, blueprint.layout)]
