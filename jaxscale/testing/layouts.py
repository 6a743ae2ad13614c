"""Checks that sharded training equals unsharded training, on several layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.data import Batch
from jaxscale.layout import Layout
from jaxscale.models import ModelConfig
from jaxscale.models.base import vocab_of
from jaxscale.step.backprop import make_loss_and_grads, make_step
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.objective import Input, NextToken, Objective
from jaxscale.step.stage_order import by_stage, in_layers, in_stages
from jaxscale.step.state import Blueprint, TrainState
from jaxscale.step.step import batch_shardings, jit_step
from jaxscale.testing.compare import TOLERANCE, Agreement, Difference, differences, global_norm
from jaxscale.testing.params import random_params

Tree = Any
MakeLossAndGrads = Callable[..., Any]

SEED = 0
LEARNING_RATE = 0.5
CLIP = 0.5
"""Below the gradient norm of most newly initialised models; `compare_layouts` clips lower if a model needs it."""
NEXT_TOKEN = NextToken()

ROUNDINGS = 3
"""Number of runs on one device with other roundings, from which the effect of rounding is measured."""
TIMES_ROUNDING = 2
"""Allowed error as a multiple of the largest such effect: a layout rounds every sum, they round the parameters."""
AT_MOST = 10
"""Largest multiple of the tolerance that this may allow."""

QUICKLY = {"xla_backend_optimization_level": 0}
"""Compiler options that skip LLVM's optimizations: nearly half of a small program's compile time."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Results of a few training steps, in NumPy.

    Args:
      losses: the loss of each step.
      gradient_norms: the gradient norm of each step.
      gradients: the clipped gradients of the first step.
      params: the parameters after the last step.
      reports: metrics that layers report, by name, one value a step; they reveal which experts were chosen.
    """

    losses: np.ndarray
    gradient_norms: np.ndarray
    gradients: Tree
    params: Tree
    reports: dict[str, np.ndarray]


def compare_layouts(
    model: ModelConfig,
    layouts: Iterable[Layout],
    *,
    batch: Batch | None = None,
    accumulate: int = 1,
    objective: Objective = NEXT_TOKEN,
    steps: int = 2,
    make_loss_and_grads: MakeLossAndGrads = make_loss_and_grads,
    tolerance: float = TOLERANCE,
) -> Agreement:
    """Train `model` from one seed without a layout and on each of `layouts`, and compare the numbers.

    Compares metrics that layers report (first, so that a different discrete choice is reported as such), the loss and
    the gradient norm at every step, every leaf of the first gradient, and every parameter after `steps` steps of
    clipped SGD (an adaptive optimizer would turn the rounding of a zero gradient into a whole step). The blueprint,
    the clipping, the step and its `jit` are those of training.

    Some models amplify rounding errors, for example in the gradient through the norm of a short vector. Where a number
    differs by more than its tolerance, three further runs without a layout start from parameters one float32 number
    away, and the number may differ by twice as much as in them, but never by ten times its tolerance.

    Args:
      model: the model to train.
      layouts: the layouts; simulated devices suffice.
      batch: arrays (B, ...) by the names of `objective.inputs`, the same at every step; by default a `random_batch`.
      accumulate: number of micro-batches of a step.
      objective: what to minimise.
      steps: number of steps.
      make_loss_and_grads: makes the gradient function on layouts; without a layout the default is used.
      tolerance: relative tolerance; anything but the default needs a reason beside it.
    """
    batch = random_batch(vocab_of(model)) if batch is None else batch
    frozen, clip = _Frozen(batch), CLIP
    want = _reference(model, frozen, accumulate, objective, steps, clip)  # type: ignore[arg-type]  # models are frozen
    if want.gradient_norms.min() <= clip:  # such that clipping acts at every step and is compared, too
        clip = float(want.gradient_norms.min()) / 2
        want = _reference(model, frozen, accumulate, objective, steps, clip)  # type: ignore[arg-type]
    rows: dict[str, dict[str, list[Difference]]] = {}
    for layout in layouts:
        got = train(
            model,
            layout,
            batch=batch,
            accumulate=accumulate,
            objective=objective,
            steps=steps,
            make_loss_and_grads=make_loss_and_grads,
            clip_norm=clip,
        )
        row = _compared(got, want, tolerance)
        if not all(d.ok for leaves in row.values() for d in leaves):
            rounded = _rounded(model, frozen, accumulate, objective, steps, clip)  # type: ignore[arg-type]
            row = _allowing(row, [_compared(other, want, tolerance) for other in rounded])
        rows[str(layout)] = row
    return Agreement("training, against no layout", rows)


def assert_layouts_agree(model: ModelConfig, layouts: Iterable[Layout], *, batch: Batch, **options: Any) -> None:
    """Check with `compare_layouts` that a model trains to the same numbers on each layout as on one device.

    Args:
      model: as in `compare_layouts`, as are all arguments.
      layouts: as there.
      batch: as there.
      **options: as there.

    Raises:
      AssertionError: listing the leaves that differ, per layout.
    """
    compare_layouts(model, layouts, batch=batch, **options).check()


def train(
    model: ModelConfig,
    layout: Layout | None,
    *,
    batch: Batch,
    accumulate: int = 1,
    objective: Objective = NEXT_TOKEN,
    steps: int = 2,
    make_loss_and_grads: MakeLossAndGrads = make_loss_and_grads,
    clip_norm: float = CLIP,
) -> Trace:
    """Train as `compare_layouts` does, on one layout or without any, and return the results."""
    options: dict[str, Any] = dict(accumulate=accumulate, objective=objective, steps=steps, clip_norm=clip_norm)
    (trace,) = _traces(model, layout, batch, (None,), make_loss_and_grads=make_loss_and_grads, **options)
    return trace


def _traces(
    model: ModelConfig,
    layout: Layout | None,
    batch: Batch,
    roundings: Iterable[int | None],
    *,
    accumulate: int,
    objective: Objective,
    steps: int,
    make_loss_and_grads: MakeLossAndGrads = make_loss_and_grads,
    clip_norm: float,
) -> list[Trace]:
    """Train with one compiled step once for each of `roundings`, seeds as for `build`."""
    traces, compiled = [], None
    for rounding in roundings:
        setup = build(model, layout, remembering_sgd(), clip_norm=clip_norm, objective=objective, rounding=rounding)
        with in_force(layout):
            axes = {k: setup.blueprint.axes_of(k, x.ndim - 1) for k, x in batch.items()}
            inputs = {k: Input(x.shape[1:], str(x.dtype), axes[k]) for k, x in batch.items()}
            shardings: Any = batch_shardings(layout, inputs, len(next(iter(batch.values()))))
            placed = None if layout is None else shardings
            on_devices = batch if layout is None else {k: lay(x, shardings[k]) for k, x in batch.items()}
            make_tx = functools.partial(_same, setup.blueprint.tx)
            staged = by_stage(dataclasses.replace(setup.blueprint, make_tx=make_tx))  # as the training loop does
            state = in_stages(staged, setup.state)
            if compiled is None:
                loss_and_grads = make_loss_and_grads(staged, accumulate=accumulate, objective=objective)
                step: Any = jit_step(make_step(loss_and_grads, staged.tx), staged, placed)
                compiled = step.lower(state, on_devices).compile(QUICKLY)
            traces.append(_trace(compiled, staged, state, on_devices, steps))
    return traces


def _same(tx: optax.GradientTransformation, infos: Tree) -> optax.GradientTransformation:
    return tx


def _trace(step: Any, blueprint: Blueprint, state: TrainState, batch: Any, steps: int) -> Trace:
    gradients, seen, reports = None, [], []
    for _ in range(steps):
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))  # waits, as simulated devices require
        reports.append({k: v for k, v in metrics.items() if k not in ("loss", "grad_norm")})
        if gradients is None:
            state = in_layers(blueprint, state)
            gradients = to_numpy(remembered(state))
            state = in_stages(blueprint, state)
    state = in_layers(blueprint, state)
    losses, norms = np.asarray(seen).T
    return Trace(losses, norms, gradients, to_numpy(state.params), jax.tree.map(lambda *x: np.asarray(x), *reports))


def _compared(got: Trace, want: Trace, tolerance: float) -> dict[str, list[Difference]]:
    near = functools.partial(differences, tolerance=tolerance)
    return {
        "what layers report": near(got.reports, want.reports),
        "losses": near(got.losses, want.losses),
        "norms of the gradients": near(got.gradient_norms, want.gradient_norms),
        "gradients": near(got.gradients, want.gradients),
        "parameters": near(got.params, want.params, gradient_norm=global_norm(want.gradients)),
    }


def _allowing(
    row: dict[str, list[Difference]], rounded: list[dict[str, list[Difference]]]
) -> dict[str, list[Difference]]:
    """Return `row` with larger allowed errors where the runs with other roundings differ, too."""

    def allowing(one: Difference, others: Iterable[Difference]) -> Difference:
        effect = TIMES_ROUNDING * max(other.error for other in others)
        allowed = max(one.allowed, min(effect, AT_MOST * one.allowed))
        return dataclasses.replace(one, allowed=allowed, note=f"{one.note}; {allowed:.2e} after rounding otherwise")

    return {
        what: [allowing(*pair) for pair in zip(leaves, zip(*(r[what] for r in rounded), strict=True), strict=True)]
        for what, leaves in row.items()
    }


class Setup(NamedTuple):
    """A blueprint and its initial state."""

    blueprint: Blueprint
    state: TrainState


def build(
    model: ModelConfig,
    layout: Layout | None,
    tx: optax.GradientTransformation,
    *,
    clip_norm: float | None = None,
    objective: Objective = NEXT_TOKEN,
    rounding: int | None = None,
) -> Setup:
    """Return a blueprint as training makes it, and an initial state on its layout.

    The parameters are `random_params`, whose biases are not zero and scales not one, and which need no compilation. A
    separate test checks that a model's own initial values are the same on every layout (tests/train/test_step.py).
    With `rounding`, a seed, every float32 number is replaced by one of its two neighbours.
    """
    config = TrainConfig(model=model, layout=layout, optimizer=tx, clip_norm=clip_norm, guards=(), objective=objective)
    blueprint, _ = blueprint_of(config)
    numbers = random_params(blueprint.infos, seed=SEED)
    params = jax.tree.map(jnp.asarray, numbers if rounding is None else _neighbours(numbers, rounding))
    extra = blueprint.algorithm.init(blueprint, params)["extra"]
    state = TrainState(jnp.zeros([], jnp.int32), params, blueprint.tx.init(params), jax.random.key(SEED), extra=extra)
    return Setup(blueprint, state if layout is None else jax.tree.map(lay, state, blueprint.shardings()))


def _neighbours(numbers: Tree, seed: int) -> Tree:
    random = np.random.default_rng(seed)

    def neighbour(x: np.ndarray) -> np.ndarray:
        towards = np.where(random.random(x.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        return np.nextafter(x, towards) if x.dtype == np.float32 else x

    return jax.tree.map(neighbour, numbers)


def lay(x: jax.Array | np.ndarray, sharding: Any) -> jax.Array:
    """Place a whole array on devices as `jax.device_put` does, even if some belong to another process."""
    whole = x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: whole[at])


@contextlib.contextmanager
def in_force(layout: Layout | None) -> Iterator[None]:
    """Context of `with layout:`, or of nothing without a layout."""
    with layout or contextlib.nullcontext():
        yield


def to_numpy(tree: Tree) -> Tree:
    """Copy every whole array to the host; arrays on devices of several processes, to each process."""
    away: list[Any] = [
        x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not x.is_fully_addressable
    ]
    return jax.tree.map(np.array, _gather(away[0].mesh)(tree) if away else tree)


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Tree], Tree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


class Remembered(NamedTuple):
    """State of `remembering_sgd`: its last gradients."""

    gradients: Tree


def remembering_sgd() -> optax.GradientTransformation:
    """Return SGD whose state is its last gradients, so that one compiled step returns both them and the parameters."""

    def init(params: Tree) -> Remembered:
        return Remembered(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Tree, state: Remembered, params: Tree | None = None) -> tuple[Tree, Remembered]:
        return jax.tree.map(lambda g: -LEARNING_RATE * g, grads), Remembered(grads)

    return optax.GradientTransformation(init, update)


def remembered(state: TrainState) -> Tree:
    """Return the gradients that the last step of `remembering_sgd` applied, after clipping if there is any."""
    leaves = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, Remembered))
    (one,) = (x for x in leaves if isinstance(x, Remembered))
    return one.gradients


def random_batch(
    vocab: int, *, rows: int = 8, seq: int = 16, lengths: Iterable[int] | None = None, seed: int = 0
) -> Batch:
    """Return a batch of random tokens and targets.

    Args:
      vocab: vocabulary size.
      rows: number of batch rows.
      seq: sequence length.
      lengths: lengths of the documents packed into each row; the rest is padding. Row i has the list rotated by i, so
        that rows differ. `None` is one document per row, without `segment_ids` and `positions`.
      seed: seed of the random numbers.
    """
    random = np.random.default_rng(seed)
    batch: Batch = {
        "tokens": random.integers(0, vocab, (rows, seq), dtype=np.int32),
        "targets": random.integers(0, vocab, (rows, seq), dtype=np.int32),
        "weights": np.ones((rows, seq), np.float32),
    }
    if lengths is None:
        return batch
    lengths = list(lengths)
    assert sum(lengths) <= seq
    batch["segment_ids"], batch["positions"] = np.zeros((2, rows, seq), np.int32)
    for row in range(rows):
        rotation = row % len(lengths)
        start = 0
        for number, length in enumerate(lengths[rotation:] + lengths[:rotation], 1):
            batch["segment_ids"][row, start : start + length] = number
            batch["positions"][row, start : start + length] = np.arange(length)
            start += length
    batch["weights"] = (batch["segment_ids"] > 0).astype(np.float32)
    return batch


class _Frozen:
    """A batch as a hashable value, compared by its contents."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.key = tuple((k, v.shape, v.tobytes()) for k, v in sorted(batch.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.key == other.key


@functools.cache
def _reference(
    model: ModelConfig, batch: _Frozen, accumulate: int, objective: Objective, steps: int, clip: float
) -> Trace:
    return train(
        model, None, batch=batch.batch, accumulate=accumulate, objective=objective, steps=steps, clip_norm=clip
    )


@functools.cache
def _rounded(
    model: ModelConfig, batch: _Frozen, accumulate: int, objective: Objective, steps: int, clip: float
) -> list[Trace]:
    options: dict[str, Any] = dict(accumulate=accumulate, objective=objective, steps=steps, clip_norm=clip)
    return _traces(model, None, batch.batch, range(ROUNDINGS), **options)
