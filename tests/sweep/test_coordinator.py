"""The loop of a sweep: what it starts, stops and continues, and how it handles trials that fail."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from jaxscale.sweep import Job, Trial
from jaxscale.sweep.configs import Base
from jaxscale.sweep.search import Grid
from jaxscale.train.metrics import MetricsFile
from tests.truth.sweeps import Scripted, run, states

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_run_that_cannot_be_described_is_a_row_too(monkeypatch):
    whole = Base.job_text

    def job_text(self, bindings):
        if bindings["train.lr"] == 2e-2:
            raise ValueError("no such width")  # raised by a user's class
        return whole(self, bindings)

    monkeypatch.setattr(Base, "job_text", job_text)
    result = run()
    assert states(result) == ["finished", "failed", "finished"]
    assert result.table()[1]["error"] == "ValueError: no such width"


def test_what_is_done_is_not_touched_again():
    result = run()
    runs = [p for p in result.path.rglob("*") if p.parent != result.path]
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in runs if p.is_file()}
    again = Scripted()
    run(runner=again)
    assert again.started == []
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before


def test_more_runs_go_on_in_the_same_folder():
    run(runs=2)
    again = Scripted()
    assert states(run(runner=again)) == ["finished"] * 3
    assert again.started == [(2, None)]


@pytest.mark.usefixtures("interruptible")
def test_a_signal_stops_running_trials_and_the_same_sweep_continues():
    def loss(bindings, step):
        if (bindings["train.lr"], step) == (2e-2, 2):
            signal.raise_signal(signal.SIGINT)
        return 1.0

    stopped = run(runner=Scripted(loss, at_once=1))
    assert states(stopped) == ["finished", "waiting"]
    assert 0 < stopped.table()[1]["steps"] < 4
    again = Scripted()
    assert states(run(runner=again)) == ["finished"] * 3
    assert again.started == [(1, None), (2, None)]


@dataclasses.dataclass
class _Dies:
    """A handle on a process that died without an outcome, `steps` steps later than before."""

    job: Job
    steps: int

    def __post_init__(self) -> None:
        file = MetricsFile(self.job.folder / "metrics.jsonl")
        for step in range(1, self.steps + 1):
            file.write({"step": step, "loss": 1.0, "eval_loss": 1.0})
        file.close()

    def alive(self) -> bool:
        return False

    def why(self) -> str:
        return "ended by SIGKILL"


class Deadly(Scripted):
    """A runner whose process for the second trial dies, each time after the next number of steps."""

    reached = [1, 2, 2, 2, 2]

    def start(self, jobs):
        handle = super().start(jobs)
        return _Dies(jobs[0], self.reached.pop(0)) if jobs[0].trial.id == 1 and self.reached else handle


def test_a_trial_whose_process_dies_is_tried_again_until_it_gets_no_further():
    result = run(runner=Deadly(), folder="often")
    assert states(result) == ["finished", "failed", "finished"]
    assert result.table()[1]["error"] == "its process ended by SIGKILL, 3 times at the same step"
    assert Deadly.reached == [2]  # died once more
    assert states(run(runner=Deadly(), folder="once")) == ["finished"] * 3


class Rungs(Grid):
    """Requests two steps of each trial, then the rest of some."""

    def next(self, space, records, steps):
        trial = super().next(space, records, steps)
        if trial is not None:
            return Trial(trial.id, trial.bindings, 2)
        paused = [r.trial for r in records if r.state == "paused"]
        return Trial(paused[0].id, paused[0].bindings) if len(paused) == len(records) else None


def test_a_paused_trial_continues_when_requested_again():
    runner = Scripted()
    result = run(runner=runner, search=Rungs())
    assert states(result) == ["finished", "paused", "paused"]
    assert runner.started == [(0, 2), (1, 2), (2, 2), (0, None)]
    assert [row["steps"] for row in result.table()] == [4, 2, 2]


class Impatient(Grid):
    """Stops trials whose objective is above 1."""

    def keeps(self, record, records, steps):
        return record.curve[-1][1] <= 1


def test_a_trial_that_is_given_up_is_stopped_for_good():
    result = run(runner=Scripted(lambda bindings, step: 1 + (bindings["train.lr"] == 2e-2)), search=Impatient())
    assert states(result) == ["finished", "stopped", "finished"]
    assert result.table()[1]["steps"] < 4
    again = Scripted()
    assert states(run(runner=again, search=Impatient())) == ["finished", "stopped", "finished"]
    assert again.started == []
