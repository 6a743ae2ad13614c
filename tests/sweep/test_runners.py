"""Runners: each trial has the same results as alone, and a failure affects only its own trial."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, RunError
from jaxscale.step import NextToken
from jaxscale.sweep import Job, Slurm, SubMeshes, Trial, Vmapped
from jaxscale.sweep.outcomes import Outcome
from jaxscale.sweep.runners import group
from tests.truth.runs import Bigram, bigram

pytestmark = pytest.mark.once

MORE: dict[str, Any] = dict(steps=5, eval_batches=2)
DIFFER: list[dict[str, Any]] = [
    dict(seed=0, lr=1e-1),
    dict(seed=2**31 + 7, lr=1e-1, schedule=js.optim.WarmupCosine(), clip_norm=0.5),
    dict(seed=0, lr=3e-2, objective=NextToken(z_loss=1e-2)),
]
"""Plain SGD, since adaptive optimizers amplify the rounding of small gradients."""


def small(**changes: Any) -> js.TrainConfig:
    return js.TrainConfig(**bigram(**{"model": Bigram(), "optimizer": js.optim.SGD(), **changes}))


def job(config: js.TrainConfig, folder: Path, id: int, until: int | None = None) -> Job:
    text = js.config.dumps("train", config.values())
    return Job(Trial(id, {}, until), folder / f"{id:03}", text, ("tests.truth.runs",))


def carry_out(runner: Any, jobs: Sequence[Job]) -> list[Outcome]:
    """Run all jobs in the runner's groups, and return their outcomes."""
    handles = [runner.start(group) for group in runner.together(jobs)]
    wait(lambda: not any(handle.alive() for handle in handles))
    assert [handle.why() for handle in handles] == [""] * len(handles)
    return [outcome(each) for each in jobs]


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not until():
        assert time.monotonic() < end
        time.sleep(0.01)


def outcome(job: Job) -> Outcome:
    result = Outcome.read(job.folder)
    assert result is not None
    return result


def curve(run: js.Run, *names: str) -> np.ndarray:
    return np.asarray([[row[name] for name in names] for row in run.metrics()])


def assert_same_run(got: js.Run, want: js.Run, tolerance: float) -> None:
    """Compare metrics at every step, and the parameters of checkpoints."""
    np.testing.assert_allclose(curve(got, "step", "loss", "lr"), curve(want, "step", "loss", "lr"), rtol=tolerance)
    evals = [[row["eval_loss"] for row in run.metrics() if "eval_loss" in row] for run in (got, want)]
    np.testing.assert_allclose(*evals, rtol=tolerance)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(b).max())),
        got.params(),
        want.params(),
    )


@pytest.fixture
def places(monkeypatch) -> dict[str, set[Any]]:
    """The devices of each run's state when it was saved, by folder."""
    result: dict[str, set[Any]] = {}
    save = js.train.loop.Loop._save

    def saved(self: Any, state: Any) -> Any:
        devices = {d for x in jax.tree.leaves(state.params) for d in x.devices()}
        result.setdefault(self.run.path.name, set()).update(devices)
        return save(self, state)

    monkeypatch.setattr("jaxscale.train.loop.Loop._save", saved)
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[js.Run]:
    """Runs that differ in what `Vmapped` supports, each trained alone on one device."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxscale.train.record.Record.picture", lambda self: None)
        return [js.fit(small(**MORE, **each), run=root / f"{i}", quiet=True) for i, each in enumerate(DIFFER)]


@pytest.fixture(scope="module", autouse=True)
def submitted(tmp_path_factory) -> tuple[Job, Any]:
    """A job that a separate process trains while other tests run."""
    one = job(small(), tmp_path_factory.mktemp("slurm"), 0)
    return one, Slurm(cluster="local", time=5).start([one])


# --- sub-meshes -------------------------------------------------------------------------------------------------------


def test_sub_meshes_give_each_run_devices_of_its_own_and_the_same_bits(tmp_path, places):
    runner = SubMeshes(devices_per_run=2)
    assert runner.slots() == 4
    jobs = [job(small(layout=js.Layout("data=-1"), seed=i), tmp_path, i) for i in range(3)]
    assert [o.state for o in carry_out(runner, jobs)] == ["finished"] * 3
    assert [len(places[j.folder.name]) for j in jobs] == [2, 2, 2]
    assert len(set.union(*places.values())) == 6
    want = js.fit(small(layout=js.Layout("data=2"), seed=2), run=tmp_path / "want", quiet=True)
    assert_same_run(js.load(jobs[2].folder), want, 0.0)


def test_a_run_without_a_layout_continues_on_its_own_device(tmp_path, places):
    runner = SubMeshes()
    first = runner.start([job(small(), tmp_path, 0)])  # takes the first device
    for until in (2, None):
        carry_out(runner, [job(small(seed=1), tmp_path, 1, until)])
    wait(lambda: not first.alive())
    assert outcome(job(small(), tmp_path, 1)).state == "finished"
    assert jax.devices()[0] not in places["001"]


# --- vmapped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [None, "fsdp=2,tensor=2"], ids=str)
def test_vmapped_runs_equal_runs_alone(tmp_path, alone, mesh):
    layout = None if mesh is None else js.Layout(mesh)
    jobs = [job(small(**MORE, **each, layout=layout), tmp_path, i) for i, each in enumerate(DIFFER)]
    assert len(Vmapped().together(jobs)) == 1
    assert [o.state for o in carry_out(Vmapped(), jobs)] == ["finished"] * 3
    for each, want in zip(jobs, alone, strict=True):
        assert_same_run(js.load(each.folder), want, 1e-5)


@pytest.mark.long
def test_vmapped_transformers_on_a_mesh_equal_one_alone_on_a_device(tmp_path):
    model = js.models.Transformer.Config(depth=1, width=16, heads=2, hidden=16, vocab=32)
    jobs = [job(small(model=model, seed=i, layout=js.Layout("data=2")), tmp_path, i) for i in range(2)]
    carry_out(Vmapped(), jobs)
    want = js.fit(small(model=model, seed=1), run=tmp_path / "want", quiet=True)
    assert_same_run(js.load(jobs[1].folder), want, 1e-5)


def test_weight_decay_may_differ_too(tmp_path):
    settings = [small(optimizer=js.optim.AdamW(weight_decay=decay), steps=2) for decay in (0, 9.0)]
    jobs = [job(each, tmp_path, i) for i, each in enumerate(settings)]
    assert len(Vmapped().together(jobs)) == 1
    carry_out(Vmapped(), jobs)
    want = js.fit(settings[1], run=tmp_path / "want", quiet=True)
    assert_same_run(js.load(jobs[1].folder), want, 1e-5)
    assert curve(js.load(jobs[0].folder), "loss")[-1] != curve(want, "loss")[-1]


@pytest.mark.long
def test_a_nan_in_one_run_stays_there_and_is_dealt_with_as_alone(tmp_path):
    with_it = [job(small(lr=lr), tmp_path / "a", i) for i, lr in enumerate((1e-2, 1e38, 3e-2))]
    carry_out(Vmapped(), with_it)
    bad = js.fit(small(lr=1e38), run=tmp_path / "bad", quiet=True)
    skipped = [[row.get("skipped") for row in run.metrics()] for run in (js.load(with_it[1].folder), bad)]
    assert skipped[0] == skipped[1] and any(skipped[0])
    without = [job(small(lr=lr), tmp_path / "b", i) for i, lr in enumerate((1e-2, 3e-2))]
    carry_out(Vmapped(), without)
    for got, want in zip((with_it[0], with_it[2]), without, strict=True):
        assert_same_run(js.load(got.folder), js.load(want.folder), 1e-6)


def test_vmapped_runs_pause_stop_and_continue(tmp_path, caplog):
    straight = [job(small(seed=i), tmp_path / "a", i) for i in range(2)]
    carry_out(Vmapped(), straight)
    assert [o.state for o in carry_out(Vmapped(), [job(small(seed=1), tmp_path, 1, until=2)])] == ["paused"]
    both = [job(small(seed=i), tmp_path, i) for i in range(2)]  # one at step 0 and one at 2
    runner = Vmapped()
    handle = runner.start(both)
    handle.stop(0)
    wait(lambda: not handle.alive())
    assert outcome(both[0]).state == "stopped" and outcome(both[1]).state == "finished"
    assert [o.state for o in carry_out(runner, both[:1])] == ["finished"]
    assert "trains alone" not in caplog.text
    for got, want in zip(both, straight, strict=True):
        assert_same_run(js.load(got.folder), js.load(want.folder), 1e-5)


def test_together_go_runs_of_one_shape_and_the_others_are_named(tmp_path, caplog):
    changes = [{}, {"seed": 1}, {"lr": 1.0}, {"batch_size": 4}, {"clip_norm": None}, {"clip_norm": 3.0}, {"seed": 5}]
    jobs = [job(small(**each), tmp_path, i) for i, each in enumerate(changes)]
    groups = [[each.trial.id for each in group] for group in Vmapped(runs=3).together(jobs)]
    assert groups == [[0, 1, 2], [5, 6], [3], [4]]
    assert "003, 004: trained alone" in caplog.text


@pytest.mark.long
def test_a_group_trains_as_its_runs_alone_where_these_hold_layers_by_stage(tmp_path, caplog):
    model = js.models.TransformerConfig(depth=4, vocab=32, width=16, heads=2, hidden=32)
    layout = js.Layout("pipeline=2", pipeline="interleaved:2")
    configs = [small(model=model, layout=layout, lr=lr, steps=3) for lr in (0.1, 0.03)]
    alone = js.fit(configs[1], run=tmp_path / "alone", quiet=True)
    jobs = [job(config, tmp_path, i) for i, config in enumerate(configs)]
    assert [o.state for o in carry_out(Vmapped(), jobs)] == ["finished"] * 2
    assert "trains alone" not in caplog.text
    assert_same_run(js.load(jobs[1].folder), alone, 1e-5)


def test_a_group_that_cannot_be_trained_together_is_trained_alone_with_a_warning(tmp_path, caplog, monkeypatch):
    def fails(*_: Any) -> None:
        raise MemoryError("no memory for two")

    monkeypatch.setattr(group._Programs, "__init__", fails)
    jobs = [job(small(seed=i), tmp_path, i) for i in range(2)]
    assert [o.state for o in carry_out(Vmapped(), jobs)] == ["finished"] * 2
    assert caplog.text.count("trains alone, since training it together with others failed: no memory for two") == 2


# --- SLURM ------------------------------------------------------------------------------------------------------------

SBATCH = """#!/bin/sh
cat "$1" >> {folder}/submitted
echo "Submitted batch job 41"
"""
SACCT = """#!/bin/sh
printf 'JobID|State|NodeList\\n41|RUNNING|n1\\n'
"""


def test_a_slurm_job_is_found_again_and_not_submitted_twice(tmp_path, monkeypatch):
    for name, text in {"sbatch": SBATCH, "sacct": SACCT, "srun": ""}.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    runner = Slurm(partition="h200", gpus=2, time=30, options={"account": "abc"})
    one = job(small(), tmp_path / "sweep", 0)
    assert runner.start([one]).alive()
    text = (tmp_path / "submitted").read_text()
    for option in ("--partition=h200", "--gpus-per-node=2", "--time=30", "--account=abc"):
        assert f"#SBATCH {option}\n" in text
    again = dataclasses.replace(runner).start([one])
    assert again.alive() and (tmp_path / "submitted").read_text() == text
    again.stop(0)
    assert (tmp_path / "sweep" / "jobs" / "000.stop").exists()


def test_a_job_that_slurm_does_not_take_is_one_sentence(tmp_path, monkeypatch):
    for name, text in {"sbatch": "echo Invalid account 1>&2; exit 1", "srun": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RunError, match=r"^SLURM did not accept the run 000: .*Invalid account$"):
        Slurm().start([job(small(), tmp_path / "sweep", 0)])
    assert not (tmp_path / "sweep" / "jobs" / "000.slurm.json").exists()


def test_slurm_without_submitit_or_a_cluster_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="this machine is not part of a SLURM cluster"):
        Slurm().start([job(small(), tmp_path, 0)])
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxscale\[slurm\]'"):
        Slurm().slots()


def test_a_submitted_run_outlives_the_sweep_that_submitted_it(submitted, tmp_path):
    one, handle = submitted
    handle.job._process = None  # as after a restart of the sweep
    note = one.folder.parent / "jobs" / "000.slurm.json"
    before = note.read_text()
    again = Slurm(cluster="local", time=5).start([one]) if handle.alive() else handle
    assert note.read_text() == before
    wait(lambda: not again.alive())
    assert outcome(one).state == "finished"
    want = js.fit(small(), run=tmp_path / "want", quiet=True)
    assert_same_run(js.load(one.folder), want, 1e-6)


# --- bad input --------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no device": (lambda: SubMeshes(devices_per_run=0), "SubMeshes.devices_per_run = 0: must be at least 1"),
    "too many devices": (lambda: SubMeshes(devices_per_run=9).slots(), "= 9, but this process has 8 cpu"),
    "no run": (lambda: Vmapped(runs=0), "Vmapped.runs = 0: must be at least 1"),
    "no time": (lambda: Slurm(time=0), "Slurm.time = 0: must be above 0"),
    "no such cluster": (lambda: Slurm(cluster="slrm"), "did you mean 'slurm'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence(name):
    make, sentence = WRONG[name]
    with pytest.raises(ConfigError, match=sentence):
        make()
