"""The training loop: a run from its first step, or the step of a checkpoint, to its last."""

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
from jaxscale.step.config import TrainConfig
from jaxscale.step.guards import RollBack, Watched
from jaxscale.step.prepare import Prepared
from jaxscale.step.rates import examples, model_flops, peak_flops
from jaxscale.step.state import TrainState
from jaxscale.train import agree
from jaxscale.train.record import Record
from jaxscale.train.report import Reporter
from jaxscale.train.run import RunFolder
from jaxscale.train.saved import Saved
from jaxscale.train.skips import SKIPS, Skips
from jaxscale.train.snapshots import taker
from jaxscale.train.watchdog import watching

RETURNS = 3
"""How often a run goes back without a step beyond the one at which it turned, before it gives up."""


@dataclasses.dataclass(frozen=True)
class Services:
    """What a training run asks of generation and planning, which are not below it; `jaxscale.fit` passes both.

    Args:
      sample: (run, prompt) -> the text behind a prompt at the end of a run, or `None` for no sample.
      out_of_memory: (what the compiler or device said, settings) -> the error to raise in its place, which says what
        takes how much; `None` where it was about something else.
    """

    sample: Callable[[RunFolder, str], str | None] = lambda run, prompt: None
    out_of_memory: Callable[[Exception, TrainConfig], Exception | None] = lambda error, config: None


class Loop:
    """One run from its first step, or the step of a checkpoint, to its last."""

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
    ):
        self.config, self.prepared, self.run, self.reporter = config, prepared, run, reporter
        self.profile, self.last, self.signals, self.stop = profile, last, signals, stop
        self.profiling, self.services = False, services
        self.main = jax.process_index() == 0
        self.checkpoints = run.checkpoints
        self.saved = Saved(run, prepared, self.checkpoints, reporter.say)
        self.record = Record(run, prepared, self.checkpoints, reporter.warn)
        self.skips = Skips(run.path / SKIPS)
        self.skips.passed = set(agree.broadcast(sorted(self.skips.passed)))
        watched = Watched(config.layout, prepared.loader, self.skips, reporter.say, reporter.warn)
        self.watches = [g.watch(watched) for g in config.guards]
        self.now = self.furthest = self.returns = self.offence = 0
        self.step = prepared.step_of(config)
        self.evaluate = prepared.eval_of(config)
        self.flops = model_flops(config)
        self.unit, self.examples = examples(config)
        devices = 1 if config.layout is None else config.layout.devices
        peak = peak_flops(jax.devices()[0])
        self.peak = None if peak is None else peak * devices
        # Simulated devices and processes deadlock when steps pile up; a real accelerator keeps one in flight.
        self.lag = 0 if jax.default_backend() == "cpu" else 1

    def train(self, resuming: bool) -> None:
        """Runs it; the folder tells the story even when this raises, or another process ends."""
        with watching(self.config.watchdog, self.run.path, self.checkpoints.steps, self._ended) as self.watchdog:
            self._train(resuming)

    def _train(self, resuming: bool) -> None:
        config, reporter = self.config, self.reporter
        self.watchdog.phase(0, "first state", disk=True)
        self.snapshots = taker(config.snapshots, self.run.path)
        state = self.saved.first(self.snapshots, resuming)
        first = int(state.step)
        if first >= self.last:
            more = "until" if self.last < config.steps else "train.steps"
            raise RunError(f"{self.run.path} has already taken {first} of {self.last} steps; raise {more} to go on")
        reporter.announce(config, self.prepared, self.run.path, first)
        files: list[Any] = []
        status = "failed"
        try:
            files += self.record.begin(first)
            self.snapshots.begin(state, self.saved.facts())
            state = self._to_the_end(state, files)
            self.watchdog.phase(int(state.step), "end of the last save", disk=True)
            self.checkpoints.close()
            status = self._status(int(state.step))
        finally:
            reporter.stop()
            self._end_profile()
            for one in (*self.watches, *files):
                with contextlib.suppress(*([OSError] if status == "failed" else [])):  # a full disk says so once
                    one.close()
            self.snapshots.close(forget=status != "failed")
            if status == "failed" and jax.process_count() == 1:  # others may never come to this one's barriers
                with contextlib.suppress(CheckpointError):
                    self.checkpoints.close()
            if self.main:
                with contextlib.suppress(*([RunError] if status == "failed" else [])):  # what failed says more
                    self.record.status(status, self.saved.last_step(), sys.exception() if status == "failed" else None)
        self.run.state = state
        asked = self.signals.get("signal")
        self.run.stopped_by = asked if status == "stopped" and asked in STOPS else None
        self._afterwards(int(state.step), status)

    def _afterwards(self, step: int, status: str) -> None:
        """A picture of the run, and a sample or why it is not finished."""
        config, say = self.config, self.reporter.say
        self.watchdog.phase(step, "picture and sample", disk=True)
        self.record.picture()
        if status != "finished":
            why = f"stopped by {self.signals['signal']}" if status == "stopped" else f"paused, {config.steps} to go to,"
            say(f"{why} after step {step}; its checkpoint is written")
        elif config.prompt is not None:
            text = self.services.sample(self.run, config.prompt)
            if text is not None:
                self.record.sample(step, config.prompt, text)
                say(f"\na sample, continuing {config.prompt!r}:\n\n{text}\n")

    def _status(self, step: int) -> str:
        if step == self.config.steps:
            return "finished"
        return "paused" if step == self.last else "stopped"

    def _to_the_end(self, state: TrainState, files: list[Any]) -> TrainState:
        """Every step and the last checkpoint, however often a guard asks for the way back."""
        while True:
            try:
                state = self._steps(state, int(state.step), files)
                self.reporter.stop()
                self.watchdog.phase(int(state.step), "last save", disk=True)
                self._save(state)
                return state
            except RollBack as asked:
                back = asked.with_traceback(None)  # which holds on to the state that is left behind
            self.reporter.stop()
            del state
            state = self._roll_back(back)

    def _roll_back(self, back: RollBack) -> TrainState:
        self.watchdog.phase(self.now, "going back", disk=True)
        self.checkpoints.wait()
        self.snapshots.forget()
        target = agree.broadcast(self.saved.last_step())
        if self.returns == 0:
            self.offence = back.steps[0] if back.steps else self.now
        if self.returns == RETURNS:
            raise RunError(
                f"{back}; the run went back {RETURNS} times, and got no further than step {self.offence}. See where "
                f"its numbers go wrong with jaxscale replay {self.run.path} --step {self.offence}, or start a run with "
                f"a train.lr below {self.config.lr:g}"
            )
        self.returns, self.furthest = self.returns + 1, self.now
        self.skips.pass_over(back.steps, target, str(back))
        over = f", and passes over {_spans(back.steps)} from now on" if back.steps else ""
        self.reporter.warn(f"{back}; the run goes back to step {target}{over}")
        return self.saved.restore() if target else self.prepared.blueprint.init(self.config.seed)

    def _steps(self, state: TrainState, first: int, files: list[Any]) -> TrainState:
        config = self.config
        pending: list[tuple[int, dict[str, jax.Array]]] = []
        self.reporter.start(self.last, first)
        self.clock = time.perf_counter()
        self.spent, self.timed = 0.0, 0
        for done in range(first, self.last):
            now = self.now = done + 1
            self.watchdog.phase(now, "guards")
            for watch in self.watches:
                watch.before(now, state)
            with self._profiled(now), jax.profiler.StepTraceAnnotation("train", step_num=now), self._memory_said():
                state, metrics = self._pass_over(state) if now in self.skips.passed else self._take(state, done)
                metrics |= self.snapshots.after(now, state)
            pending.append((now, metrics))
            self.checkpoints.check()
            stopping = self._stopping(now)
            last = stopping or now == self.last
            evaluate = bool(config.eval_batches) and (now == self.last or _every(config.eval_every, now))
            save = not last and _every(config.checkpoint_every, now)
            while len(pending) > (0 if evaluate or last or save else self.lag):
                step, metrics = pending.pop(0)
                row = self._numbers(step, metrics)
                for watch in self.watches:
                    watch.after(step, row)
                if step > self.furthest and "skipped" not in row:
                    self.returns = 0
                if evaluate and step == now:
                    self.watchdog.phase(now, "evaluation")
                    for corpus, batches in self.prepared.heldout.items():
                        row |= self._eval(state, corpus, batches)
                self._write(row, files)
            if save:
                self.watchdog.phase(now, "save", disk=True)
                self._save(state)
            if save or evaluate:
                self.clock = time.perf_counter()  # what was not training is not in the next step's time
            if stopping:
                break
        return state

    @contextlib.contextmanager
    def _memory_said(self) -> Iterator[None]:
        """A step that does not fit the devices is told of as `explain` does."""
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            report = self.services.out_of_memory(e, self.config)
            if report is None:
                raise
            raise report from None

    def _take(self, state: TrainState, done: int) -> tuple[TrainState, dict[str, jax.Array]]:
        self.watchdog.phase(done + 1, "data")
        batch = self._place(done)
        self.watchdog.phase(done + 1, "step", disk=self.profile is not None)  # which is written at its end
        return self.step(state, batch)

    def _pass_over(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """A step that is not taken: the data moves on and nothing else."""
        nothing = np.float32(np.nan)
        return state.replace(step=state.step + 1), {"loss": nothing, "grad_norm": nothing}

    def _numbers(self, step: int, metrics: dict[str, jax.Array]) -> dict[str, Any]:
        """Fetches a step's numbers, waiting for it."""
        waiting = time.perf_counter()
        numbers = {k: float(v) for k, v in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        if self.timed or self.spent:
            self.timed, self.spent = self.timed + 1, self.spent + seconds
        else:
            self.spent = 1e-9  # the first step compiles: it is left out of the estimate
        row: dict[str, Any] = {"step": step, **numbers}
        if step in self.skips.passed:
            row["skipped"] = "passed over"
        row[f"{self.unit}_per_second"] = self.examples / seconds
        if self.flops is not None:
            row["model_flops_per_second"] = self.flops / seconds
        row["host_seconds"] = max(seconds - (now - waiting), 0.0)  # not spent waiting for devices
        return row

    def _write(self, row: dict[str, Any], files: list[Any]) -> None:
        row["time"] = time.time()
        for file in files:
            file.write(row)
        left = self.spent / self.timed * (self.last - row["step"]) if self.timed else None  # of the first: not known
        share = None if self.peak is None or self.flops is None else row["model_flops_per_second"] / self.peak
        self.reporter.step(row, self.last, left, share)

    def _eval(self, state: TrainState, corpus: str, batches: list[Batch]) -> dict[str, float]:
        """What the objective reports of held-out batches: `eval_loss`, of a further corpus `eval_loss/NAME`."""
        params = self.prepared.blueprint.weights(state)
        more = (state.frozen,) if self.prepared.blueprint.reference else ()
        totals: Any = None
        for i in range(len(batches)):
            part = jax.device_get(self.evaluate(params, self.prepared.place(batches.__getitem__, i), *more))
            part = jax.tree.map(np.float64, part)
            totals = part if totals is None else jax.tree.map(np.add, totals, part)
        if not any(np.any(b.get("weights", 1)) for b in batches):
            raise RunError("the held-out batches have no weighted row; raise train.eval_batches or the held-out part")
        objective = self.config.objective
        metrics = objective.metrics(totals)
        return {f"eval_{name}{corpus}": float(metrics[name]) for name in objective.evaluated}

    def _place(self, step: int) -> dict[str, jax.Array]:
        return self.prepared.place(self.prepared.loader, step)

    def _save(self, state: TrainState) -> None:
        for watch in self.watches:
            watch.before_save(state)
        self.saved.save(state)

    def _stopping(self, step: int) -> bool:
        """Whether any process was asked to stop; all answer alike."""
        if self.stop is not None and self.stop():
            self.signals.setdefault("signal", "request")
        if jax.process_count() == 1:
            return bool(self.signals)
        if step % 10:
            return False
        self.watchdog.phase(step, "agreeing to go on")
        from jax.experimental import multihost_utils

        names = ["", "request", *STOPS]
        mine = np.asarray([names.index(self.signals.get("signal", ""))])
        asked = int(np.max(multihost_utils.process_allgather(mine)))
        if asked:
            self.signals["signal"] = names[asked]  # so that all end with the same exit code
        return bool(asked)

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
            with contextlib.suppress(RuntimeError):  # jax 0.11 has among them what a step was given to overwrite
                array.block_until_ready()
        jax.profiler.stop_trace()
        path = self.run.path
        self.reporter.say(f"a profile is in {path / 'profile'}; jaxscale plan {path} --measured reads it")

    def _ended(self) -> None:
        """Another process failed, and this one's main thread may wait for it."""
        if self.run.info["status"] == "running":
            self.record.status("failed", self.saved.last_step())


def _spans(steps: Sequence[int]) -> str:
    """Consecutive steps in words."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _every(period: int, step: int) -> bool:
    return bool(period) and step % period == 0
