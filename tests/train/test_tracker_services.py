"""wandb offline, MLflow on SQLite and Trackio on this machine record a run and its resume; read back without ours."""

from __future__ import annotations

import importlib
import json
import os
import time

import pytest

import jaxscale as js
from tests.truth.runs import bigram

pytestmark = pytest.mark.long


def needed(package):
    """Import a package; one that is missing is a failure under `make test-all`, and else skips the test."""
    return importlib.import_module(package) if "JAXSCALE_TEST_ALL" in os.environ else pytest.importorskip(package)


@pytest.fixture(autouse=True)
def no_pictures():
    """Here they are drawn."""


def track(tracker):
    """A run of two steps, resumed for two more, with histograms at its last step."""
    chosen = js.step.Histograms(params=("embed",), grads=("head",), every=4, bins=8)
    config = js.TrainConfig(**bigram(trackers=(tracker,), histograms=chosen))
    options = dict(run="tracked", quiet=True, eval_batches=2)
    js.fit(config, until=2, **options)
    time.sleep(1.1)  # wandb names its folders by the second
    return js.fit(config, resume=True, **options)


def losses(run):
    return [(row["step"], pytest.approx(row["loss"])) for row in run.metrics()]


def test_mlflow_has_one_run_with_all_steps_settings_and_files(tmp_path):
    mlflow = needed("mlflow")
    run = track(js.train.MLflow("bigrams", uri=f"sqlite:///{tmp_path}/mlflow.db"))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("bigrams").experiment_id])
    assert record.info.run_name == "tracked" and record.info.status == "FINISHED"
    assert record.data.tags["jaxscale.id"] == run.info["id"] and record.data.params["train.steps"] == "4"
    assert [(m.step, m.value) for m in client.get_metric_history(record.info.run_id, "loss")] == losses(run)
    assert [m.step for m in client.get_metric_history(record.info.run_id, "eval_loss")] == [2, 4]
    files = [a.path for a in client.list_artifacts(record.info.run_id)]
    assert files == ["config.gin", "images", "loss.png", "run.json"]
    (drawn,) = {a.path for a in client.list_artifacts(record.info.run_id, "images") if a.path.endswith(".png")}
    assert "histograms" in drawn


def test_mlflow_nests_the_trials_of_a_sweep_under_one_run(tmp_path):
    mlflow = needed("mlflow")
    tracker = js.train.MLflow("bigrams", uri=f"sqlite:///{tmp_path}/mlflow.db")
    text = js.config.dumps("train", js.TrainConfig(**bigram(trackers=(tracker,))).values())
    js.sweep.Sweep(axes={"train.lr": [1e-3, 3e-3]}, objective="loss").run("lrs", text, quiet=True)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    records = client.search_runs([client.get_experiment_by_name("bigrams").experiment_id])
    by_name = {record.info.run_name: record for record in records}
    assert sorted(by_name) == ["lrs", "lrs/000", "lrs/001"]
    assert {record.info.status for record in records} == {"FINISHED"}
    parents = {by_name[name].data.tags["mlflow.parentRunId"] for name in ("lrs/000", "lrs/001")}
    assert parents == {by_name["lrs"].info.run_id}


def test_trackio_has_one_run_with_all_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    needed("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = track(js.train.Trackio("bigrams"))
    name = f"tracked-{run.info['id'][:6]}"
    assert SQLiteStorage.get_runs("bigrams") == [name]
    rows = SQLiteStorage.get_logs("bigrams", name)
    assert [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)] == losses(run)
    (counts,) = [row["params/embed/weight"] for row in rows if "params/embed/weight" in row]
    assert counts["_type"] == "trackio.histogram" and sum(counts["values"]) == 32 * 8
    assert sum("config.gin" in row for row in rows) == sum("run.json" in row for row in rows) == 2
    assert list((tmp_path / "trackio").rglob("*.png"))


def test_wandb_offline_has_all_steps_under_one_id():
    wandb = needed("wandb")
    run = track(js.train.Wandb("bigrams", mode="offline"))
    wandb.teardown()  # its service writes the end of a finished run a moment later, at the latest now
    rows, ids = [], set()
    for folder in sorted((run.path / "wandb").glob("offline-run-*")):
        (file,) = folder.glob("*.wandb")
        for record in _records(file.read_bytes()):
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        assert (folder / "files" / "config.gin").exists() and list(folder.rglob("media/images/loss*.png"))
    (counts,) = [row["params/embed/weight/values"] for row in rows if "params/embed/weight/values" in row]
    assert sum(counts) == 32 * 8
    assert ids == {(run.info["id"], "bigrams", "tracked")}
    assert [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)] == losses(run)


def test_wandb_without_an_api_key_is_a_warning(monkeypatch, tmp_path, capfd):
    needed("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    run = js.fit(js.TrainConfig(**bigram(trackers=(js.train.Wandb(),))), run="tracked")
    out = " ".join(capfd.readouterr().out.split())
    assert 'warning: Wandb failed to start (RuntimeError: there is no API key: run "wandb login"' in out
    assert "4 rows did not reach Wandb" in out and run.info["status"] == "finished"


def _records(data):
    """Read a .wandb file: 7 bytes of header, then LevelDB's log of blocks of 32 KiB.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""
