"""Checkpoints: a resumed run is the one that was not interrupted, on any layout; nothing doubtful is ever loaded."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import CheckpointError, LayoutError, RunError
from jaxscale.step import blueprint_of, describe_model
from jaxscale.train import Checkpoints
from jaxscale.train.checkpoints import store
from jaxscale.train.checkpoints.chunks import to_host
from jaxscale.train.checkpoints.digest import sealed, unsealed
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.runs import STEPS, Bigram, assert_same_bits, bigram, losses, on_host, stop_after


def fit(run="here", resume=False, **changes):
    return js.fit(js.TrainConfig(**bigram(**changes)), run=run, resume=resume, quiet=True)


def restored(run, step=None):
    """The state of a run's checkpoint, read anew."""
    blueprint, _ = blueprint_of(run.config)
    return run.checkpoints.restore(step or run.last_step(), blueprint.abstract_state(), blueprint.shardings())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run with checkpoints 2 and 4; copied by those who change it."""
    path = tmp_path_factory.mktemp("checkpoints") / "run"
    fit(path, checkpoint_every=2)
    return path


@pytest.fixture
def run(folder, tmp_path):
    """A copy of that run, to be resumed with more steps."""
    return js.Run(shutil.copytree(folder, tmp_path / "copy"), js.TrainConfig(**bigram(checkpoint_every=2)))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(finished_run, monkeypatch, tmp_path):
    stop_after(monkeypatch, 2)
    stopped = js.fit(finished_run.config, run="here", quiet=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert int(stopped.state.step) == 2
    again = js.fit(finished_run.config, run="here", resume=True, quiet=True)
    assert_same_bits(again.state, finished_run.state)
    assert losses(again) == losses(finished_run)
    assert again.metrics()[-1]["eval_loss"] == finished_run.metrics()[-1]["eval_loss"]


def test_a_longer_run_repeats_nothing_of_the_shorter_one():
    whole = fit("whole", steps=8)
    fit("parts", steps=4)
    assert_same_bits(fit("parts", resume=True, steps=8).state, whole.state)
    assert (js.Run("parts").path / "metrics.jsonl").read_text().count('"step"') == 8


def test_a_save_behind_later_steps_has_the_bits_of_one_that_steps_wait_for(run, monkeypatch):
    fetched = []

    def later(arrays, *, owned=False):
        if owned:
            time.sleep(0.2)  # later steps have donated the state
        fetched.append(owned)
        return to_host(arrays, owned=owned)

    monkeypatch.setattr(store, "to_host", later)
    behind = fit("behind", checkpoint_every=2, overlap_saves=True)
    assert fetched == [True, True]
    for step in (2, STEPS):
        assert_same_bits(restored(behind, step), restored(run, step))


def test_a_checkpoint_holds_the_whole_state(finished_run):
    assert_same_bits(restored(finished_run), finished_run.state)


def test_a_checkpoint_is_restored_onto_its_layout(finished_run):
    want = jax.tree.map(lambda x: x.sharding, finished_run.state)
    got = jax.tree.map(lambda x: x.sharding, restored(finished_run))
    same = jax.tree.map(lambda x, a, b: a.is_equivalent_to(b, x.ndim), finished_run.state, got, want)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("layout", [js.Layout("fsdp=8"), js.Layout("data=4,tensor=2"), None], ids=str)
def test_parameters_are_restored_onto_any_layout_bit_for_bit(finished_run, layout):
    infos = describe_model(finished_run.config.model)[1]
    params = finished_run.checkpoints.restore_params(STEPS, infos, layout)
    assert_same_bits(params, finished_run.state.params)


def test_a_run_resumes_on_another_layout():
    fit("alone", steps=8)
    fit(steps=4)
    moved = fit(resume=True, steps=8, layout=js.Layout("data=4"))
    assert_leaves_agree(losses(moved), losses(js.Run("alone")))
    assert moved.state.params["embed"]["weight"].sharding.num_devices == 4


def test_a_layout_that_the_run_does_not_fit_is_refused_before_its_checkpoint_is_read(run):
    with raises_saying(LayoutError, "the batch", "3 does not divide 8"):
        fit(run.path, resume=True, steps=8, layout=js.Layout("data=3"))


def test_another_corpus_is_refused(run):
    with raises_saying(RunError, "the corpus is not the one", str(run.path), "new run"):
        fit(run.path, resume=True, steps=8, data=js.data.synthetic(32, seed=1))


def test_another_model_is_refused_with_its_leaves(run):
    with raises_saying(
        CheckpointError, f"checkpoint {STEPS}", "params/embed/weight is float32[32, 8], the model has float32[32, 16]"
    ):
        fit(run.path, resume=True, steps=8, model=Bigram(width=16))


def test_another_optimizer_is_refused_with_its_leaves(run):
    with raises_saying(CheckpointError, "opt_state/", "is not in the model"):
        fit(run.path, resume=True, steps=8, optimizer=js.optim.SGD())


def test_a_long_list_of_leaves_is_cut(finished_run):
    with raises_saying(CheckpointError, "is missing", "more"):
        infos = describe_model(js.models.Transformer.Config(depth=2, qkv_bias=True, windows=(None, 4)))[1]
        finished_run.checkpoints.restore_params(STEPS, infos, None)


def test_a_refused_resume_leaves_the_folder_as_it_was(run):
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with raises_saying(CheckpointError, "does not fit"):
        fit(run.path, resume=True, steps=8, model=Bigram(width=16))
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["6.partial-0123abcd", "6.failed-0123abcd", "6.deleted-0123abcd", "tmp.6"])
def test_an_interrupted_checkpoint_is_never_picked_up(run, name):
    shutil.copytree(run.path / "checkpoints" / "4", run.path / "checkpoints" / name)
    assert run.checkpoints.steps() == [2, 4]


def test_a_checkpoint_without_its_manifest_is_set_aside_and_its_step_taken_again(run):
    (run.path / "checkpoints" / "4" / "manifest.json").unlink()
    resumed = fit(run.path, resume=True, steps=6, checkpoint_every=2)
    assert resumed.checkpoints.steps() == [2, 4, 6]
    assert [p.name.partition("-")[0] for p in resumed.checkpoints.folder.glob("*.*")] == ["4.damaged"]


def test_a_run_goes_on_past_an_interrupted_checkpoint(run):
    for name in ("6.partial-0123abcd", "2.deleted-0123abcd", "6.orbax-checkpoint-tmp"):
        (run.path / "checkpoints" / name / "tensors").mkdir(parents=True)
    resumed = fit(run.path, resume=True, steps=6, checkpoint_every=2)
    assert resumed.checkpoints.steps() == [2, 4, 6]
    assert sorted(p.name for p in resumed.checkpoints.folder.iterdir()) == ["2", "4", "6", "writer"]


def test_a_missing_step_is_answered_with_those_there_are(run):
    with raises_saying(CheckpointError, "no finished checkpoint 3", "finished are: 2, 4"):
        run.params(3)


def test_parameters_of_an_earlier_step_are_there_to_be_looked_at(run):
    assert not np.array_equal(run.params(2)["embed"]["weight"], run.params(4)["embed"]["weight"])


def test_a_run_without_checkpoints_says_so(run):
    shutil.rmtree(run.path / "checkpoints")
    with raises_saying(RunError, str(run.path), "no finished checkpoint"):
        fit(run.path, resume=True, steps=8)


def test_a_folder_that_is_no_run_cannot_be_resumed():
    with raises_saying(RunError, "nothing", "no finished checkpoint"):
        fit("nothing", resume=True)


def test_resuming_needs_a_folder():
    with raises_saying(RunError, "run="):
        fit(None, resume=True)


def test_a_finished_run_has_nothing_to_resume(run):
    with raises_saying(RunError, "already taken 4 of 4 steps", "raise train.steps"):
        fit(run.path, resume=True)


def test_a_manifest_of_a_newer_version_is_refused(run):
    path = run.path / "checkpoints" / "4" / "manifest.json"
    path.write_text(sealed({**unsealed(path.read_text()), "schema": 99}))
    with raises_saying(CheckpointError, "schema 99", "update jaxscale"):
        fit(run.path, resume=True, steps=8)


def test_the_manifest_names_shape_type_and_axes(run):
    leaf = run.checkpoints.manifest(4)["leaves"]["params/embed/weight"]
    assert {k: leaf[k] for k in ("shape", "dtype", "axes")} == {
        "shape": [32, 8],
        "dtype": "float32",
        "axes": ["vocab", "embed"],
    }


def test_the_newest_checkpoints_are_kept():
    assert fit(steps=6, checkpoint_every=1, keep=2).checkpoints.steps() == [5, 6]


def test_milestones_are_kept_for_good():
    assert fit(steps=6, checkpoint_every=1, keep=1, keep_every=2).checkpoints.steps() == [2, 4, 6]


def test_what_is_kept_counts_from_before_a_resume(run):
    assert fit(run.path, resume=True, steps=8, checkpoint_every=2, keep=2).checkpoints.steps() == [6, 8]


def test_zero_writes_one_checkpoint_at_the_end():
    assert fit(checkpoint_every=0).checkpoints.steps() == [STEPS]


def test_a_checkpoint_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    run = fit("whole")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    with raises_saying(CheckpointError, "could not", str(tmp_path / "file")):
        checkpoints.save(run.state, {"params": describe_model(run.config.model)[1], "extra": {}}, {})
        checkpoints.wait()


def test_a_run_whose_last_checkpoint_cannot_be_written_is_not_finished(run):
    (run.path / "checkpoints" / "6").touch()  # by whom?
    with raises_saying(CheckpointError, "could not write checkpoint 6"):
        fit(run.path, resume=True, steps=6)
    assert run.info["status"] == "failed"


def test_reading_needs_no_folder_and_makes_none(tmp_path):
    assert Checkpoints(tmp_path / "none").steps() == []
    assert not (tmp_path / "none").exists()


def test_names_of_arrays_are_paths(run):
    names = on_host(restored(run))
    assert {"step", "rng", "params/embed/weight", "params/head/weight"} < names.keys()
    assert Path("opt_state") in {Path(n).parents[-2] for n in names if "/" in n}
