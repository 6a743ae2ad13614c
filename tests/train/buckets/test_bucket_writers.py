"""Runs in buckets: other writers, large files, several processes and servers; what is reported of faults."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale import buckets, large_objects, working_copy
from jaxscale.buckets import Bucket, BucketError
from jaxscale.cli import main
from jaxscale.errors import LOST, MISTAKE, AlteredFile, RunError
from jaxscale.train.checkpoints import places
from jaxscale.train.checkpoints.bucket_places import BucketPlace
from jaxscale.train.checkpoints.places import DiskPlace
from jaxscale.train.checkpoints.staged import StagedCheckpoints
from jaxscale.train.checkpoints.store import Checkpoints
from jaxscale.train.files import write_json
from tests.truth.bucket_runs import SETTINGS, copied, forget
from tests.truth.runs import BIGRAM, environment, write_gin
from tests.truth.servers import failing

pytest.importorskip("moto", reason="needs moto[server] and gcp-storage-emulator")


def test_files_that_the_writer_before_uploaded_late_are_not_overwritten(tmp_path, monkeypatch):
    url = f"s3://runs/{tmp_path.name}/folder"
    Bucket(url).write("metrics.jsonl", b"1\n")
    copy = working_copy.local(url)
    before = working_copy.Mirror(copy, url)
    before.become_writer()
    Bucket(url).write("metrics.jsonl", b"1\n2\n")  # the other process, after this one has read the folder
    with working_copy.mirrored(copy, update=True):
        assert (copy / "metrics.jsonl").read_bytes() == b"1\n2\n"
        (copy / "metrics.jsonl").write_bytes(b"1\n2\n3\n")
    assert Bucket(url).read("metrics.jsonl") == b"1\n2\n3\n"

    writer = working_copy.Mirror(copy, url)
    writer.become_writer()
    monkeypatch.setattr(working_copy, "SMALL", 8)
    for name in ("a", "large"):
        (copy / name).write_bytes(name.encode() * (9 if name == "large" else 1))
    write = Bucket.write

    def interrupted(self, key, data, **options):
        write(self, key, data, **options)
        if key == "a":
            write(self, working_copy.WRITER, b"somebody else")

    monkeypatch.setattr(Bucket, "write", interrupted)
    with pytest.raises(BucketError, match="another run has begun to write"):
        writer.flush()
    assert not Bucket(url).exists("large")
    with pytest.raises(BucketError, match="another run has begun to write"):
        (copy / "a").write_bytes(b"aa")
        (copy / "large").unlink()
        writer.become_writer()
        writer.flush()  # so that no checkpoint is finished whose metrics the next writer may not have seen


@pytest.mark.long
def test_a_run_whose_last_upload_failed_is_completed_when_it_is_started_again(tmp_path, whole):
    url = copied(whole, f"s3://runs/{tmp_path.name}/run", status="running")
    again = js.fit(run=url, resume=True, quiet=True)
    assert json.loads(Bucket(url).read("run.json"))["status"] == again.info["status"] == "finished"
    write_json(again.path / "run.json", {**again.info, "mark": "was not uploaded"})
    js.fit(run=url, resume="newest", **SETTINGS)
    assert json.loads(Bucket(url).read("run.json"))["status"] == "finished"


def test_servers_have_working_copies_of_their_own(monkeypatch):
    copies = {working_copy.copy_of("s3://b/run")}
    mine = working_copy.copy_of("s3://b/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://Minio.example.com:9000/")
    copies.add(working_copy.copy_of("s3://b/run"))
    assert "s3@minio.example.com-9000/b/run" in str(working_copy.copy_of("s3://b/run"))
    with pytest.raises(RunError, match="is a working copy of s3://b/run on 127.*the environment names minio.*name the"):
        working_copy.url_of(mine)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert working_copy.copy_of("s3://b/run") == working_copy.cache_root() / "s3" / "b" / "run"
    assert len({*copies, working_copy.copy_of("s3://b/run")}) == 3
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    assert working_copy.copy_of("gs://b/run") == working_copy.cache_root() / "gs" / "b" / "run"


def test_verify_does_not_count_an_outage_as_damage_and_lists_what_was_set_aside(stores, copy, monkeypatch, capfd):
    url = copy
    with failing(stores["AWS_ENDPOINT_URL"], lambda m, p: 503 if "/c.0" in p else None) as proxy:
        with monkeypatch.context() as patch:
            patch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "5ms", "max_delay": "5ms"})
            patch.setenv("AWS_ENDPOINT_URL", proxy)
            assert main(["checkpoint", "verify", url]) == LOST
    out = "".join(capfd.readouterr())
    assert "damaged" not in out and "does not answer" in out
    place = BucketPlace(f"{url}/checkpoints")
    place.set_aside(6)
    place.set_aside(6)  # there is nothing left of that name
    place.bucket.write("8/0123abcd/tensors/x", b"x")
    place.bucket.write("notes/x", b"x")
    [aside] = [key for key in place.bucket.list() if "damaged-" in key]
    assert main(["checkpoint", "verify", url]) == 0
    assert f"not finished, or set aside: {aside}, 8\n" in capfd.readouterr().out
    place.set_aside(4)
    assert main(["checkpoint", "list", url]) == 0
    assert "not finished, or set aside" in capfd.readouterr().out


def test_messages_name_the_url_and_their_advice_works(copy):
    url = copy
    Bucket(url).write("config.gin", Bucket(url).read("config.gin").replace(b"train.steps = 6", b"train.steps = 8"))
    with pytest.raises(AlteredFile) as e:
        js.load(url).config  # noqa: B018
    assert f"{url}/config.gin is not what was written" in str(e.value)
    command = f"checkpoint verify {url} --accept-edits"
    assert command in str(e.value) and str(working_copy.cache_root()) not in str(e.value)
    assert main(command.split()) == 0
    forget()
    assert js.load(url).config.steps == 8


def test_what_is_uploaded_is_not_deleted_and_no_upload_is_forgotten(tmp_path, monkeypatch):
    place = DiskPlace(tmp_path / "disk")
    for step in (2, 4, 6):
        (place.path / str(step)).mkdir(parents=True)
    expired = places.expired

    def late(*args):
        try:
            return expired(*args)
        finally:
            place.protected = (2,)  # an upload begins just then

    monkeypatch.setattr(places, "expired", late)
    place.expire(1, None, "0" * 8)
    assert place.steps() == [2, 6]

    staged = StagedCheckpoints(Checkpoints(f"s3://runs/{tmp_path.name}/checkpoints"), tmp_path)
    uploaded, looks = [], iter(range(100))

    def newer(newest):
        if next(looks) == 0:
            staged._start_upload()  # a checkpoint is finished after the thread has looked for the last time
            return []
        return [] if uploaded else [2]

    monkeypatch.setattr(staged, "_newer", newer)
    monkeypatch.setattr(staged, "_upload_one", uploaded.append)
    staged._start_upload()
    thread = staged._uploading
    if thread is not None:
        thread.join(20)
    assert uploaded == [2] and staged._uploading is None


def test_processes_see_that_one_gave_up_even_if_it_cannot_delete(tmp_path, monkeypatch):
    place = BucketPlace(f"s3://runs/{tmp_path.name}/checkpoints")
    place.begin(2, "0" * 8).write("tensors/x/c", b"x")

    def refused(self, key):
        raise BucketError(13, "access is denied")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "delete", refused)
        with pytest.raises(BucketError):
            place.abandon(2, "0" * 8)
    assert place.is_abandoned(2, "0" * 8)


def test_google_refuses_a_manifest_that_exists_and_the_loser_sees_it(stores, tmp_path, monkeypatch):
    """No emulator of PyPI honours `ifGenerationMatch`; this proxy does, as the protocol says."""
    written: set[str] = set()

    def conditional(method, path):
        name = path.partition("name=")[2].partition("&")[0]
        if method == "POST" and "ifGenerationMatch=0" in path and name in written:
            return 412
        if method == "POST":
            written.add(name)
        return None

    url = f"gs://runs/{tmp_path.name}/checkpoints"
    with failing(stores["STORAGE_EMULATOR_HOST"], conditional) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy)
        first, second = BucketPlace(url), BucketPlace(url)
        first.take("0" * 8)
        first.publish(2, "0" * 8, b"the manifest")
        first.publish(2, "0" * 8, b"the manifest")  # the answer was lost, and the request sent again
        second.take("1" * 8)
        with pytest.raises(FileExistsError, match="written by another process"):
            second.publish(2, "1" * 8, b"another")
        assert first.finished(2).read("manifest.json").tobytes() == b"the manifest"
    assert len(written) == 2


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_large_files_are_read_in_ranges_and_written_in_parts(scheme, tmp_path, monkeypatch):
    url = f"{scheme}://runs/{tmp_path.name}/large"
    for name, value in (("PART", 4000), ("LARGE", 2**20)):
        monkeypatch.setattr(large_objects, name, value)
    sizes, opened = [], buckets._open

    class Counted:
        def __init__(self, *args):
            self.kv = opened(*args)

        def __getattr__(self, name):
            return getattr(self.kv, name)

        def read(self, *args, **options):
            future = self.kv.read(*args, **options)
            with contextlib.suppress(ValueError):
                sizes.append(len(future.result().value))
            return future

    monkeypatch.setattr(buckets, "_open", Counted)
    contents = {str(size): os.urandom(size) for size in (1, 3999, 4000, 4001, 8000, 10_001)}
    for name, content in contents.items():
        Bucket(url).write(name, content)
    copy = working_copy.local(url)
    assert {p.name: p.read_bytes() for p in copy.iterdir() if p.name != working_copy.RECORD} == contents
    assert max(sizes) == 4000
    Bucket(url).write("profile/plugins/trace", b"x")
    working_copy._fetched.clear()
    assert not (working_copy.local(url) / "profile").exists()
    assert (working_copy.local(url, profile=True) / "profile" / "plugins" / "trace").exists()
    if scheme == "gs":
        return
    large = os.urandom(9 * 2**20)  # two parts, of which S3 wants 5 MiB at least
    with working_copy.mirrored(copy):
        (copy / "large").write_bytes(large)
    assert Bucket(url).read("large") == large
    assert b'-2"' in bytes.fromhex(Bucket(url).generation("large"))

    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr(large_objects, "MOST", 2**21)
    (copy / "large").write_bytes(large[1:])
    mirror = working_copy.Mirror(copy, url)
    mirror.become_writer()
    mirror.flush()  # a run goes on
    assert mirror.left_out == {"large"}
    with pytest.raises(RunError, match="large cannot be written to s3.*pip install 'jaxscale.s3.'"):
        working_copy.upload(copy)


def test_a_large_file_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    bucket = Bucket(f"s3://runs/{tmp_path.name}")
    monkeypatch.setattr(large_objects, "PART", 100)
    read, left = Bucket.read, [b"2" * 260]
    bucket.write("x", b"1" * 250)

    def interfere(self, key, start=None, stop=None, **options):
        if start == 100 and left:
            self.write("x", left.pop())
        return read(self, key, start, stop, **options)

    monkeypatch.setattr(Bucket, "read", interfere)
    large_objects.download(bucket, "x", None, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"2" * 260


FAULTS = """
import os, pathlib, signal
import jax
import tests.truth.runs
from jaxscale.train import fit
from jaxscale.train.loop import Loop

place, check = Loop._place, fit._check_staging

def placed(self, done):
    if done + 1 == 6 and jax.process_index() == 1 and not pathlib.Path("killed").exists():
        self.checkpoints.wait()
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return place(self, done)

def at_home(*args):
    os.environ["HOME"] = os.path.join(os.environ["HOMES"], str(jax.process_index()))
    check(*args)

Loop._place, fit._check_staging = placed, at_home
"""


@pytest.mark.long
def test_two_processes_write_into_a_bucket_and_go_on_after_one_is_killed(tmp_path, monkeypatch, capfd):
    (tmp_path / "faults.py").write_text(FAULTS)
    gin = write_gin(tmp_path / "small.gin", "import faults\n" + BIGRAM)
    monkeypatch.chdir(tmp_path)
    for name, value in {**environment(), "HOMES": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    command = ["launch", "--nproc", "2", "--", "train", str(gin), "--devices", "2", "--gin.Layout.mesh=data=-1",
               "--gin.train.steps=8", "--gin.train.checkpoint_every=2", "--continue", "--run"]  # fmt: skip
    url = f"s3://runs/{tmp_path.name}"
    assert main([*command, f"{url}/apart", "--gin.train.staging='~/staging'"]) == MISTAKE
    assert "and process 1 does not see what process 0 writes there" in capfd.readouterr().err
    losses = []
    for name, more in (("direct", []), ("staged", [f"--gin.train.staging='{tmp_path}/disk'"])):
        Path("killed").unlink(missing_ok=True)
        assert main([*command, f"{url}/{name}", *more]) == 0
        text = capfd.readouterr().err
        assert "process 1 was killed by SIGKILL; restart 1 of 3" in text
        assert f"the last finished checkpoint is of step 4: {url}/{name}" in text
        assert main(["checkpoint", "verify", f"{url}/{name}"]) == 0
        working_copy._fetched.clear()
        losses.append([(row["step"], row["loss"]) for row in js.load(f"{url}/{name}").metrics()])
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, 9))
