"""Runs in buckets, on servers of S3's and Google Cloud Storage's protocols: as on a disk, and nothing lost."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale import buckets, working_copy
from jaxscale.buckets import Bucket, BucketError
from jaxscale.cli import main
from jaxscale.errors import LOST, MISTAKE, CheckpointError, ConfigError, DataError, RunError
from jaxscale.sweep.comparing.folders import read_runs
from jaxscale.train.checkpoints.bucket_places import BucketFiles, BucketPlace
from jaxscale.train.checkpoints.staged import StagedCheckpoints
from tests.truth.bucket_runs import SETTINGS, assert_same_parameters, forget
from tests.truth.servers import failing

pytest.importorskip("moto", reason="needs moto[server] and gcp-storage-emulator")

LONG = pytest.mark.long


def test_a_run_in_a_bucket_goes_on_elsewhere_and_ends_as_on_a_disk(url, whole, capfd):
    first = js.fit(run=url, until=4, **SETTINGS)
    assert first.checkpoints.steps() == [2, 4]
    forget()
    resumed = js.fit(run=url, resume=True, quiet=True)
    forget()
    read = js.load(url)
    assert (read.place, read.checkpoints.steps()) == (url, [4, 6])  # keep = 2
    assert [row["step"] for row in read.metrics()] == [1, 2, 3, 4, 5, 6]
    assert read.info["status"] == "finished"
    assert_same_parameters(whole, resumed)
    assert_same_parameters(whole, read)
    assert main(["checkpoint", "verify", url]) == 0
    assert "checkpoint 6" in capfd.readouterr().out
    assert not [key for key in Bucket(url).list("checkpoints/2/")]
    with pytest.raises(RunError, match="already exists; resume it with --resume"):
        js.fit(run=url, **SETTINGS)


def test_a_run_on_a_disk_can_be_copied_into_a_bucket_and_back(whole, tmp_path, url):
    bucket, back = Bucket(url), tmp_path / "back"
    for file in whole.path.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            bucket.write(file.relative_to(whole.path).as_posix(), file.read_bytes() or b" ")
    assert_same_parameters(whole, js.load(url))
    started = js.fit(run=f"{url}-2", start=js.train.FromRun(url), **{**SETTINGS, "steps": 2})
    assert started.config.start.path == url
    for key in Bucket(f"{url}-2").list():
        (back / key).parent.mkdir(parents=True, exist_ok=True)
        (back / key).write_bytes(Bucket(f"{url}-2").read(key))
    assert js.load(back).checkpoints.steps() == [2]
    js.load(back).params(2)


@pytest.mark.parametrize("damage", ["flip", *(pytest.param(d, marks=LONG) for d in ("delete", "manifest"))])
def test_damage_is_noticed_and_training_goes_on_from_the_checkpoint_before(damage, tmp_path, whole, capfd):
    url = f"s3://runs/{tmp_path.name}/run"
    js.fit(run=url, until=4, **SETTINGS)
    bucket = Bucket(f"{url}/checkpoints/4")
    key = "manifest.json" if damage == "manifest" else next(k for k in bucket.list() if k.endswith("head/weight/c.0.0"))
    data = bytearray(bucket.read(key))
    data[len(data) // 2] ^= 1
    bucket.delete(key) if damage == "delete" else bucket.write(key, data)
    assert main(["checkpoint", "verify", url]) == 1
    out = capfd.readouterr().out
    assert "1 of 2 checkpoints are damaged" in out and "checkpoint 2: " in out
    forget()
    resumed = js.fit(run=url, resume=True, quiet=True)
    assert resumed.checkpoints.steps() == [4, 6]
    assert any("damaged-" in key for key in Bucket(url).list("checkpoints/4/"))  # set aside, not deleted
    assert_same_parameters(whole, resumed)


def test_a_writer_that_was_believed_dead_cannot_touch_the_other_ones_checkpoint(tmp_path):
    url = f"s3://runs/{tmp_path.name}/run/checkpoints"
    old, new = BucketPlace(url), BucketPlace(url)
    old.take("0" * 8)
    old.begin(2, "0" * 8).write("tensors/x/c", b"old")
    new.take("1" * 8)
    assert old.unfinished() == []  # what the other one left is gone
    new.begin(2, "1" * 8).write("tensors/x/c", b"new")
    new.publish(2, "1" * 8, b"the manifest")
    old.begin(2, "0" * 8).write("tensors/x/c", b"late")
    with pytest.raises(CheckpointError, match="another run has begun to write"):
        old.publish(2, "0" * 8, b"late")
    with pytest.raises(FileExistsError):
        new.publish(2, "1" * 8, b"again")
    new.publish(2, "1" * 8, b"the manifest")  # the answer was lost, and the request sent again
    assert new.finished(2).read("manifest.json").tobytes() == b"the manifest"
    assert new.finished(2).read(f"{'1' * 8}/tensors/x/c").tobytes() == b"new"


def test_two_runs_in_one_folder_stop_the_first(tmp_path):
    url, stopped = f"s3://runs/{tmp_path.name}/run", []

    class Other(js.step.guards.FiniteGuard):
        def watch(self, run):
            watch = super().watch(run)
            before = watch.before

            def interfere(step, state):
                if step == 3:
                    Bucket(url).write(working_copy.WRITER, b"somebody else")
                    stopped.append(step)
                before(step, state)

            object.__setattr__(watch, "before", interfere)
            return watch

    with pytest.raises((RunError, CheckpointError), match="another run has begun to write"):
        js.fit(run=url, **{**SETTINGS, "guards": (Other(),), "steps": 400})
    assert stopped == [3]


@pytest.mark.long
@pytest.mark.parametrize("status", [503, pytest.param(500, marks=LONG), pytest.param(0, marks=LONG)])
def test_a_server_that_fails_for_a_while_loses_nothing(status, stores, tmp_path, whole, monkeypatch):
    url, count = f"s3://runs/{tmp_path.name}/run", iter(range(10**9))
    monkeypatch.setattr(buckets, "RETRIES", {**buckets.RETRIES, "initial_delay": "5ms", "max_delay": "50ms"})
    with failing(stores["AWS_ENDPOINT_URL"], lambda method, path: status if next(count) % 5 == 2 else None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        run = js.fit(run=url, **SETTINGS)
        assert run.checkpoints.steps() == [4, 6]
        assert_same_parameters(whole, run)
    assert next(count) > 200


@pytest.mark.long
def test_credentials_that_expire_fail_the_next_step_and_a_resumed_run_uploads_the_rest(
    stores, tmp_path, whole, monkeypatch
):
    url, uploads = f"s3://runs/{tmp_path.name}/run", []

    def expired(method, path):
        uploads.append((method, path))
        return 403 if any(m == "PUT" and "/checkpoints/2/manifest" in p for m, p in uploads[:-1]) else None

    with failing(stores["AWS_ENDPOINT_URL"], expired) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
        with pytest.raises((RunError, CheckpointError), match="access is denied .ExpiredToken.; check or renew") as e:
            js.fit(run=url, **SETTINGS)
        assert e.value.code == LOST  # so that a launcher starts it again
    working_copy._fetched.clear()
    resumed = js.fit(run=url, resume=True, quiet=True)
    assert [row["step"] for row in resumed.metrics()] == [1, 2, 3, 4, 5, 6]
    assert_same_parameters(whole, resumed)


@pytest.mark.long
def test_a_run_that_is_killed_before_its_first_upload_goes_on_from_the_disk(tmp_path, whole, monkeypatch):
    url, steps = f"s3://runs/{tmp_path.name}/run", []

    def die():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StagedCheckpoints, "_start_upload", lambda self: None)
        patch.setattr(StagedCheckpoints, "close", StagedCheckpoints.wait)  # a killed process waits for no upload
        with pytest.raises(KeyboardInterrupt):
            js.fit(run=url, staging=str(tmp_path / "staging"), stop=die, **SETTINGS)
    assert not Bucket(url).exists("checkpoints/2/manifest.json")
    forget()
    steps.clear()
    staging = str(tmp_path / "staging")
    again = js.fit(run=url, resume="newest", staging=staging, stop=lambda: steps.append(1), **SETTINGS)
    assert len(steps) == 4 and [row["step"] for row in again.metrics()] == [1, 2, 3, 4, 5, 6]
    assert_same_parameters(whole, again)


@pytest.mark.long
def test_checkpoints_are_staged_on_a_disk_and_read_from_whichever_is_whole(stores, tmp_path, whole, monkeypatch):
    url, staging = f"s3://runs/{tmp_path.name}/run", tmp_path / "staging"
    slow = threading.Event()
    uploads = BucketFiles.write
    monkeypatch.setattr(BucketFiles, "write", lambda *args: (slow.wait(60), uploads(*args))[1])

    class Release:
        def __call__(self):  # after every step
            return self.steps.append(1) or len(self.steps) == 4 and (slow.set() or False)

        def __init__(self):
            self.steps = []

    run = js.fit(run=url, until=4, staging=str(staging), stop=Release(), **SETTINGS)
    assert Bucket(url).exists("checkpoints/4/manifest.json")  # training waited for no upload but the last
    [folder] = staging.glob("*/checkpoints")
    assert sorted(p.name for p in folder.iterdir() if p.name.isdecimal()) == ["2", "4"]
    chunk = next((folder / "4").rglob("head/weight/c.0.0"))
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    monkeypatch.setattr(BucketFiles, "write", uploads)
    resumed = js.fit(run=url, resume=True, quiet=True)  # 4 from the bucket, since that on the disk is damaged
    assert resumed.checkpoints.steps() == [4, 6]
    assert_same_parameters(whole, resumed)
    shutil.rmtree(staging)
    forget()
    assert_same_parameters(whole, js.load(url))
    assert run.place == url
    with pytest.raises(ConfigError, match="train.staging = 'x' is for runs in a bucket, and here is on a disk; leave"):
        js.fit(run="here", staging="x", **SETTINGS)
    assert not Path("here").exists()
    with pytest.raises(ConfigError, match="staging = '/dev/null/x' cannot be written: Not a directory; name a folder"):
        js.fit(run=f"{url}-2", **SETTINGS, staging="/dev/null/x")


def test_what_cannot_be_reached_is_one_sentence_before_training(stores, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="there is no bucket s3://elsewhere; create it first"):
        js.fit(run="s3://elsewhere/run", **SETTINGS)
    with failing(stores["AWS_ENDPOINT_URL"], lambda method, path: 403) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
        with pytest.raises(RunError, match="access is denied .*AWS_ACCESS_KEY_ID") as e:
            js.fit(run="s3://runs/denied", **SETTINGS)
        assert e.value.code == MISTAKE
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "5ms", "max_delay": "5ms"})
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(RunError, match="the server does not answer") as e:
            js.fit(run="s3://runs/gone", **SETTINGS)
        assert e.value.code == LOST
        assert main(["checkpoint", "list", "s3://runs/gone"]) == LOST
    with pytest.raises(RunError, match="s3://runs/none is not a run folder: it does not exist"):
        js.load("s3://runs/none").info  # noqa: B018
    secrets = [v for k, v in os.environ.items() if k.startswith("AWS_SECRET")]
    files = [p for p in Path(tmp_path).rglob("*") if p.is_file()]
    assert not [p for p in files if any(s.encode() in p.read_bytes() for s in secrets if s != "tests")]


def test_a_working_copy_that_is_ahead_of_its_bucket_stays(tmp_path):
    url = f"s3://runs/{tmp_path.name}/folder"
    copy = working_copy.local(url)
    copy.mkdir(parents=True)
    with working_copy.mirrored(copy):
        (copy / "a.txt").write_text("one")
        (copy / "gone.txt").write_text("x")
    (copy / "a.txt").write_text("one and two")  # its upload was not reached
    working_copy._fetched.clear()
    assert working_copy.local(url).joinpath("a.txt").read_text() == "one and two"
    Bucket(url).write("a.txt", b"from another machine")
    Bucket(url).delete("gone.txt")
    working_copy._fetched.clear()
    assert working_copy.local(url).joinpath("a.txt").read_text() == "from another machine"
    assert not (copy / "gone.txt").exists()


def test_urls_and_their_working_copies_name_each_other():
    for text in ("s3://b/a/c", Path("s3://b/a/c"), "s3://b/a/c/"):
        assert working_copy.url_of(working_copy.copy_of(text) / "d") == "s3://b/a/c/d"
    assert working_copy.url_of("runs/a") is None and not buckets.is_url("runs/s3:") and not buckets.is_url("s3:")
    for other in ("gcs://b/run", "S3://b/run", Path("az://b/run")):
        with pytest.raises(ConfigError, match="buckets are s3:// and gs://, not"):
            working_copy.local(other)
    with pytest.raises(FileNotFoundError):
        Bucket("s3://runs/a").read("missing")
    with pytest.raises(BucketError, match="there is no bucket"):
        Bucket("s3://nowhere").check()
    assert json.loads(json.dumps(dataclasses.asdict(js.train.FromRun("s3://a/b", 3))))["path"] == "s3://a/b"


def test_a_token_file_in_a_bucket_is_fetched_chunk_by_chunk(tmp_path, monkeypatch):
    tokenizer, random = js.data.ByteTokenizer(), np.random.default_rng(0)
    documents = [(f"{i}", random.integers(0, 256, 20_000)) for i in range(40)]
    js.data.write_token_file(tmp_path / "tokens", documents, tokenizer=tokenizer)
    url = f"s3://runs/{tmp_path.name}/tokens"
    for file in (tmp_path / "tokens").iterdir():
        Bucket(url).write(file.name, file.read_bytes())
    read = Bucket.read
    fetched = []

    def counted(self, key, start=None, stop=None, **options):
        fetched.append((key, start))
        return read(self, key, start, stop, **options)

    monkeypatch.setattr(Bucket, "read", counted)
    ours = js.data.token_file(url).source(tokenizer, seq_len=64, split="train")
    theirs = js.data.token_file(str(tmp_path / "tokens")).source(tokenizer, seq_len=64, split="train")
    assert ours.fingerprint == theirs.fingerprint
    batches = [js.data.Loader(source, batch_size=4, seed=1) for source in (ours, theirs)]
    before = len(fetched)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, *(loader.batch_at(3) for loader in batches))
    chunks = [start for key, start in fetched[before:] if key == "tokens.bin"]
    assert 1 <= len(chunks) == len(set(chunks)) <= 8 < 25  # each once, and not the whole file
    again = js.data.Loader(js.data.token_file(url).source(tokenizer, seq_len=64, split="train"), batch_size=4, seed=1)
    before = len(fetched)
    jax.tree.map(np.testing.assert_array_equal, again.batch_at(3), batches[1].batch_at(3))
    assert not [key for key, _ in fetched[before:] if key == "tokens.bin"]  # they are on this machine

    key, data = "tokens.bin", bytearray(read(Bucket(url), "tokens.bin"))
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    Bucket(url).write(key, data)
    forget()
    damaged = js.data.token_file(url).source(tokenizer, seq_len=64, split="train")
    with pytest.raises(DataError, match="tokens.bin, chunk .* is not what was written"):
        damaged.rows(np.arange(len(damaged)))
    Bucket(url).delete("meta.json")
    with pytest.raises(DataError, match="is not a complete token file"):
        js.data.token_file(url).source(tokenizer, seq_len=64, split="train")


def test_patterns_name_runs_of_a_bucket_and_a_sweep_is_read_from_its_url(tmp_path, whole, capsys):
    url = f"s3://runs/{tmp_path.name}"
    small = [p for p in whole.path.iterdir() if p.is_file() and not p.name.startswith(".")]
    for run in ("runs/a-1", "runs/a-2", "runs/b", "deep/er/a-3"):
        for file in small:
            Bucket(url).write(f"{run}/{file.name}", file.read_bytes() or b" ")
    Bucket(url).write("runs/a-notes/x", b"x")
    working_copy.local(f"{url}/runs/a-1")
    working_copy.copy_of(f"{url}/runs/a-old").mkdir()  # what is only in the cache does not count
    (working_copy.copy_of(f"{url}/runs/a-old") / "run.json").write_text("{}")
    for pattern, names in (
        ("runs/a-*", ["runs/a-1", "runs/a-2"]),
        ("**/a-?", ["deep/er/a-3", "runs/a-1", "runs/a-2"]),
        ("run[s]/b", ["runs/b"]),
    ):
        assert [working_copy.as_named(run.path) for run in read_runs(f"{url}/{pattern}")] == [
            f"{url}/{name}" for name in names
        ]
    assert main(["report", f"{url}/runs/a-*", "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").exists()
    with pytest.raises(RunError, match="names no run"):
        read_runs(f"{url}/none*")
    with pytest.raises(RunError, match="there is no bucket s3://elsewhere"):
        read_runs("s3://elsewhere/*")
    edited = Bucket(f"{url}/runs/a-1").read("config.gin") + b"# edited\n"
    Bucket(f"{url}/runs/a-1").write("config.gin", edited)
    working_copy._fetched.clear()
    capsys.readouterr()
    main(["report", f"{url}/runs/a-*", "--out", str(tmp_path / "report"), "--accept-edits"])
    assert f"accepted the edit of {url}/runs/a-1/config.gin" in capsys.readouterr().err
    with pytest.raises(RunError, match=f"{url}/runs/b is not a sweep"):
        js.sweep.Result(f"{url}/runs/b")
    Bucket(f"{url}/sweep").write("sweep.gin", b"sweep.objective = 'loss'\n")
    assert js.sweep.Result(f"{url}/sweep").objective == "loss"


def test_a_hostile_bucket_writes_nowhere_else(tmp_path):
    bucket = Bucket(f"s3://runs/{tmp_path.name}/hostile")
    for key in (f"/{tmp_path}/outside", "a", "a/b", "folder/", "good.txt"):
        bucket.write(key, b"x")
    copy = working_copy.local(bucket.url)
    assert sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*.txt")) == ["good.txt"]
    assert (copy / "a" / "b").exists() and not (tmp_path / "outside").exists()
    for url in ("s3://runs/../../x", "gs://runs/a/../../../x"):
        with pytest.raises(ConfigError, match="has a part"):
            working_copy.local(url)
    assert working_copy.copy_of("s3://runs//a/./b") == working_copy.copy_of("s3://runs/a/b")


def test_what_others_put_beside_checkpoints_stays_and_reports_do_not_stop_a_run(tmp_path):
    url = f"s3://runs/{tmp_path.name}/run"
    bucket = Bucket(f"{url}/checkpoints")
    for key in ("best/x", "4/manifest/metadata", "6.damaged-x/c", f"8/{'0' * 8}/c"):
        bucket.write(key, b"x")
    BucketPlace(bucket.url).take("1" * 8)
    assert bucket.list() == ["4/manifest/metadata", "6.damaged-x/c", "best/x", "writer"]
    copy = working_copy.local(f"{url}-2")
    copy.mkdir(parents=True)
    (copy / "report.html").write_text("old")
    with working_copy.mirrored(copy) as mirror:
        (copy / "config.gin").write_text("x")
        mirror.flush()
        working_copy.upload_files(copy, ["report.html", "curves.png"])
        mirror.flush()  # still the writer
        (copy / "config.gin").unlink()  # a scratch disk is cleaned up
        (copy / "report.html").unlink()
    assert Bucket(f"{url}-2").list() == [".writer", "config.gin"]
