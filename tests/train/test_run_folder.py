"""A run is a folder: what stands in it, that none is overwritten, and that its text rebuilds its settings."""

from __future__ import annotations

import builtins
import dataclasses
import fcntl
import json
from pathlib import Path

import jax
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, RunError
from jaxscale.train import read_config
from jaxscale.train.files import read_gin, write_gin, write_json
from jaxscale.train.folders import new_folder
from tests.truth.errors import raises_saying
from tests.truth.runs import STEPS, bigram, stop_after, transformer, write_text


@pytest.fixture(autouse=True)
def no_pictures():
    """Here they are drawn."""


def fit(run=None, resume=False, quiet=True, name="run", **changes):
    return js.fit(js.TrainConfig(**bigram(**changes)), run=run, resume=resume, quiet=quiet, name=name)


def test_a_run_leaves_these_files(finished_run):
    names = {p.name for p in finished_run.path.iterdir()}
    assert names == {"config.gin", "run.json", "metrics.jsonl", "checkpoints", "loss.png", ".lock"}


def test_the_text_of_a_run_rebuilds_its_settings(finished_run):
    assert js.load(finished_run.path).config == finished_run.config


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": None},
        {"optimizer": js.optim.SGD(momentum=0.9), "schedule": js.optim.WSD(decay=2), "clip_norm": None},
        {"layout": js.Layout("data=2", js.layout.preset("fsdp_tensor"))},
        {"keep_every": 3, "prompt": "def 'f'\n", "packing": "fit", "segments": False},
    ],
    ids=["one device", "optimizer", "own rules", "literals"],
)
def test_any_settings_come_back_from_their_text(changes):
    config = js.TrainConfig(
        **bigram(steps=1, data=js.data.synthetic(256), model=js.models.Transformer.Config()) | changes
    )
    text = js.config.dumps("train", config.values())
    Path("config.gin").write_text(text)
    assert read_config(Path()) == config


def test_run_json_says_where_and_with_what_it_ran(finished_run):
    info = finished_run.info
    assert info["versions"]["jax"] == jax.__version__
    assert info["hardware"]["devices"] == 8 and info["hardware"]["platform"] == "cpu"
    assert info["layout"]["mesh"]["tensor"] == 2
    assert info["parameters"] == finished_run.config.model.param_count()
    assert (info["status"], info["step"], info["seed"]) == ("finished", STEPS, 0)
    assert info["data"]["corpus"] == "text_files" and len(info["data"]["fingerprint"]) >= 32


def test_run_json_is_the_whole_truth_in_json(finished_run):
    seal = {"sealed", "sha256"}
    written = json.loads((finished_run.path / "run.json").read_text())
    assert {k: v for k, v in written.items() if k not in seal} == finished_run.info


def test_new_runs_are_numbered():
    assert [str(fit(steps=1).path) for _ in range(2)] == ["runs/run-1", "runs/run-2"]


def test_a_second_run_changes_nothing_of_the_first():
    first = fit(steps=1)
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}
    fit(steps=1)
    assert {p: p.stat().st_mtime_ns for p in first.path.rglob("*")} == before


def test_a_folder_that_is_there_is_refused():
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("...")
    with raises_saying(RunError, "mine already exists", "--resume mine", "another folder"):
        fit("mine", steps=1)


def test_an_empty_folder_is_taken():
    Path("mine").mkdir()
    assert fit("mine", steps=1).path == Path("mine")


def test_a_folder_that_cannot_be_made_is_said():
    Path("file").write_text("")
    with raises_saying(RunError, "cannot make the run folder file"):
        fit("file", steps=1)


def test_numbers_go_on_after_the_highest():
    Path("runs/demo-7").mkdir(parents=True)
    assert new_folder(None, "demo") == Path("runs/demo-8")


def test_runs_of_a_longer_name_are_not_counted():
    for other in ("demo-large-9", "demo-x", "mydemo-5", "demo-"):
        Path("runs", other).mkdir(parents=True)
    assert new_folder(None, "demo") == Path("runs/demo-1")


def test_an_unfinished_run_is_gone_on_with(monkeypatch, capfd):
    stop_after(monkeypatch, 2)
    fit(name="demo")
    monkeypatch.setattr("jaxscale.train.loop.Loop._stopping", lambda self, step: False)
    assert fit(name="demo", resume="newest", quiet=False).path == Path("runs/demo-1")
    assert "resuming runs/demo-1" in capfd.readouterr().out


def test_a_finished_run_is_followed_by_a_new_one(capfd):
    fit(name="demo")
    assert fit(name="demo", resume="newest", quiet=False).path == Path("runs/demo-2")
    assert "starting runs/demo-2" in capfd.readouterr().out


def test_an_unfinished_run_of_other_settings_is_left_alone(monkeypatch):
    stop_after(monkeypatch, 2)
    fit(name="demo")
    assert fit(name="demo", resume="newest", lr=2e-2).path == Path("runs/demo-2")


def test_an_unfinished_run_without_a_checkpoint_is_left_alone():
    fit(name="demo")
    write_json(Path("runs/demo-1/run.json"), {**js.Run("runs/demo-1").info, "status": "running"})
    Path("runs/demo-1/checkpoints", str(STEPS)).rename("elsewhere")
    assert fit(name="demo", resume="newest").path == Path("runs/demo-2")


def test_the_settings_before_a_resume_are_kept():
    fit("here", steps=2)
    fit("here", resume=True, steps=3)
    assert "train.steps = 2\n" in Path("here/config.until-2.gin").read_text()
    assert "train.steps = 3\n" in Path("here/config.gin").read_text()


def test_a_resume_keeps_when_the_run_started():
    first = fit("here", steps=2)
    write_json(Path("here/run.json"), {**first.info, "started": "long ago"})
    assert fit("here", resume=True, steps=3).info["started"] == "long ago"


def test_text_that_came_with_a_run_may_not_import_code(finished_run):
    write_gin(Path("config.gin"), "import antigravity\n" + read_gin(finished_run.path / "config.gin"))
    with raises_saying(ConfigError, "config.gin:2", "'import antigravity' is refused", "may not import code"):
        read_config(Path())


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with raises_saying(RunError, str(tmp_path), "is not a run folder"):
        js.load(tmp_path)


def test_a_run_is_loaded_by_text_or_path(finished_run):
    assert js.load(str(finished_run.path)).last_step() == js.load(finished_run.path).last_step() == STEPS


def test_a_run_shows_its_folder():
    assert repr(js.Run("runs/demo-1")) == "Run('runs/demo-1')"


def test_the_picture_is_a_png(finished_run):
    assert (finished_run.path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_holds_training_and_held_out_loss(finished_run):
    (axes,) = finished_run.plot().axes
    assert [line.get_label() for line in axes.lines][-1].startswith("held-out files, last ")


def test_a_run_without_losses_has_no_picture():
    with raises_saying(RunError, "no losses to draw"):
        js.Run("nowhere").plot()


def test_without_matplotlib_a_run_finishes_and_says_what_is_missing(monkeypatch, capfd):
    _forbid(monkeypatch, "matplotlib")
    run = fit(steps=1, quiet=False)
    assert "warning: drawing loss.png needs matplotlib: pip install 'jaxscale[plot]'" in capfd.readouterr().out
    assert run.info["status"] == "finished" and not (run.path / "loss.png").exists()


def test_a_config_cannot_be_changed(finished_run):
    with pytest.raises(dataclasses.FrozenInstanceError):
        finished_run.config.steps = 3


def _forbid(monkeypatch, package):
    """As if a package was not installed."""
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(f"No module named '{package}'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


def test_an_older_unfinished_run_is_found_behind_other_folders(monkeypatch):
    stop_after(monkeypatch, 2)
    fit(name="demo")
    Path("runs/demo-2").mkdir()
    monkeypatch.setattr("jaxscale.train.loop.Loop._stopping", lambda self, step: False)
    assert fit(name="demo", resume="newest").path == Path("runs/demo-1")


def test_a_run_that_is_being_trained_is_left_to_its_process(monkeypatch):
    stop_after(monkeypatch, 2)
    fit(name="demo")
    with Path("runs/demo-1/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the other process holds it
        with raises_saying(RunError, "runs/demo-1", "being trained"):
            fit("runs/demo-1", resume=True)
        monkeypatch.setattr("jaxscale.train.loop.Loop._stopping", lambda self, step: False)
        assert fit(name="demo", resume="newest").path == Path("runs/demo-2")


def test_a_named_folder_is_started_and_then_gone_on_with(monkeypatch):
    """What a cluster does that runs the same command again."""
    stop_after(monkeypatch, 2)
    fit("here", resume="newest")
    monkeypatch.setattr("jaxscale.train.loop.Loop._stopping", lambda self, step: False)
    assert [row["step"] for row in fit("here", resume="newest").metrics()] == [1, 2, 3, 4]


def test_a_run_that_died_before_its_first_checkpoint_can_begin_again():
    fit("here")
    Path("here/checkpoints", str(STEPS)).rename("elsewhere")
    with raises_saying(RunError, "here", "no finished checkpoint", "--continue"):
        fit("here", resume=True)
    assert fit("here", resume="newest").info["status"] == "finished"


@pytest.mark.long
def test_a_resume_from_python_keeps_the_settings_of_the_run(tmp_path):
    settings = transformer(write_text(tmp_path / "text"), lr=2e-3, layout=None, steps=2)
    js.fit(settings, run="here", quiet=True)
    assert js.fit(run="here", resume=True, steps=3, quiet=True).config == dataclasses.replace(settings, steps=3)


@js.config.register(name="t_Calls")
@dataclasses.dataclass(frozen=True)
class Calls(js.step.Callback):
    function: object = None


def test_a_part_of_nothing_but_python_values_can_be_replaced(tmp_path):
    text = js.config.dumps("train", {"callbacks": (Calls(print),), "lr": 0.5})
    write_gin(tmp_path / "config.gin", text)
    assert "(@callbacks_0/t_Calls(),)" in text
    assert read_config(tmp_path, replaced=["callbacks"]).lr == 0.5
    with raises_saying(RunError, "train.callbacks.0.function, which came from Python"):
        read_config(tmp_path)


def test_reading_a_run_leaves_the_loaded_config_alone(finished_run):
    js.config.load(bindings=["train.lr = 0.5"])
    assert js.load(str(finished_run.path)).config.lr == 1e-2
    assert js.config.call("train").lr == 0.5


def test_a_resume_with_another_length_of_rows_names_the_setting():
    fit("here", steps=2)
    with raises_saying(RunError, "train.seq_len = 16", "8"):
        fit("here", resume=True, steps=3, seq_len=8)


def test_a_resume_with_more_steps_says_what_becomes_of_the_learning_rate(capfd):
    fit("here", steps=2)
    fit("here", resume=True, steps=3, quiet=False)
    assert "train.steps was 2 and is now 3" in capfd.readouterr().out


def test_a_misspelt_run_is_answered_with_the_one_beside_it(tmp_path):
    (tmp_path / "demo-1").mkdir()
    (tmp_path / "demo-1" / "run.json").write_text("{}")
    for read in (js.load, read_config):
        with raises_saying(RunError, "demo1 is not a run folder: it does not exist; did you mean", "demo-1'?"):
            read(tmp_path / "demo1")
    with raises_saying(RunError, "is not a run folder: it has no config.gin"):
        read_config(tmp_path / "demo-1")
