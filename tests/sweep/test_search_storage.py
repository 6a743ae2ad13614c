"""Several machines pulling from one storage: no trial is lost or run twice, even if a machine is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.errors import ConfigError, RunError
from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, RUNNING, STOPPED, WAITING, Record, Trial
from jaxscale.sweep.outcomes import Outcome
from jaxscale.sweep.storage import Storage
from tests.truth.errors import raises_saying
from tests.truth.pulling import RUNS, STEPS, open_ledger, pull
from tests.truth.runs import ROOT

pytestmark = pytest.mark.once

optuna = pytest.importorskip("optuna")
FIRST = Trial(0, {"x": 0.25}, until=3)


@pytest.fixture
def url(tmp_path):
    return f"journal://{tmp_path}/storage"


@pytest.fixture
def machines(tmp_path, url):
    """Two machines' ledgers."""
    opened = [open_ledger(url, tmp_path / name, patience=0.4) for name in "ab"]
    yield opened
    for ledger in opened:
        ledger.close()


def ended(trial, folder, state=PAUSED, upto=3):
    curve = [(step, 1 / step) for step in range(1, upto + 1)]
    return Record(trial, state, curve, {"steps": upto}, 1.5, None, folder)


def silent(ledger):
    """Stop a ledger's counter, as if its machine were dead."""
    ledger._closed.set()
    ledger._beating.join()


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.05)


def test_of_two_that_claim_the_same_trial_one_gets_it(machines):
    a, b = machines
    assert a.records() == b.records() == []
    assert a.claim(FIRST) is not None
    time.sleep(0.1)  # b has to read the storage again
    assert b.claim(FIRST) is None, "its records were of before"
    assert [r.state for r in b.records()] == [RUNNING]
    assert b.claim(Trial(1, {"x": 0.5}, until=3)) is not None


def test_a_machine_sees_what_another_measured_and_how_it_ended(machines):
    a, b = machines
    folder = a.claim(FIRST)
    assert a.report(ended(FIRST, folder, RUNNING, 2))
    wait_for(lambda: b.records() and len(b.records()[0].curve) == 2)
    assert a.report(ended(FIRST, folder))
    wait_for(lambda: b.records()[0].state == PAUSED)
    [record] = b.records()
    assert record.curve == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert (record.metrics, record.seconds, record.run) == ({"steps": 3}, 1.5, folder.resolve())


def test_another_machine_continues_if_it_sees_the_folder_and_else_starts_again(machines):
    a, b = machines
    folder = a.claim(FIRST)
    a.report(ended(FIRST, folder))
    wait_for(lambda: b.records() and b.records()[0].state == PAUSED)
    for until in (6, 8):
        further = Trial(0, FIRST.bindings, until)
        b.records()
        assert b.claim(further) == folder.resolve()
        b.report(ended(further, folder.resolve(), upto=until))
    (folder.parent / "machine").write_text("another disk, mounted at the same place\n")
    last = Trial(0, FIRST.bindings)
    b.records()
    assert b.claim(last) == b.journal.folder / "000"
    [record] = b.records()
    assert record.state == RUNNING and [step for step, _ in record.curve] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_machine_killed_before_it_could_tell_how_a_trial_ended_tells_when_it_is_back(tmp_path, machines, url):
    a, b = machines
    folder = a.claim(FIRST)
    silent(a)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 3, "eval_loss": 1.5}\n')
    Outcome(PAUSED, 3).write(folder)
    a.journal.close()
    with contextlib.closing(open_ledger(url, tmp_path / "a")) as back:
        assert [(r.state, r.curve) for r in back.records()] == [(PAUSED, [(3, 1.5)])]
    wait_for(lambda: [r.state for r in b.records()] == [PAUSED])


def test_a_trial_of_a_silent_machine_is_claimed_and_its_later_reports_are_ignored(machines):
    a, b = machines
    folder = a.claim(FIRST)
    silent(a)
    wait_for(lambda: [r.state for r in b.records()] == [RUNNING])
    wait_for(lambda: b.records()[0].state == WAITING)
    assert b.claim(FIRST) is not None
    assert not a.report(ended(FIRST, folder, FINISHED)), "the trial now belongs to another machine"
    wait_for(lambda: b.records()[0].state == RUNNING and not b.records()[0].curve)


def test_a_machine_that_counts_keeps_its_trials_however_long_they_take(machines):
    a, b = machines
    a.claim(FIRST)
    wait_for(b.records)
    for _ in range(10):
        time.sleep(0.1)
        assert b.records()[0].state == RUNNING


def test_a_waiting_trial_is_free_for_any_machine_and_a_stopped_one_for_none(machines):
    a, b = machines
    folder = a.claim(FIRST)
    a.report(ended(FIRST, folder, WAITING, 2))
    wait_for(lambda: b.records() and b.records()[0].state == WAITING)
    b.claim(FIRST)
    b.report(ended(FIRST, folder, STOPPED))
    wait_for(lambda: a.records()[0].state == STOPPED)


def test_a_trial_that_failed_on_one_machine_is_retried_by_another_on_request(machines):
    a, b = machines
    folder = a.claim(FIRST)
    Outcome(FAILED, 2, 1.5, "no space left on device").write(folder)
    a.report(dataclasses.replace(ended(FIRST, folder, FAILED, 2), error="no space left on device"))
    wait_for(lambda: b.records() and b.records()[0].state == FAILED)
    assert b.retry_failed() == [0]
    [record] = b.records()
    assert (record.state, record.error) == (WAITING, None)
    assert b.claim(record.trial) == folder.resolve(), "it goes on where its checkpoints are"
    assert json.loads((folder.parent / "jobs/000.failed-1.json").read_text())["error"] == "no space left on device"
    wait_for(lambda: a.records()[0].state == RUNNING)
    Outcome(FAILED, 2, 1.5, "no space left on device").write(folder)
    b.report(dataclasses.replace(ended(FIRST, folder, FAILED, 2), error="no space left on device"))
    assert b.records()[0].state == FAILED, "once more is once"


def test_a_folder_that_lacks_the_trials_of_another_machine_is_opened_again(machines, tmp_path):
    a, b = machines
    a.claim(FIRST)
    for id, ledger in ((1, b), (2, a)):
        ledger.claim(dataclasses.replace(FIRST, id=id))
    folder, url = a.journal.folder, a.shared.url
    a.close()
    with contextlib.closing(open_ledger(url, folder)) as again:
        assert [record.trial.id for record in again.records()] == [0, 1, 2]


@pytest.mark.long
def test_two_processes_share_a_sweep_and_one_killed_loses_nothing(tmp_path, url):
    command = [sys.executable, "-m", "tests.truth.pulling", url, str(tmp_path / "a"), "0.4"]
    measured = tmp_path / "a" / "001" / "metrics.jsonl"
    a = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        wait_for(lambda: measured.exists() and measured.stat().st_size, 240)
        ours = threading.Thread(target=pull, args=(url, tmp_path / "b", 0.02))
        ours.start()
        wait_for((tmp_path / "b" / "trials.jsonl").exists, 240)
        os.kill(a.pid, signal.SIGKILL)
        ours.join(240)
        assert not ours.is_alive()
    finally:
        a.kill()
        a.wait()
    records = pull(url, tmp_path / "a")  # restart the killed machine: no trials are left for it
    assert [r.trial.id for r in records] == list(range(RUNS))
    assert {r.state for r in records} <= {FINISHED, PAUSED} and FINISHED in {r.state for r in records}
    study = optuna.load_study(study_name="sweep", storage=Storage(url).connect("sweep.of = 'waiting'\n").backend)
    starts = [(t.user_attrs["id"], t.user_attrs["until"]) for t in study.trials if "end" in t.user_attrs]
    assert len(starts) == len(set(starts)), "nothing was carried out twice"
    assert study.best_value == min(r.curve[-1][1] for r in records if r.state == FINISHED)
    assert study.best_trial.params == dict(records[study.best_trial.user_attrs["id"]].trial.bindings)
    for record in records:
        steps = [json.loads(line)["step"] for line in (record.run / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, (record.trial.until or STEPS) + 1)), "one folder holds all of its steps, once"


def test_another_sweep_does_not_mix_in(url):
    Storage(url).connect("train.lr = 1\n")
    with raises_saying(ConfigError, "train.lr was 1 and is 2", "#another_name"):
        Storage(url).connect("train.lr = 2\n")
    with raises_saying(ConfigError, "train.lr was 1 and is 2", "#another_name"):
        Storage(url).check("train.lr = 2\n")
    Storage(url).check("train.lr = 1\n")
    Storage(f"{url}#another_name").check("train.lr = 3\n")
    Storage(f"{url}#another_name").connect("train.lr = 2\n")


@pytest.mark.parametrize(
    "url, words",
    [
        (
            "journal:///nowhere/at/all/file",
            ["journal:///nowhere/at/all/file", "the folder /nowhere/at/all does not exist"],
        ),
        ("journal:///proc/file", ["journal:///proc/file", "cannot be reached"]),
        ("storage.log", ["'storage.log' is not a storage URL", "journal:///path/file"]),
        ("", ["'' is not a storage URL"]),
        ("sqlite:////nowhere/at/all.db", ["sqlite:////nowhere/at/all.db", "unable to open database file"]),
        ("carrierpigeon://user:secret@host/x", ["carrierpigeon://user@host/x", "cannot be reached"]),
    ],
    ids=["no-folder", "not-writable", "no-scheme", "empty", "no-database", "no-dialect"],
)
def test_a_storage_that_cannot_be_reached_is_one_sentence(url, words):
    with raises_saying(ConfigError, *words):
        Storage(url).connect("")


@pytest.mark.parametrize(
    "url, words",
    [
        ("postgresql+psycopg://u:secret@host/x", ["needs psycopg,", 'pip install "psycopg[binary]"']),
        (
            "postgresql+psycopg2://u:secret@host/x",
            ["needs psycopg2,", "[binary]", "write postgresql+psycopg://u@host/x"],
        ),
        ("mysql://u:secret@host/x", ["needs MySQLdb,", "pip install MySQLdb"]),
    ],
    ids=["psycopg", "psycopg2", "mysql"],
)
def test_a_driver_that_is_not_installed_is_named_with_its_command(monkeypatch, url, words):
    for name in ("psycopg", "psycopg2", "MySQLdb"):
        monkeypatch.setitem(sys.modules, name, None)
    with raises_saying(ConfigError, *words):
        Storage(url).connect("")


def test_a_database_that_goes_away_is_one_sentence(machines, monkeypatch):
    a, _ = machines

    def gone(*_, **__):
        raise OSError("connection reset by peer")

    monkeypatch.setattr(a.shared.backend, "get_all_trials", gone)
    a._read = (-1e9, {})
    with raises_saying(RunError, "cannot be reached", "connection reset by peer"):
        a.records()
