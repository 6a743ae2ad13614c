"""Small sweeps: the gin text of a run, a runner whose runs have scripted losses, and a sweep with it."""

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
"""
"""The run of `tests.truth.runs.bigram`, which compiles quickly."""

LR = 'sweep.axes = {"train.lr": [1e-2, 2e-2, 3e-2]}\n'
"""A sweep of it."""


def text(more: str = "", base: str = BASE) -> str:
    """Return the resolved text of a sweep, as the command line makes it."""
    assert runs.Bigram  # registers what the text names
    return config.load(bindings=[base, more])


@dataclasses.dataclass
class _Handle:
    """A handle on a job that takes a step at each call of `alive`."""

    job: Job
    loss: Callable[[dict[str, Any], int], float]
    stopping: bool = False

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
        if self.stopping or self.step == target:
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
        self.stopping = True

    def why(self) -> str:
        return ""


@dataclasses.dataclass
class Scripted:
    """A runner whose runs have scripted losses; a run fails where `loss` raises RuntimeError."""

    loss: Callable[[dict[str, Any], int], float] = lambda bindings, step: 1 / step
    at_once: int = 2
    started: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)

    def slots(self) -> int:
        """Return the number of jobs at a time."""
        return self.at_once

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return each job by itself."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> _Handle:
        """Start a job."""
        [job] = jobs
        self.started.append((job.trial.id, job.trial.until))
        return _Handle(job, self.loss)

    def close(self) -> None:
        """Do nothing."""


def run(
    more: str = LR,
    runner: Scripted | None = None,
    folder: str = "sweep",
    base: str = BASE,
    retry_failed: bool = False,
    **changes,
) -> Result:
    """Run the sweep of a text on a `Scripted` runner."""
    whole = text(more, base)
    sweep = Sweep(**{**vars(sweep_of(whole)), **changes, "runner": runner or Scripted()})
    return sweep.run(folder, whole, quiet=True, retry_failed=retry_failed)


def states(result: Result) -> list[str]:
    """Return the state of each row."""
    return [row["state"] for row in result.table()]
