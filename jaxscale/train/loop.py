"""The training loop: steps, evaluations and checkpoints, from the first step or a checkpoint's to the last."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxscale.data import Batch
from jaxscale.errors import CheckpointError, RunError
from jaxscale.interrupts import STOPS
from jaxscale.nn.stats import TABLES
from jaxscale.step.by_degree import Dealt
from jaxscale.step.config import TrainConfig
from jaxscale.step.guards import RollBack, Watched
from jaxscale.step.histograms import HISTOGRAMS
from jaxscale.step.prepare import Prepared
from jaxscale.step.rates import examples, model_flops, peak_flops
from jaxscale.step.stage_order import in_layers, in_stages
from jaxscale.step.state import TrainState
from jaxscale.train import agree, expert_load
from jaxscale.train.calls import Calls
from jaxscale.train.folders import remove_unbegun
from jaxscale.train.goodput import OTHER, STEPPING, Goodput, sentence
from jaxscale.train.peers import group_of
from jaxscale.train.record import Record
from jaxscale.train.report import Reporter
from jaxscale.train.run import RunFolder
from jaxscale.train.saved import Saved
from jaxscale.train.skips import SKIPS, Skips
from jaxscale.train.snapshots import taker
from jaxscale.train.watchdog import watching

RETURNS = 3
"""A run fails when a guard rolls it back once more than this without a step beyond where it was rolled back."""


def _no_sample(run: RunFolder, prompt: str) -> None:
    """Sample nothing."""


def _other_error(error: Exception, config: TrainConfig) -> None:
    """Leave every error as it is."""


@dataclasses.dataclass(frozen=True)
class Services:
    """Generation and planning for the training loop, which may not import them; `jaxscale.fit` passes both.

    Args:
      sample: (run, prompt) -> the prompt's continuation, sampled at the end of a run, or `None` for no sample.
      out_of_memory: (error of the compiler or device, settings) -> the error to raise instead, which lists what takes
        how much memory; `None` if the error is about something else.
    """

    sample: Callable[[RunFolder, str], str | None] = _no_sample
    out_of_memory: Callable[[Exception, TrainConfig], Exception | None] = _other_error


class Loop:
    """Trains one run, from its first step or a checkpoint's, to its last.

    Args:
      config: the run's settings.
      prepared: its compiled parts and data.
      run: its folder.
      reporter: prints progress.
      profile: (first, last) step to profile, or `None`.
      last: the step to stop after.
      signals: filled in by `stop_signals` when the run should stop.
      stop: as in `fit`.
      services: generation and planning.
      goodput: counts the time of this session since it began.
    """

    def __init__(
        self,
        config: TrainConfig,
        prepared: Prepared,
        run: RunFolder,
        reporter: Reporter,
        profile: tuple[int, int] | None,
        last: int,
        signals: dict[str, str],
        stop: Callable[[], bool] | None,
        services: Services,
        goodput: Goodput,
    ):
        self.config, self.prepared, self.run, self.reporter = config, prepared, run, reporter
        self.profile, self.last, self.signals, self.stop = profile, last, signals, stop
        self.profiling, self.services, self.goodput = False, services, goodput
        self.main = jax.process_index() == 0
        self.checkpoints = run.checkpoints
        self.saved = Saved(run, prepared, self.checkpoints, reporter.say)
        self.record = Record(run, prepared, self.checkpoints, reporter.warn, goodput)
        self.skips = Skips(run.path / SKIPS)
        self.skips.passed = set(agree.broadcast(sorted(self.skips.passed)))
        self.group = group_of(config, prepared, run.place, reporter.say, lambda: bool(signals))
        self.by_stage = prepared.staged
        self.calls = Calls(run, self.by_stage, self._request_stop)
        self.now = self.furthest = self.returns = self.offence = 0
        self.pending: list[tuple[int, dict[str, jax.Array]]] = []  # steps whose numbers the loop has not waited for
        self.step = dataclasses.replace(prepared, blueprint=self.by_stage).step_of(config)
        self.evaluate = prepared.eval_of(config)
        self.flops = model_flops(config)
        self.unit, self.examples = examples(config)
        devices = 1 if config.layout is None else config.layout.devices
        peak = peak_flops(jax.devices()[0])
        self.peak = None if peak is None else peak * devices
        # Simulated devices and processes deadlock when steps pile up; a real accelerator keeps one in flight.
        self.lag = 0 if jax.default_backend() == "cpu" else 1

    def train(self, resuming: bool) -> None:
        """Train; `run.json` is updated even if this raises, or another process fails."""
        with watching(self.config.watchdog, self.run.path, self.checkpoints.steps, self._mark_failed) as self.watchdog:
            try:
                with self.goodput.compiles():
                    self._train(resuming)
            finally:
                self.record.finish()

    def _phase(self, step: int, name: str, *, disk: bool = False) -> None:
        """Begin a phase, as the watchdog and the goodput call it."""
        self.watchdog.phase(step, name, disk=disk)
        self.goodput.phase(name, hidden=self._stepping_behind())

    def _stepping_behind(self) -> bool:
        """Whether the devices still take a step, so that what the host did meanwhile cost no time."""
        if not self.pending:
            return False
        ready = [getattr(x, "is_ready", None) for x in self.pending[-1][1].values()]  # numbers of NumPy have none
        return any(is_ready is not None and not is_ready() for is_ready in ready)

    def _train(self, resuming: bool) -> None:
        config, reporter = self.config, self.reporter
        self._phase(0, "first state", disk=True)
        self.snapshots = taker(config.snapshots, self.run.path)
        state = self.saved.first(self.snapshots, resuming)
        first = int(state.step)
        if first == self.last and self._complete(first):
            self.run.state = state
            return
        if first < self.last:
            state = self._join(state)
            first = int(state.step)
        if first >= self.last:
            more = "until" if self.last < config.steps else "train.steps"
            raise RunError(f"{self.run.place} has already taken {first} of {self.last} steps; raise {more} to go on")
        watched = Watched(config.layout, self.prepared.loader, self.skips, reporter.say, reporter.warn)
        self.watches = [g.watch(watched) for g in config.guards]
        reporter.announce(config, self.prepared, self.run.place, first)
        files: list[Any] = []
        status = "failed"
        try:
            files += self.record.begin(first)
            self.snapshots.begin(state, self.saved.facts())
            state = self._run_to_end(state, files)
            self._phase(int(state.step), "end of the last save", disk=True)
            self.checkpoints.close()
            status = self._status(int(state.step))
        finally:
            reporter.stop()
            self.pending = []
            self._end_profile()
            for one in (*self.watches, *files):
                with contextlib.suppress(*([OSError] if status == "failed" else [])):  # keep the first error
                    one.close()
            self.snapshots.close(forget=status != "failed")
            self.group.leave(finished=status == "finished")
            if status == "failed" and jax.process_count() == 1:  # other processes may never reach its barriers
                with contextlib.suppress(CheckpointError):
                    self.checkpoints.close()
            if self.main:
                with contextlib.suppress(*([RunError, CheckpointError] if status == "failed" else [])):
                    self.record.status(status, self.saved.last_step(), sys.exception() if status == "failed" else None)
        self.run.state = state
        if self.main:
            reporter.say(sentence(self.run.info["goodput"]))
        signal = self.signals.get("signal")
        self.run.stopped_by = signal if status == "stopped" and signal in STOPS else None
        self._conclude(int(state.step), status)

    def _join(self, state: TrainState) -> TrainState:
        """Join the group of peers, if there is one, before anything is written."""
        try:
            self.prepared, state = self.group.join(self.prepared, state)
        except BaseException:
            self.group.leave(finished=False)
            if self.main:
                remove_unbegun(self.run.path)
            raise
        return state

    def _complete(self, step: int) -> bool:
        """Upload and write what a process left undone that ended after its last checkpoint; `False` if nothing is."""
        left = self.main and (self.run.mirror.behind or self.checkpoints.behind() or self.record.is_open())
        if not agree.broadcast(left):
            return False
        self._phase(step, "end of the last save", disk=True)
        self.checkpoints.close()
        if self.main:
            self.record.complete(self._status(step), step)
        self.reporter.say(f"{self.run.place} has all {step} steps; what was not written or uploaded at its end is now")
        return True

    def _conclude(self, step: int, status: str) -> None:
        """Draw the loss, then print a sample, or why the run is unfinished."""
        config, say = self.config, self.reporter.say
        self._phase(step, "picture and sample", disk=True)
        self.record.picture()
        if self.prepared.by_degree is not None and self.main:
            say(self.prepared.by_degree.summary())
        if status != "finished":
            why = f"stopped by {self.signals['signal']}" if status == "stopped" else "paused"
            say(f"{why} after step {step} of {config.steps}; its checkpoint is written")
        elif config.prompt is not None:
            text = self.services.sample(self.run, config.prompt)
            if text is not None:
                self.record.sample(step, config.prompt, text)
                say(f"\na sample, continuing {config.prompt!r}:\n\n{text}\n")

    def _status(self, step: int) -> str:
        if step == self.config.steps:
            return "finished"
        return "paused" if step == self.last else "stopped"

    def _run_to_end(self, state: TrainState, files: list[Any]) -> TrainState:
        """Take all steps and save the last checkpoint, rolling back whenever a guard requests it."""
        while True:
            try:
                state = self._steps(state, int(state.step), files)
                self.reporter.stop()
                self._phase(int(state.step), "last save", disk=True)
                state = self._save(state)
                self.calls.call("on_end", state)
                return in_layers(self.by_stage, state)
            except RollBack as e:
                back = e.with_traceback(None)  # the traceback keeps the abandoned state alive
            self.reporter.stop()
            del state
            state = self._roll_back(back)

    def _roll_back(self, back: RollBack) -> TrainState:
        self._phase(self.now, "going back", disk=True)
        self.checkpoints.wait()
        self.snapshots.forget()
        target = agree.broadcast(self.saved.last_step())
        if self.returns == 0:
            self.offence = back.steps[0] if back.steps else self.now
        if self.returns == RETURNS:
            raise RunError(
                f"{back}; the run was rolled back {RETURNS} times and got no further than step {self.offence}. Find "
                f"where its numbers go wrong with jaxscale replay {self.run.place} --step {self.offence}, or start "
                f"a run with a train.lr below {self.config.lr:g}"
            )
        self.returns, self.furthest = self.returns + 1, self.now
        self.skips.pass_over(back.steps, target, str(back))
        skipping = f", and will skip {_spans(back.steps)}" if back.steps else ""
        self.reporter.warn(f"{back}; the run goes back to step {target}{skipping}")
        self.goodput.rolled_back(self.run.metrics() if self.main else [], target)
        if self.main:
            self.record.status("running", target)
        return self.saved.restore() if target else self.prepared.blueprint.init(self.config.seed)

    def _steps(self, state: TrainState, first: int, files: list[Any]) -> TrainState:
        config = self.config
        pending = self.pending = []
        self.reporter.start(self.last, first)
        self.clock = time.perf_counter()
        self.spent, self.timed = 0.0, 0
        state = in_stages(self.by_stage, state)
        for done in range(first, self.last):
            now = self.now = done + 1
            self._phase(now, "guards")
            for watch in self.watches:
                watch.before(now, state)
            with self._profiled(now), jax.profiler.StepTraceAnnotation("train", step_num=now), self._explain_memory():
                state, metrics = self._pass_over(state) if now in self.skips.passed else self._take(state, done)
                if self.group.due(now):
                    self._phase(now, "peers", disk=True)
                    state, more = self.group.exchange(now, state)
                    metrics |= more
                if self.snapshots.due(now):
                    state = in_layers(self.by_stage, state)
                    metrics |= self.snapshots.after(now, state)
                    state = in_stages(self.by_stage, state)
            pending.append((now, metrics))
            self.checkpoints.check()
            self.run.mirror.check()
            stopping = self._stopping(now)
            last = stopping or now == self.last
            evaluate = bool(config.eval_batches) and (now == self.last or _every(config.eval_every, now))
            save = not last and _every(config.checkpoint_every, now)
            while len(pending) > (0 if evaluate or last or save else self.lag):
                step, metrics = pending.pop(0)
                counts: Any = metrics.pop(HISTOGRAMS, {})
                tables: Any = metrics.pop(TABLES, {})
                row = self._numbers(step, metrics)
                for watch in self.watches:
                    watch.after(step, row)
                if step > self.furthest and "skipped" not in row:
                    self.returns = 0
                if evaluate and step == now:
                    self._phase(now, "evaluation")
                    for corpus, batches in self.prepared.heldout.items():
                        row |= self._eval(state, corpus, batches)
                if config.callbacks:
                    self._phase(now, "callbacks", disk=True)
                    self.calls.step(row, state, evaluate and step == now)
                self._write(row, files)
                if counts and config.histograms is not None and _every(config.histograms.every, step):
                    self.record.histograms(step, counts)
                if tables and (step == self.last or _every(expert_load.every(config.steps), step)):
                    self.record.experts(step, tables)
                if evaluate and step == now and now < self.last:
                    self.record.progress(now)
            if save:
                self._phase(now, "save", disk=True)
                state = self._save(state)
            if save or evaluate:
                self.clock = time.perf_counter()  # do not count this time in the next step's
            if stopping:
                break
        return state

    @contextlib.contextmanager
    def _explain_memory(self) -> Iterator[None]:
        """Replace an out-of-memory error by one that lists what takes how much memory."""
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            report = self.services.out_of_memory(e, self.config)
            if report is None:
                raise
            raise report from None

    def _take(self, state: TrainState, done: int) -> tuple[TrainState, dict[str, jax.Array]]:
        self._phase(done + 1, "data")
        batch = self._place(done)
        self._phase(done + 1, "step", disk=self.profile is not None)  # a profile is written at its end
        return self.step(state, batch)

    def _pass_over(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Skip a step: count it, so that its batch is not used, and change nothing else."""
        missing = np.float32(np.nan)
        return state.replace(step=state.step + 1), {"loss": missing, "grad_norm": missing}

    def _numbers(self, step: int, metrics: dict[str, jax.Array]) -> dict[str, Any]:
        """Wait for a step and return its metrics."""
        self.goodput.phase(STEPPING)
        waiting = time.perf_counter()
        numbers = {k: float(v) for k, v in jax.device_get(metrics).items()}
        now = time.perf_counter()
        self.goodput.phase(OTHER)
        seconds, self.clock = now - self.clock, now
        if self.timed or self.spent:
            self.timed, self.spent = self.timed + 1, self.spent + seconds
        else:
            self.spent = 1e-9  # leave the first step, which compiles, out of the estimate
        row: dict[str, Any] = {"step": step, **numbers}
        if step in self.skips.passed:
            row["skipped"] = "passed over"
        row[f"{self.unit}_per_second"] = self.examples / seconds
        if self.flops is not None:
            row["model_flops_per_second"] = self.flops / seconds
        row["host_seconds"] = max(seconds - (now - waiting), 0.0)  # not spent waiting for devices
        return row

    def _write(self, row: dict[str, Any], files: list[Any]) -> None:
        self.goodput.phase(OTHER)
        row |= self.goodput.row()
        row["time"] = time.time()
        for file in files:
            file.write(row)
        remaining = self.spent / self.timed * (self.last - row["step"]) if self.timed else None
        share = None if self.peak is None or self.flops is None else row["model_flops_per_second"] / self.peak
        self.reporter.step(row, self.last, remaining, share, self.goodput.share)

    def _eval(self, state: TrainState, corpus: str, batches: list[Batch]) -> dict[str, float]:
        """Evaluate held-out batches: `eval_loss` and the like, of a further corpus `eval_loss/NAME`."""
        params = self.by_stage.weights(state)
        more = (state.frozen,) if self.prepared.blueprint.reference else ()
        totals: Any = None
        for i in range(len(batches)):
            part = jax.device_get(self.evaluate(params, self.prepared.place(batches.__getitem__, i), *more))
            part = jax.tree.map(np.float64, part)
            totals = part if totals is None else jax.tree.map(np.add, totals, part)
        if not any(np.any(b.get("weights", 1)) for b in batches):
            raise RunError(
                "all rows of the held-out batches have weight 0; raise train.eval_batches or the held-out fraction"
            )
        objective = self.config.objective
        metrics = objective.metrics(totals)
        return {f"eval_{name}{corpus}": float(metrics[name]) for name in objective.evaluated}

    def _place(self, step: int) -> dict[str, jax.Array] | Dealt:
        return self.prepared.place_step(step)

    def _save(self, state: TrainState) -> TrainState:
        """Save a state, and return it with other arrays if its layers were put in order."""
        for watch in self.watches:
            watch.before_save(state)
        state = in_layers(self.by_stage, state)
        self.saved.save(state)
        state = in_stages(self.by_stage, state)
        self.calls.call("on_checkpoint", state)
        return state

    def _request_stop(self) -> None:
        self.signals.setdefault("signal", "request")

    def _stopping(self, step: int) -> bool:
        """Whether any process has to stop; the same on all processes."""
        if self.stop is not None and self.stop():
            self._request_stop()
        if jax.process_count() == 1:
            return bool(self.signals)
        if step % 10:
            return False
        self._phase(step, "agreeing to go on")
        from jax.experimental import multihost_utils

        names = ["", "request", *STOPS]
        mine = np.asarray([names.index(self.signals.get("signal", ""))])
        signal = int(np.max(multihost_utils.process_allgather(mine)))
        if signal:
            self.signals["signal"] = names[signal]  # so that all end with the same exit code
        return bool(signal)

    @contextlib.contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        first, last = self.profile or (0, -1)
        if first <= step <= last and not self.profiling:
            jax.profiler.start_trace(str(self.run.path / "profile"))
            self.profiling = True
        yield
        if step == last:
            self._end_profile()

    def _end_profile(self) -> None:
        if not self.profiling:
            return
        self.profiling = False
        for array in jax.live_arrays():
            with contextlib.suppress(RuntimeError):  # in jax 0.11 donated arrays are among them
                array.block_until_ready()
        jax.profiler.stop_trace()
        place = self.run.place
        self.reporter.say(f"the profile is in {place}/profile; read it with jaxscale plan {place} --measured")

    def _mark_failed(self) -> None:
        """Write to `run.json` that the run failed; called on another thread when another process has failed."""
        if self.run.info["status"] == "running":
            self.record.status("failed", self.saved.last_step())
            self.run.mirror.flush()


def _spans(steps: Sequence[int]) -> str:
    """Describe consecutive steps."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _every(period: int, step: int) -> bool:
    return bool(period) and step % period == 0
