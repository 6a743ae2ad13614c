"""Small sweeps: a run's text, a runner whose runs are told what their losses are, and a sweep on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale import config
from jaxscale.sweep import Result, Sweep, sweep_of
from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, STOPPED, Job
from jaxscale.sweep.jobs import config_of, sizes
from jaxscale.sweep.outcomes import Outcome
from jaxscale.train.metrics import MetricsFile, read_metrics
from tests.truth import runs

BASE = """\
train.model = @TestBigram()
TestBigram.width = %WIDTH
WIDTH = 8
train.data = @synthetic()
synthetic.vocab_size = 32
synthetic.documents = 64
synthetic.length = 64
train.layout = None
train.schedule = @Constant()
train.lr = 1e-2
train.steps = 4
train.batch_size = 8
train.seq_len = 16
train.eval_batches = 1
train.tensorboard = False
"""
"""The run of `tests.truth.runs.bigram`, which compiles in no time."""

LR = 'sweep.axes = {"train.lr": [1e-2, 2e-2, 3e-2]}\n'
"""A sweep of it."""


def text(more: str = "", base: str = BASE) -> str:
    """A snapshot of a sweep's text, as the command line makes it."""
    assert runs.Bigram  # registers what the text names
    return config.load(bindings=[base, more])


@dataclasses.dataclass
class _Told:
    """A handle on a job that takes a step whenever somebody asks whether it is alive."""

    job: Job
    loss: Callable[[dict[str, Any], int], float]
    asked: bool = False

    def __post_init__(self) -> None:
        self.config = config_of(self.job)
        self.job.folder.mkdir(exist_ok=True)
        done = read_metrics(self.job.folder / "metrics.jsonl")
        self.step = done[-1]["step"] if done else 0
        self.over = False

    def alive(self) -> bool:
        target = min(self.job.trial.until or self.config.steps, self.config.steps)
        if self.over:
            return False
        if self.asked or self.step == target:
            state = FINISHED if self.step == self.config.steps else PAUSED if self.step == target else STOPPED
            return self._end(state)
        try:
            loss = self.loss(dict(self.job.trial.bindings), self.step + 1)
        except RuntimeError as e:
            return self._end(FAILED, str(e))
        self.step += 1
        file = MetricsFile(self.job.folder / "metrics.jsonl")
        file.write({"step": self.step, "loss": loss, "eval_loss": loss})
        file.close()
        return True

    def _end(self, state: str, error: str | None = None) -> bool:
        self.over = True
        Outcome(state, self.step, 1.0, error, sizes(self.config, self.step)).write(self.job.folder)
        return False

    def stop(self, id: int) -> None:
        self.asked = True

    def why(self) -> str:
        return ""


@dataclasses.dataclass
class Told:
    """A runner whose runs have the losses that it is told, step by step; a RuntimeError is how one fails."""

    loss: Callable[[dict[str, Any], int], float] = lambda bindings, step: 1 / step
    at_once: int = 2
    started: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)

    def slots(self) -> int:
        return self.at_once

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> _Told:
        [job] = jobs
        self.started.append((job.trial.id, job.trial.until))
        return _Told(job, self.loss)

    def close(self) -> None:
        pass


def run(
    more: str = LR,
    runner: Told | None = None,
    folder: str = "sweep",
    base: str = BASE,
    retry_failed: bool = False,
    **changes,
) -> Result:
    """Runs a text's sweep on a runner that is told its losses."""
    whole = text(more, base)
    sweep = Sweep(**{**vars(sweep_of(whole)), **changes, "runner": runner or Told()})
    return sweep.run(folder, whole, quiet=True, retry_failed=retry_failed)


def states(result: Result) -> list[str]:
    """The state of each row."""
    return [row["state"] for row in result.table()]
