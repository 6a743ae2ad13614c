"""Goodput: the parts of a run's wall time add up to it, and steps that a kill or a rollback dropped are lost."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.seals import seal_json
from jaxscale.step.guards import FiniteGuard
from jaxscale.sweep.comparing import runs
from jaxscale.sweep.comparing.folders import read_runs
from jaxscale.sweep.comparing.report import report
from jaxscale.train.goodput import PARTS, Goodput, is_goodput, sentence
from jaxscale.train.loop import Loop
from tests.truth.runs import bigram

SECOND = 10**9
TRACE, COMPILE = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += round(seconds * SECOND)


def fit(run, resume=False, stop=None, quiet=True, **changes):
    settings = bigram(**{"steps": 8, "checkpoint_every": 4} | changes)
    return js.fit(js.TrainConfig(**settings), run=run, resume=resume, stop=stop, quiet=quiet)


def rows_written(run):
    """Every row, also those that a rollback or a resumed run replaced."""
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def stepping(rows):
    return sum(row["stepping_seconds"] for row in rows)


def add_up(entry):
    assert sum(entry["seconds"].values()) == pytest.approx(entry["wall_seconds"], rel=1e-12)
    assert min(entry["seconds"].values()) >= 0 and set(entry["seconds"]) == set(PARTS)
    return entry["seconds"]


def test_a_function_that_is_compiled_while_another_one_is_counts_once():
    clock = Clock()
    goodput = Goodput(clock=clock)
    clock.pass_by(2)
    with goodput.compiles():
        goodput.phase("step")
        clock.pass_by(3)
        jax.monitoring.record_event_duration_secs(TRACE, 1.0)  # from 2 to 3
        clock.pass_by(2)
        jax.monitoring.record_event_duration_secs(TRACE, 4.0)  # from 1 to 5, the former within it
        clock.pass_by(1)
        jax.monitoring.record_event_duration_secs(COMPILE, 0.5)
        jax.monitoring.record_event_duration_secs("/jax/other", 5.0)
        clock.pass_by(4)
        goodput.phase("data")
        clock.pass_by(1)
        jax.monitoring.record_event_duration_secs(COMPILE, 9.0)  # longer than its phase: what was counted stays
        goodput.phase("data")
        clock.pass_by(2)
        goodput.phase("guards", hidden=True)
    parts = goodput.parts()
    assert {k: v / SECOND for k, v in parts.items() if v} == {"preparing": 2, "compiling": 5.5, "stepping": 7.5}
    assert sum(parts.values()) == clock.now


def test_compiling_while_a_step_still_runs_is_compiling_and_the_rest_stepping():
    clock = Clock()
    goodput = Goodput(clock=clock)
    with goodput.compiles():
        goodput.phase("data")
        clock.pass_by(3)
        jax.monitoring.record_event_duration_secs(COMPILE, 1.0)
        goodput.phase("step", hidden=True)
    assert {k: v / SECOND for k, v in goodput.parts().items() if v} == {"compiling": 1, "stepping": 2}


def test_steps_that_are_dropped_twice_are_lost_once():
    clock = Clock()
    goodput = Goodput(clock=clock)
    goodput.phase("step")
    clock.pass_by(6)
    goodput.row()
    rows = [{"step": s, "time": time.time(), "stepping_seconds": float(s)} for s in (1, 2, 3)]

    def lost(step):
        goodput.rolled_back(rows, step)
        return goodput.parts()["lost_steps"] / SECOND

    assert [lost(2), lost(2), lost(1), lost(1)] == [3, 3, 5, 5]
    for status in ("running", "failed"):
        again = Goodput()
        again.resumed({"goodput": goodput.about(), "status": status}, rows, 1)
        assert again.parts()["lost_steps"] == 5 * SECOND
    again = Goodput()
    again.resumed({"goodput": goodput.about(), "status": "failed"}, rows, 0)
    assert (again.parts()["lost_steps"], again.parts()["stepping"]) == (6 * SECOND, 0)


def test_the_parts_of_a_run_add_up_to_its_wall_time_and_are_shown(capsys):
    before = time.time()
    run = fit("here", quiet=False, eval_batches=1, eval_every=2)
    after = time.time()
    entry = run.info["goodput"]
    parts, rows = add_up(entry), run.metrics()
    assert 0 < entry["wall_seconds"] < after - before
    assert before - 0.01 < entry["until"] - entry["wall_seconds"] < entry["until"] < after
    assert all(parts[name] > 0 for name in ("preparing", "compiling", "stepping", "evaluating", "saving", "data"))
    assert (parts["lost_steps"], parts["waiting"]) == (0, 0)
    assert stepping(rows) == pytest.approx(parts["stepping"], rel=1e-9)
    assert [row["step"] for row in rows if "evaluating_seconds" in row] == [2, 4, 6, 8]
    assert rows[0]["compiling_seconds"] > 0 and "compiling_seconds" not in rows[6]
    assert entry["share"] == pytest.approx(parts["stepping"] / entry["wall_seconds"])
    is_shown(run, entry, capsys.readouterr().out)


def killed_at(step, folder, **changes):
    """Return a copy of a run's folder as a kill during this step leaves it."""
    calls = []

    def stop():
        calls.append(None)
        if len(calls) == step:
            while not js.Run(folder).checkpoints.steps():  # it is written behind the run
                time.sleep(0.01)
            shutil.copytree(folder, "killed")
        return False

    fit(folder, stop=stop, **changes)
    return js.Run("killed")


def test_a_killed_run_counts_the_steps_that_it_lost_and_the_wait():
    killed = killed_at(7, "here")
    assert killed.info["status"] == "running"
    cut = rows_written(killed)
    assert cut[-1]["step"] == 6
    left = read_runs("killed")[0].goodput  # run.json is of its start
    assert add_up(left)["stepping"] == pytest.approx(stepping(cut), rel=1e-6)
    assert left["until"] == pytest.approx(cut[-1]["time"], abs=1e-6)
    resumed = fit("killed", resume=True)
    rows, entry = rows_written(resumed), resumed.info["goodput"]
    parts = add_up(entry)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    lost, counted = rows[4:6], rows[:4] + rows[6:]
    assert parts["lost_steps"] == pytest.approx(stepping(lost), rel=1e-6)
    assert parts["stepping"] == pytest.approx(stepping(counted), rel=1e-6)
    began = killed.info["goodput"]["until"] - killed.info["goodput"]["wall_seconds"]
    assert entry["wall_seconds"] == pytest.approx(entry["until"] - began, abs=1e-3)  # from the first session's start
    second = entry["until"] - rows[5]["time"]
    assert 0 < parts["waiting"] < second


@pytest.mark.long
def test_a_failed_run_loses_the_steps_after_its_checkpoint(monkeypatch):
    take = Loop._take

    def broken(self, state, done):
        if done == 6:
            raise RuntimeError("struck")
        return take(self, state, done)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="struck"):
        patch.setattr(Loop, "_take", broken)
        fit("here")
    before = add_up(js.Run("here").info["goodput"])
    run = fit("here", resume=True)
    parts, rows = add_up(run.info["goodput"]), rows_written(run)
    assert before["lost_steps"] == 0
    assert parts["lost_steps"] == pytest.approx(stepping(rows[4:6]), rel=1e-6)
    assert parts["waiting"] > 0


def test_a_rollback_loses_the_steps_that_it_drops(monkeypatch):
    place = Loop._place

    def placed(self, done):
        batch = place(self, done)
        if done + 1 in (5, 6, 7):
            batch["weights"] = jax.device_put(batch["weights"].at[0, 0].set(np.nan), batch["weights"].sharding)
        return batch

    monkeypatch.setattr(Loop, "_place", placed)
    run = fit("here", guards=(FiniteGuard(),))
    rows, parts = rows_written(run), add_up(run.info["goodput"])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert parts["lost_steps"] > stepping(rows[4:6]) > 0  # and step 7, which has no row
    assert parts["stepping"] == pytest.approx(stepping(rows[:4] + rows[6:]), rel=1e-6)


@pytest.mark.parametrize("status, seconds", [("failed", 5), ("running", 5), ("paused", 0), ("finished", 0)])
def test_only_a_run_that_broke_off_waits_for_its_next_start(status, seconds):
    goodput, before = Goodput(), Goodput().about()
    goodput.resumed({"goodput": {**before, "until": time.time() - 5}, "status": status}, [], 0)
    assert goodput.parts()["waiting"] / SECOND == pytest.approx(seconds, abs=0.5)


@pytest.mark.long
def test_a_pause_is_no_wait():
    fit("here", steps=4)
    run = fit("here", resume=True)
    parts = add_up(run.info["goodput"])
    assert (parts["waiting"], parts["lost_steps"]) == (0, 0)
    assert parts["stepping"] == pytest.approx(stepping(rows_written(run)), rel=1e-6)


@pytest.mark.parametrize("entry", [None, 3, {}, {"seconds": {"stepping": "x"}}, {"seconds": {"stepping": -1.0}}])
def test_a_run_of_an_earlier_version_counts_from_its_next_start(entry):
    assert not is_goodput(entry)
    goodput = Goodput()
    goodput.resumed({"goodput": entry, "status": "running"}, [{"step": 9, "time": 1.0}], 3)
    assert set(goodput.parts().values()) >= {0} and goodput.parts()["waiting"] == 0


def is_shown(run, entry, printed):
    assert sentence(entry).partition(":")[0] in printed
    assert re.search(r"step 8/8 · .* · goodput \d+%", printed)
    page = Path(report("here", pictures=False)).read_text()
    assert f'data-value="{entry["share"]}"' in page and "waiting for data" in page and "<h2>Wall time</h2>" in page
    pytest.importorskip("pandas")
    assert runs("here")["goodput"].tolist() == [entry["share"]]
    assert "stepping_seconds" not in runs("here")
    info = json.loads((run.path / "run.json").read_text())
    info = {k: v for k, v in info.items() if k not in ("goodput", "sha256")}
    (run.path / "run.json").write_text(seal_json(info, 2))
    assert "<h2>Wall time</h2>" not in Path(report("here", pictures=False)).read_text()
