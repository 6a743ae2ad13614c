"""`session`: gradients, optimizer steps, samples and checkpoints of a run, for training loops that you write yourself.

with js.session(config) as s:
    for step in range(100):
        s.forward_backward(s.batch(step))
        s.optim_step()
    s.save()
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.data import Batch, to_devices
from jaxscale.data.loader import weighted
from jaxscale.errors import ConfigError, DataError, RunError, near
from jaxscale.layout import Layout
from jaxscale.nn.stats import TABLES
from jaxscale.run import Run
from jaxscale.step.backprop import Backprop, make_loss_and_grads, make_step
from jaxscale.step.blueprint import settled
from jaxscale.step.config import TrainConfig
from jaxscale.step.guards import Watched
from jaxscale.step.loss import AutoLoss
from jaxscale.step.objective import Input, Objective, Totals
from jaxscale.step.prepare import Prepared, prepare
from jaxscale.step.state import TrainState
from jaxscale.step.step import batch_shardings
from jaxscale.train.folders import choose_folder
from jaxscale.train.goodput import EVALUATING, OTHER, SAVING, STEPPING, Goodput
from jaxscale.train.record import Record
from jaxscale.train.report import Reporter
from jaxscale.train.run import RunFolder
from jaxscale.train.saved import Saved
from jaxscale.train.skips import SKIPS, Skips
from jaxscale.working_copy import local, mirrored

Tree = Any


def session(
    run: RunFolder | TrainConfig | str | Path,
    layout: Layout | None | EllipsisType = ...,
    *,
    folder: str | Path | None = None,
    resume: bool | str = False,
    name: str = "session",
    prepare: Callable[[TrainConfig], Prepared] = prepare,
    quiet: bool = True,
) -> TrainingSession:
    """Return a training session, to be used in a `with` statement; nothing is read or written before.

    Args:
      run: a run or its folder, which continues from its newest checkpoint; or settings, for a new run.
      layout: mesh and rules; by default the run's. `None` is one device.
      folder: for settings: the folder of the run, by default a new one, `runs/<name>-<n>`.
      resume: for settings: as in `fit`; "newest" continues from the newest checkpoint if there is one.
      name: prefix of new run folders.
      prepare: checks the run and opens its data, as in `fit`.
      quiet: print nothing but warnings.

    Raises:
      ConfigError: the algorithm has no gradients, or settings do not fit together.
    """
    if isinstance(run, TrainConfig):
        config = run if layout is ... else dataclasses.replace(run, layout=layout)
        config = config if resume is True else settled(config)
    else:
        if folder is not None or resume:
            raise ConfigError("session of a run continues in its folder; pass folder= and resume= with settings only")
        if not isinstance(run, RunFolder | str | Path):
            raise ConfigError(f"session takes a run, its folder, or a TrainConfig, not {run!r}")
        opened = run if isinstance(run, RunFolder) else RunFolder(run)
        config = opened.as_left(opened.config)
        config, folder, resume = (
            config if layout is ... else dataclasses.replace(config, layout=layout),
            opened.path,
            True,
        )
    if type(config.algorithm) is not Backprop:
        raise ConfigError(
            f"a session computes gradients and steps apart, which {config.algorithm.describe()} does not; set "
            "train.algorithm = @Backprop()"
        )
    return TrainingSession(config, None if folder is None else local(folder), resume, name, prepare, quiet)


class TrainingSession:
    """A run that is open for a loop of your own (see `session`); the same calls as in `fit` give the same bits.

    Args:
      config: the run's settings.
      folder: its folder, or `None` for a new one.
      resume: as in `fit`.
      name: prefix of new run folders.
      prepare: checks the run and opens its data.
      quiet: print nothing but warnings.

    Attributes:
      config: the run's settings.
      run: the run, with its state in memory.
      prepared: its blueprint and data.
    """

    run: Run
    prepared: Prepared

    def __init__(
        self,
        config: TrainConfig,
        folder: Path | None,
        resume: bool | str,
        name: str,
        prepare: Callable[[TrainConfig], Prepared],
        quiet: bool,
    ):
        self.config = config
        self._open = folder, resume, name, prepare
        self.reporter = Reporter(quiet or jax.process_index() != 0)
        self._stack, self._goodput = contextlib.ExitStack(), Goodput()
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._grads: Tree | None = None
        self._sums: dict[str, Any] = {}
        self._rows = self._saved_at = 0

    def __enter__(self) -> Self:
        """Check the settings, choose and lock the folder, and make or restore the state."""
        config, (path, resume, name, prepare) = self.config, self._open
        reporter = self.reporter
        if config.batching is not None:
            raise ConfigError("a session computes gradients of batches on one layout; leave out train.batching, or fit")
        self.prepared = prepare(config)
        folder, resuming, lock = choose_folder(config, path, resume, name, reporter.say)
        self.run = Run(folder, config)
        with contextlib.ExitStack() as stack:
            for context in (lock, config.layout):
                if context is not None:
                    stack.enter_context(context)
            stack.enter_context(self._goodput.compiles())
            self.run.mirror = stack.enter_context(mirrored(folder, self.run.is_main))
            self._checkpoints = self.run.checkpoints
            self._saved = Saved(self.run, self.prepared, self._checkpoints, reporter.say)
            state = self._saved.restore() if resuming else self.prepared.blueprint.init(config.seed)
            self._take(state)
            self._saved_at = self.step if resuming else 0
            self._record = Record(self.run, self.prepared, self._checkpoints, reporter.warn, self._goodput)
            self._files = self._record.begin(self.step)
            skips: Any = Skips(self.run.path / SKIPS)
            watched = Watched(config.layout, _NoRows(), skips, reporter.say, reporter.warn)  # type: ignore[arg-type]
            self._watches = [g.watch(watched) for g in config.guards]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the run's records; steps since the last `save` are in no checkpoint, and a warning says so."""
        with self._stack:
            for one in (*self._watches, *self._files):
                one.close()
            self._checkpoints.close()
            done = self.step >= self.config.steps
            status = "failed" if error is not None else "finished" if done else "paused"
            if self.run.is_main:
                self._record.status(status, self._saved_at, error)
            self._record.picture()
            self._record.finish()
        if error is None and self._saved_at < self.step:
            self.reporter.warn(f"steps {self._saved_at + 1} to {self.step} are in no checkpoint; call save() first")

    @property
    def state(self) -> TrainState:
        """The training state; `optim_step` replaces it, and its arrays are then deleted."""
        assert self.run.state is not None
        return self.run.state

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._step

    def batch(self, step: int) -> Batch:
        """Return the batch of the run's own data for a step, as `fit` would use it: arrays by name, (B, ...).

        Args:
          step: the step, from 0.
        """
        return self.prepared.loader.batch_at(step)

    def weights(self, batches: Sequence[Batch], objective: Objective | None = None) -> Totals:
        """Return the objective's weights of several batches together, for `forward_backward` of each of them.

        Args:
          batches: the batches of one optimizer step.
          objective: what to minimise; by default the run's.
        """
        objective = self.config.objective if objective is None else objective
        inputs = objective.inputs(self.config)
        whole = {k: np.concatenate([np.asarray(weighted(b)[k]) for b in batches]) for k in inputs}
        return objective.weights(whole, self.config.accumulate * len(batches))  # type: ignore[arg-type]

    def forward_backward(
        self, batch: Batch, objective: Objective | None = None, *, weights: Totals | None = None
    ) -> dict[str, float]:
        """Add a batch's gradients to those for the next `optim_step`, and return the objective's metrics.

        The values of several calls add up. To split one batch over several calls, pass the weights of all of it: the
        sum is then that of one call with the whole batch.

        Args:
          batch: arrays by name, (B, ...), as `objective.inputs` names them; B and lengths may differ between calls, and
            each new shape compiles again.
          objective: what to minimise; by default the run's.
          weights: from `weights`; by default of this batch alone.

        Raises:
          DataError: the batch has not the arrays that the objective needs.
          LayoutError: the layout does not divide the batch.
        """
        objective = self.config.objective if objective is None else objective
        placed = self._place(batch, objective)
        program = self._program(objective)
        self._goodput.phase(STEPPING)
        metrics, self._grads = program(self.state, placed, weights, self._grads)
        metrics.pop(TABLES, None)
        self._rows += len(placed["rows"])
        numbers = {k: float(v) for k, v in jax.device_get(metrics).items()}
        for name, value in numbers.items():
            self._sums[name] = self._sums.get(name, np.float32(0)) + np.float32(value)
        self._goodput.phase(OTHER)
        return numbers

    def optim_step(self, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Update the parameters by the gradients since the last step, and append a row to `metrics.jsonl`.

        Args:
          metrics: more numbers for the row.

        Returns:
          the row: `step`, `loss` (the sum of what `forward_backward` returned, as other metrics), `grad_norm`, `lr`;
          with `skipped` if a guard refused the update.

        Raises:
          RunError: there are no gradients.
          RollBack: a guard has refused too many updates in a row.
        """
        if self._grads is None:
            raise RunError("there are no gradients to step with; call forward_backward first")
        for watch in self._watches:
            watch.before(self.step + 1, self.state)
        self._goodput.phase(STEPPING)
        update = self._programs.setdefault("update", self._make_update())
        state, numbers = update(self.state, (self._grads, dict(self._sums)))
        self._grads, self._sums, self._rows = None, {}, 0
        self._take(state)
        row: dict[str, Any] = {"step": self.step, **{k: float(v) for k, v in jax.device_get(numbers).items()}}
        self._goodput.phase(OTHER)
        for watch in self._watches:
            watch.after(self.step, row)
        self._write({**row, **(metrics or {})})
        return row

    def skip_step(self, why: str, metrics: Mapping[str, float] | None = None) -> None:
        """Count a step without an update, drop its gradients, and record why in `skipped.jsonl`.

        Args:
          why: the reason, such as "the reward raised an error".
          metrics: more numbers for the row of `metrics.jsonl`.
        """
        self._grads, self._sums, self._rows = None, {}, 0
        self._take(self.state.replace(step=self.state.step + 1))
        Skips(self.run.path / SKIPS).refused(self.step, why, {}, np.zeros(0, np.int64))
        self.reporter.warn(f"step {self.step} is skipped: {why}")
        self._write({"step": self.step, "loss": float("nan"), "skipped": why, **(metrics or {})})

    def sample(self, prompts: Any, **options: Any) -> Any:
        """Generate with the parameters as they are now; see `jaxscale.infer.generate`.

        Args:
          prompts: a text or token ids, or a list of either.
          **options: see `jaxscale.infer.generate`.
        """
        self._goodput.phase(EVALUATING)
        completions = self.run.generate(prompts, **options)
        self._goodput.phase(OTHER)
        return completions

    def logprobs(self, sequences: Sequence[Any], *, rows: int = 8) -> list[np.ndarray]:
        """Return the log-probability of every token but the first of each sequence, float32, in nats.

        Args:
          sequences: token ids, (t,) each; the model sees at most `train.seq_len` of them at once.
          rows: rows that are computed at once.
        """
        from jaxscale.infer.loaded import load_model
        from jaxscale.infer.score import log_probabilities

        loss = getattr(self.config.objective, "loss", AutoLoss())
        ids = [np.asarray(s, np.int32) for s in sequences]
        return log_probabilities(load_model(self.run), ids, length=self.config.seq_len, loss=loss, rows=rows)

    def save(self) -> int:
        """Write a checkpoint and wait until it is on disk; return its step."""
        self._goodput.phase(SAVING)
        for watch in self._watches:
            watch.before_save(self.state)
        self._saved.save(self.state)
        self._checkpoints.wait()
        self._saved_at = self.step
        self._goodput.phase(OTHER)
        return self.step

    # Helpers

    def _take(self, state: TrainState) -> None:
        self.run.state, self._step = state, int(state.step)

    def _write(self, row: dict[str, Any]) -> None:
        row = {**row, **self._goodput.row(), "time": time.time()}
        for file in self._files:
            file.write(row)

    def _place(self, batch: Batch, objective: Objective) -> dict[str, jax.Array]:
        """Check a batch and bring it to its devices, with the numbers of its rows."""
        declared, batch = objective.inputs(self.config), weighted(batch)
        kind = type(objective).__name__
        inputs: dict[str, Input] = {}
        for name, i in declared.items():
            if name not in batch:
                raise DataError(f"{kind} needs an array '{name}', and the batch has none{near(name, batch)}")
            x = np.asarray(batch[name])
            if x.ndim != 1 + len(i.shape) or x.dtype != np.dtype(i.dtype):
                dims = ("B", *map(str, i.shape))
                raise DataError(
                    f"{kind} needs '{name}' of shape ({', '.join(dims)}) and dtype {i.dtype}, and the batch has "
                    f"{x.shape} {x.dtype}"
                )
            inputs[name] = Input(x.shape[1:], i.dtype, i.axes)
        counts = {name: len(np.asarray(batch[name])) for name in inputs}
        rows = next(iter(counts.values()))
        if len(set(counts.values())) > 1 or rows == 0 or rows % (self.config.accumulate * objective.group):
            raise DataError(
                f"a batch of {kind} needs arrays of equally many rows, a multiple of "
                f"{self.config.accumulate * objective.group}, and it has {counts}"
            )
        numbers = np.arange(self._rows, self._rows + rows, dtype=np.int32)
        whole = {**{name: np.asarray(batch[name]) for name in inputs}, "rows": numbers}
        shardings = batch_shardings(self.config.layout, {**inputs, "rows": Input((), "int32", ())}, rows)
        return to_devices(lambda _: whole, 0, shardings)

    def _program(self, objective: Objective) -> Callable[..., Any]:
        """Return the compiled gradients of an objective, which are added to those before."""
        if objective not in self._programs:
            objective.check(self.config)
            blueprint, own = self.prepared.blueprint, self.config.objective
            if objective.reference and not (own.reference and objective.teacher == own.teacher):
                raise ConfigError(
                    f"{type(objective).__name__} compares with a frozen model that this session has not read; open the "
                    "session with train.objective set to an objective with that model"
                )
            gradients = make_loss_and_grads(blueprint, objective=objective, accumulate=self.config.accumulate)

            def program(state: TrainState, batch: Tree, weights: Totals | None, before: Tree | None) -> Any:
                key = jax.random.fold_in(state.rng, state.step)
                metrics, grads = gradients(state.params, batch, key, state.frozen, weights)
                if before is not None:
                    grads = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), before, grads)
                return metrics, grads

            self._programs[objective] = jax.jit(program, donate_argnums=3)
        return self._programs[objective]

    def _make_update(self) -> Callable[..., Any]:
        prepared = self.prepared

        def computed(params: Tree, batch: Any, key: Any, frozen: Tree) -> tuple[Any, Tree]:
            grads, sums = batch
            return dict(sums), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

        step = make_step(computed, prepared.blueprint.tx, prepared.schedule, self.config.guards)
        layout = prepared.blueprint.layout
        results = None if layout is None else (prepared.blueprint.shardings(), layout.replicated)
        return jax.jit(step, donate_argnums=0, out_shardings=results)


class _NoRows:
    """Stands for the loader of a run's batches: those of a session are the caller's, without numbers."""

    def ids_at(self, step: int) -> np.ndarray:
        return np.zeros(0, np.int64)
