"""The journal of a sweep: trials are written before they start, locked by one process, and retried after a failure."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import RunError
from jaxscale.sweep import Job, Result, Trial
from jaxscale.sweep.configs import Base
from jaxscale.sweep.jobs import run_job
from jaxscale.sweep.journal import held, job_file, run_folder, try_again
from jaxscale.sweep.outcomes import Outcome
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram, losses
from tests.truth.sweeps import BASE, LR, Scripted, run, states, text

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_a_trial_is_written_down_before_it_starts(own_folder):
    def loss(bindings, step):
        lines = [json.loads(line) for line in (own_folder / "sweep/trials.jsonl").read_text().splitlines()]
        assert {"train.lr": repr(bindings["train.lr"])} in [line["bindings"] for line in lines]
        return 1.0

    assert states(run(runner=Scripted(loss))) == ["finished"] * 3


def test_one_process_at_a_time_has_a_sweep():
    def loss(bindings, step):
        with raises_saying(RunError, "being swept by another process"):
            js.sweep.journal.Journal(Path("sweep"), "eval_loss")
        return 1.0

    run(runner=Scripted(loss))


def test_who_looks_whether_a_trial_runs_does_not_hold_it(tmp_path):
    lock = job_file(run_folder(tmp_path, 0), "lock")
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # another process that tests the lock
        assert not held(tmp_path, 0)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert held(tmp_path, 0)


def test_failed_trials_are_retried_on_request_and_no_others():
    full = [True]

    def loss(bindings, step):
        if full[0] and step == 3 and bindings["train.lr"] > 1e-2:
            raise RuntimeError("no space left on device")
        return 1 / step

    assert states(run(runner=Scripted(loss))) == ["finished", "failed", "failed"]
    before = {p: p.read_bytes() for p in Path("sweep/000").rglob("*")}
    full[0], again = False, Scripted(loss)
    assert states(run(runner=again)) == ["finished", "failed", "failed"] and not again.started
    assert states(run(runner=again, retry_failed=True)) == ["finished"] * 3
    assert [id for id, _ in again.started] == [1, 2]
    assert {p: p.read_bytes() for p in Path("sweep/000").rglob("*")} == before
    assert json.loads(Path("sweep/jobs/001.failed-1.json").read_text())["error"] == "no space left on device"


def test_errors_of_all_failed_attempts_are_saved():
    def loss(bindings, step):
        raise RuntimeError(f"reason {len(list(Path('sweep').rglob('*.failed-*.json')))}")

    run('sweep.axes = {"train.lr": [1e-2]}', Scripted(loss))
    for _ in range(2):
        result = run('sweep.axes = {"train.lr": [1e-2]}', Scripted(loss), retry_failed=True)
    assert result.table()[0]["error"] == "reason 2"
    reasons = [json.loads(Path(f"sweep/jobs/000.failed-{n}.json").read_text())["error"] for n in (1, 2)]
    assert reasons == ["reason 0", "reason 1"]


def test_a_retried_trial_continues_from_its_checkpoint():
    def fails(config, **options):
        js.fit(config, **{**options, "until": 2})
        raise OSError("no space left on device")

    job = Job(Trial(0, {"train.lr": 1e-2}), Path("sweep/000"), Base(text(LR)).job_text({"train.lr": 1e-2}))
    run_job(job, fails)
    failed = Outcome.read(job.folder)
    try_again(job.folder)
    starts = []
    run_job(job, lambda config, **options: starts.append(js.fit(config, **options)))
    ended = Outcome.read(job.folder)
    assert (failed.state, ended.state, ended.steps) == ("failed", "finished", 4)
    assert ended.seconds > failed.seconds > 0
    alone = js.fit(js.TrainConfig(**bigram(eval_batches=1, lr=1e-2)), quiet=True)
    assert losses(starts[0]) == losses(alone)


def test_the_command_tries_again_what_failed(own_folder, capsys):
    Path("text").mkdir()
    data = 'train.data = @text_files()\ntext_files.glob = "text/*.txt"\ntext_files.heldout = 0.5\n'
    lines = [line for line in BASE.splitlines() if not line.startswith(("synthetic", "train.data"))]
    Path("lr.gin").write_text("\n".join([*lines, "TestBigram.vocab = 256", data, 'sweep.axes = {"train.lr": [1e-2]}']))
    assert main(["sweep", "lr.gin", "--run", "lr", "--quiet"]) == 0
    assert states(Result("lr")) == ["failed"]
    for name, words in (("a", "abc "), ("b", "cba ")):
        Path(f"text/{name}.txt").write_text(words * 400)
    assert main(["sweep", "lr.gin", "--run", "lr", "--retry-failed"]) == 0
    assert "retrying failed runs: 000" in capsys.readouterr().out
    [row] = Result("lr").table()
    assert row["state"] == "finished"
    assert "no file matches" in json.loads(Path("lr/jobs/000.failed-1.json").read_text())["error"]
    assert main(["sweep", "lr.gin", "--retry-failed"]) == 2
    assert "name it with --run DIR" in capsys.readouterr().err
