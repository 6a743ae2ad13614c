"""Replay a step of a run from the checkpoint before it, bit for bit, and find the first operation that made a NaN."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import RunError
from jaxscale.layout import path_name
from jaxscale.layout.tensors import Tree
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.meeting import Meeting
from jaxscale.step.prepare import Prepared, prepare
from jaxscale.step.stage_order import by_stage, in_layers, in_stages
from jaxscale.step.state import TrainState
from jaxscale.step.trace import Origin, first_nonfinite
from jaxscale.train.run import RunFolder
from jaxscale.train.skips import SKIPS, read_skips

NUMBERS = ("loss", "grad_norm")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Result of replaying a step.

    Args:
      step: the step, from 1.
      checkpoint: the step of the checkpoint it was replayed from; 0 is the initial state.
      numbers: its loss and gradient norm.
      recorded: the same as the run recorded them; empty if it did not.
      before: arrays of the state and batch that held NaNs or infinities before the step, with how many.
      origin: the operation that first made a NaN or infinity from finite numbers, or `None`.
    """

    step: int
    checkpoint: int
    numbers: dict[str, float]
    recorded: dict[str, float]
    before: dict[str, int]
    origin: Origin | None

    @property
    def finite(self) -> bool:
        """Whether the replayed loss and gradient norm are finite."""
        return all(map(math.isfinite, self.numbers.values()))

    @property
    def same(self) -> bool:
        """Whether the numbers equal the recorded ones, bit for bit."""
        pairs = [(self.numbers[k], v) for k, v in self.recorded.items()]
        return all(a == b or math.isnan(a) and math.isnan(b) for a, b in pairs)

    def __str__(self) -> str:
        lines = [f"step {self.step}, replayed from step {self.checkpoint}: {_format(self.numbers)}"]
        if not self.recorded:
            lines.append("the run recorded nothing for this step")
        elif self.same:
            lines.append("equal to the recorded numbers, bit for bit")
        else:
            lines.append(
                f"NOT as recorded: {_format(self.recorded)}; program and data do not explain the difference (another "
                "layout, other versions, or a hardware fault)"
            )
        lines += [f"before the step: {name} holds {n} number(s) that are not finite" for name, n in self.before.items()]
        if self.origin is not None:
            lines.append(f"first number that is not finite: {self.origin}")
        elif not self.finite and not self.before:
            lines.append("on one device without a mesh, every number of this step is finite")
        elif self.finite:
            lines.append("every number of this step is finite")
        return "\n".join(lines)


def replay(run: RunFolder, step: int) -> Replayed:
    """Take a step of a run again, on the run's own layout.

    If its loss or gradient norm is not finite, the step is traced on one device without a mesh, which has to hold the
    whole model and its gradient.

    Args:
      run: the run.
      step: the step, from 1.

    Raises:
      RunError: the run has no such step.
      JaxscaleError: the run's settings or data are not available any more.
    """
    config = dataclasses.replace(run.config, eval_batches=0, eval_every=0, evaluate_on={}, prompt=None)
    if not 1 <= step <= config.steps:
        raise RunError(f"{run.place} has no step {step}; its steps go from 1 to {config.steps}")
    prepared = prepare(config)
    meeting = prepared.blueprint.algorithm.meeting(prepared.blueprint)
    if meeting is not None:
        prepared = _of_peer(run, prepared, meeting, step)
    skips = read_skips(run.path / SKIPS)
    passed = {s for row in skips for s in row.get("passed_over", ())}
    with config.layout or contextlib.nullcontext():
        checkpoint, state = _before(run, config, prepared, step)
        staged = by_stage(prepared.blueprint)
        take = dataclasses.replace(prepared, blueprint=staged).step_of(config)
        state = in_stages(staged, state)
        for done in range(checkpoint, step - 1):
            if done + 1 in passed:
                state = state.replace(step=state.step + 1)
            else:
                state, metrics = take(state, prepared.place_step(done))
                jax.block_until_ready(metrics)  # simulated devices deadlock when steps pile up
        batch = prepared.place_step(step - 1)
        rows: Tree = batch if prepared.by_degree is None else prepared.loader.batch_at(step - 1)  # not dealt
        state = in_layers(staged, state)
        host = _on_host((state.params, state.opt_state, rows, state.frozen))
        key = jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(state.rng))))
        metrics = jax.device_get(take(in_stages(staged, state), batch)[1])
    numbers = {k: float(metrics[k]) for k in NUMBERS}
    params, opt_state, inputs, frozen = host
    parts = (("params", params), ("opt_state", opt_state), ("batch", inputs))
    before = {k: n for part, tree in parts for k, n in _nonfinite(part, tree).items()}
    finite = all(map(math.isfinite, numbers.values()))
    origin = None if finite else _origin(config, params, inputs, jax.random.fold_in(key, step - 1), frozen)
    return Replayed(step, checkpoint, numbers, _recorded(run, step, skips), before, origin)


def _of_peer(run: RunFolder, prepared: Prepared, meeting: Meeting, step: int) -> Prepared:
    """Use the rows of the run's share; raise if another process's arrays are needed."""
    steps = [s for s in run.checkpoints.steps() if s < step]
    rows = [r for r in run.metrics() if "peer" in r and r["step"] >= step]
    first = steps[-1] if steps else 0
    if not rows or not steps or (step - 1) // meeting.every != first // meeting.every:
        raise RunError(
            f"step {step} of {run.place} cannot be replayed, since the run exchanged arrays with other processes after "
            f"its checkpoints{f' of steps {steps}' if steps else ''}; replay a step within {meeting.every} steps of one"
        )
    loader = dataclasses.replace(prepared.loader, shares=meeting.shares, share=int(rows[0]["peer"]))
    return dataclasses.replace(prepared, loader=loader)


def _before(run: RunFolder, config: TrainConfig, prepared: Prepared, step: int) -> tuple[int, TrainState]:
    """Restore the newest checkpoint before a step, or make the run's initial state."""
    steps = [s for s in run.checkpoints.steps() if s < step]
    if not steps:
        return 0, prepared.blueprint.init(config.seed)
    blueprint = prepared.blueprint
    state = run.checkpoints.restore(steps[-1], blueprint.abstract_state(), blueprint.shardings())
    return steps[-1], blueprint.completed(state)


def _recorded(run: RunFolder, step: int, skips: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers recorded when the step was taken or rejected by a guard, not when it was skipped."""
    rows = [r for r in run.metrics() if r["step"] == step and r.get("skipped") != "passed over"]
    rows += [r for r in skips if r.get("step") == step]
    return {k: float(rows[-1][k]) for k in NUMBERS if k in rows[-1]} if rows else {}


def _origin(
    config: TrainConfig, params: Tree, batch: Mapping[str, jax.Array], key: jax.Array, frozen: Tree
) -> Origin | None:
    config = dataclasses.replace(config, layout=None)
    blueprint, _ = blueprint_of(config)
    grads = make_loss_and_grads(blueprint, objective=config.objective, accumulate=config.accumulate)
    origins = (first_nonfinite(grads, p, b, key, frozen) for p, b in config.algorithm.copies(params, batch))
    return next((origin for origin in origins if origin is not None), None)


def _on_host(tree: Tree) -> Tree:
    return jax.tree.map(np.asarray, tree)


def _format(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in numbers.items())


def _nonfinite(part: str, tree: Tree) -> dict[str, int]:
    """Arrays with NaNs or infinities, by name, and how many each has."""
    counts: dict[str, int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            bad = int(np.size(x) - np.isfinite(np.asarray(x, np.float32)).sum())
            counts |= {f"{part}/{path_name(path)}": bad} if bad else {}
    return counts
