"""Trackers receive a run's rows and files, and never stop or slow the run."""

from __future__ import annotations

import dataclasses
import re
import threading
import time

import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, RunError
from jaxscale.step.trackers import TrackedRun, Tracker, Tracking
from jaxscale.train import TensorBoard, read_config
from jaxscale.train.files import read_json
from jaxscale.train.tracking import Trackers, tracked
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram


@pytest.fixture(autouse=True)
def no_pictures():
    """Here they are drawn."""


class Calls(Tracking):
    def __init__(self, calls, stored, fault):
        self.calls, self.stored, self.fault = calls, stored, fault

    def log(self, step, row):
        self.fault("log")
        self.calls.append(("log", step, dict(row)))

    def artifact(self, path, step):
        self.fault("artifact")
        self.calls.append(("artifact", step, path.name))

    def finish(self, status):
        self.fault("finish")
        self.calls.append(("finish", status))


@js.config.register
@dataclasses.dataclass(frozen=True)
class ListTracker(Tracker):
    """Collects calls in a list.

    Args:
      raises: the call that raises.
    """

    raises: str = ""
    calls = []
    runs = []

    def fault(self, call):
        if call == self.raises:
            raise SystemExit("no network") if call == "start" else OSError("no network")

    def start(self, run):
        self.fault("start")
        self.runs.append(run)
        return Calls(self.calls, {"id": run.stored.get("id", f"new {run.name}")}, self.fault)


@pytest.fixture(autouse=True)
def no_calls():
    ListTracker.calls.clear()
    ListTracker.runs.clear()


def fit(run="here", *trackers, **more):
    config = js.TrainConfig(**bigram(trackers=trackers or (ListTracker(),)))
    return js.fit(config, run=run, quiet=True, **more)


def trackers_of(tmp_path, *trackers, **options):
    warnings = []
    run = TrackedRun("0123456789abcdef", "run", tmp_path)
    return Trackers(trackers, run, warnings.append, **options), warnings


def test_a_run_is_tracked_with_its_rows_files_and_settings():
    run = fit(eval_batches=2, eval_every=2)
    assert [row["loss"] for _, _, row in _logs()] == [row["loss"] for row in run.metrics()]
    assert "eval_loss" in _logs()[-1][2] and not {"step", "time"} & _logs()[0][2].keys()
    names = [c[2] for c in ListTracker.calls if c[0] == "artifact"]
    assert list(dict.fromkeys(names)) == ["config.gin", "loss.png", "run.json"]
    assert ListTracker.calls[-1] == ("finish", "finished")
    (tracked,) = ListTracker.runs
    assert tracked.id == run.info["id"] and tracked.settings["train.steps"] == 4 and tracked.group is None
    assert read_config(run.path) == run.config


def test_a_resumed_run_keeps_its_identity_and_an_edited_one_is_noticed():
    path = fit(until=2).path
    assert ListTracker.calls[-1] == ("finish", "paused")
    fit(path, resume=True)
    assert ListTracker.runs[1].stored == {"id": "new here"} and ListTracker.runs[1].first == 2
    assert ListTracker.runs[1].id == ListTracker.runs[0].id
    assert read_json(path / "trackers.json") == {"ListTracker": {"id": "new here"}}
    (path / "trackers.json").write_text((path / "trackers.json").read_text().replace("new", "old"))
    (fault,) = [state.fault for state in js.train.files.states(path) if state.fault]
    assert "trackers.json is not what was written" in fault


LONG = pytest.mark.long


@pytest.mark.parametrize("call", ["start", "log", *(pytest.param(c, marks=LONG) for c in ("artifact", "finish"))])
def test_a_tracker_that_raises_does_not_stop_the_run(call, capfd):
    config = js.TrainConfig(**bigram(trackers=(ListTracker(raises=call), ListTracker())))
    run = js.fit(config, run="here")
    assert run.info["status"] == "finished" and len(run.metrics()) == 4
    out = " ".join(capfd.readouterr().out.split())
    assert len(re.findall(r"warning: ListTracker failed to", out)) == 1 and "no network" in out
    lost = {"start": 4, "log": 4}.get(call)
    assert (f"warning: {lost} rows did not reach ListTracker;" in out) == bool(lost)
    assert sum(c[0] == "finish" for c in ListTracker.calls) == (1 if call in ("start", "finish") else 2)


def test_a_run_that_fails_is_tracked_as_failed():
    config = js.TrainConfig(**bigram(trackers=(ListTracker(),)))

    def stop():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        js.fit(config, run="here", quiet=True, stop=stop)
    assert ListTracker.calls[-1] == ("finish", "failed")


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_blocks_forever_is_left_behind(where, tmp_path):
    event, entered = threading.Event(), threading.Event()

    class Blocks(ListTracker):
        def fault(self, call):
            if call == where:
                entered.set()
                event.wait()

    trackers, warnings = trackers_of(tmp_path, Blocks(), waiting=3, patience=0.2)
    if where == "log":
        trackers.write({"step": 1, "loss": 1.0})
        entered.wait()
    for step in range(2, 9):
        trackers.write({"step": step, "loss": 1.0})
    began = time.monotonic()
    trackers.finish("finished")
    assert time.monotonic() - began < 10
    event.set()
    assert [s for s in warnings if s.startswith("Blocks did not finish within 0.2 seconds")], warnings
    if where == "log":
        assert warnings[0].startswith("Blocks is slow: 3 rows wait for it")
        assert len(warnings) == 2 and "8 rows did not reach it" in warnings[1]


def test_a_slow_tracker_drops_rows_and_counts_them(tmp_path):
    go, entered = threading.Event(), threading.Event()

    class Slow(ListTracker):
        def fault(self, call):
            entered.set()
            go.wait()

    trackers, warnings = trackers_of(tmp_path, Slow(), waiting=3)
    entered.wait()
    for step in range(1, 11):
        trackers.write({"step": step, "loss": 1.0})
    go.set()
    trackers.finish("finished")
    assert [step for _, step, _ in _logs()] == [1, 2, 3]
    assert warnings[0].startswith("Slow is slow: 3 rows wait") and warnings[1].startswith("7 rows did not reach Slow;")
    assert len(warnings) == 2


def test_a_slow_tracker_drops_histograms_and_gets_the_newest_of_each_file(tmp_path):
    go, entered, drawn = threading.Event(), threading.Event(), []

    class Slow(ListTracker):
        def fault(self, call):
            entered.set()
            go.wait()

    def draw(path):
        drawn.append(threading.current_thread().name)
        path.write_text("a picture")

    def cannot(path):
        raise RunError("no matplotlib")

    trackers, warnings = trackers_of(tmp_path, Slow())
    entered.wait()
    for step in range(1, 21):
        trackers.histograms(step, {})
        trackers.artifact(tmp_path / "loss.png", step, draw)
        trackers.artifact(tmp_path / "other.png", step, cannot)
    go.set()
    trackers.finish("finished")
    assert drawn == ["tracker Slow"] and [c for c in ListTracker.calls if c[0] == "artifact"] == [
        ("artifact", 20, "loss.png")
    ]
    assert warnings[0].startswith("Slow is slow: histograms of 10 steps wait for it")
    assert warnings[1:] == ["the histograms of 10 steps did not reach Slow; metrics.jsonl has all rows"]


def test_trackers_of_one_class_are_stored_apart(tmp_path):
    trackers, _ = trackers_of(tmp_path, ListTracker(), ListTracker())
    trackers.finish("finished")
    assert list(read_json(tmp_path / "trackers.json")) == ["ListTracker", "ListTracker 2"]


def test_a_run_beside_a_gin_file_of_a_sweep_is_no_trial(tmp_path):
    (tmp_path / "sweep.gin").touch()
    groups = [tracked(js.TrainConfig(), tmp_path / name, "", 0).group for name in ("run-1", "001")]
    assert groups == [None, tmp_path.name]


@pytest.mark.long
def test_trials_of_a_sweep_are_a_group():
    text = js.config.dumps("train", js.TrainConfig(**bigram(trackers=(ListTracker(),))).values())
    js.sweep.Sweep(axes={"train.lr": [1e-3, 3e-3]}, objective="loss").run("lrs", text, quiet=True)
    assert [(r.group, r.name) for r in ListTracker.runs] == [("lrs", "lrs/000"), ("lrs", "lrs/001")]


def test_a_missing_package_is_an_error_before_training(monkeypatch):
    monkeypatch.setattr("jaxscale.step.trackers.find_spec", lambda name: None)
    for tracker, package, extra in (
        (TensorBoard(), "tensorboardX", "tb"),
        (js.train.Wandb(), "wandb", "wandb"),
        (js.train.MLflow(), "mlflow", "mlflow"),
        (js.train.Trackio(), "trackio", "trackio"),
    ):
        with raises_saying(ConfigError, f"needs {package}: pip install 'jaxscale[{extra}]'"):
            fit("here", tracker)
    assert not (js.Run("here").path).exists()


@pytest.mark.parametrize("value", [TensorBoard, TensorBoard(), ("wandb",), None])
def test_what_is_not_a_tuple_of_trackers_is_an_error(value):
    with raises_saying(ConfigError, "train.trackers must be a tuple of trackers, such as (TensorBoard(),)"):
        js.TrainConfig(trackers=value)


def test_a_mode_that_does_not_exist_is_an_error():
    with raises_saying(ConfigError, "Wandb.mode = 'off' does not exist", "did you mean 'offline'?"):
        js.train.Wandb(mode="off")


@pytest.mark.parametrize(
    "tracker, settings, message",
    [
        ("Wandb", {"tags": "abc"}, "Wandb.tags = 'abc': must be a tuple of texts"),
        ("Wandb", {"project": 3}, "Wandb.project = 3: must be text"),
        ("MLflow", {"experiment": ""}, "MLflow.experiment = '': must be text"),
        ("Trackio", {"space": 3}, "Trackio.space = 3: must be text or None"),
    ],
)
def test_settings_of_a_wrong_type_are_errors(tracker, settings, message):
    with raises_saying(ConfigError, message):
        getattr(js.train, tracker)(**settings)


@pytest.mark.parametrize("uri", ["postgresql://me:hidden@host/db", "http://host/?user=me&password=hidden"])
def test_a_password_in_a_uri_is_refused_and_not_repeated(uri):
    with pytest.raises(ConfigError, match="MLflow.uri contains a password.*MLFLOW_TRACKING_URI") as error:
        js.train.MLflow(uri=uri)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "http://host:5000", "http://me@host:5000", "databricks://a:b"])
def test_a_uri_without_a_password_is_used(uri):
    assert js.train.MLflow(uri=uri).uri == uri


def test_the_old_setting_is_answered_with_the_new_one():
    with raises_saying(ConfigError, "'tensorboard'", "did you mean 'trackers'"):
        js.fit(tensorboard=True)
    js.config.load(bindings=["train.trackers = (@TensorBoard(),)"])
    assert js.config.call("train").trackers == (TensorBoard(),)


def test_tensorboard_events_have_every_number_and_a_resume_replaces_steps():
    pytest.importorskip("tensorboardX")
    path = fit("here", TensorBoard(), until=2, eval_batches=2).path
    fit(path, TensorBoard(), resume=True, eval_batches=2)
    scalars, purged = [], []
    for file in sorted((path / "tensorboard").iterdir()):
        for event in _events(file):
            purged += [event.step] * (event.session_log.status == event.session_log.START)
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
            assert {v.tag for v in event.summary.value if v.HasField("image")} <= {"loss"}
    assert purged == [3]
    losses = [(step, pytest.approx(value)) for step, tag, value in scalars if tag == "loss"]
    assert losses == [(row["step"], row["loss"]) for row in js.Run(path).metrics()]
    assert (4, "eval_loss") in [(step, tag) for step, tag, _ in scalars]


def test_tensorboard_events_have_histograms(tmp_path):
    pytest.importorskip("tensorboardX")
    record = TensorBoard().start(TrackedRun("0123456789abcdef", "run", tmp_path))
    one = js.step.Histogram(np.array([3, 0, 5]), np.array([-1.0, 0.0, 1.0, 2.0]), nonfinite=2)
    record.histograms(7, {"params/x": one, "params/y": dataclasses.replace(one, nonfinite=0)})
    record.finish("finished")
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = {v.tag: (event.step, v) for event in _events(file) for v in event.summary.value}
    step, value = values["params/x"]
    assert step == 7 and list(value.histo.bucket_limit) == [0, 1, 2] and list(value.histo.bucket) == [3, 0, 5]
    assert (value.histo.min, value.histo.max, value.histo.num, value.histo.sum) == (-1, 2, 8, 3 * -0.5 + 5 * 1.5)
    assert values["nonfinite/params/x"][1].simple_value == 2 and "nonfinite/params/y" not in values


def _events(file):
    """Read an event file: records of length (8 bytes), CRC (4), data, CRC (4)."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = file.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size


def _logs():
    return [c for c in ListTracker.calls if c[0] == "log"]
