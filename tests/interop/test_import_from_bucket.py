"""Checkpoints of other programs in a bucket: imported as from a disk, and one sentence where they cannot be."""

from __future__ import annotations

import tracemalloc

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale import bucket_files, buckets
from jaxscale.buckets import Bucket
from jaxscale.cli import main
from jaxscale.convert.pretrained import import_checkpoint
from jaxscale.errors import LOST, CheckpointError
from jaxscale.interop import local_folder
from tests.truth import hf_folder
from tests.truth.servers import failing, object_stores

pytest.importorskip("moto", reason="needs moto[server] and gcp-storage-emulator")


@pytest.fixture(scope="module")
def stores():
    with object_stores() as variables:
        yield variables


@pytest.fixture(autouse=True)
def reached(stores, monkeypatch, tmp_path):
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))


def upload(folder, url):
    for path in folder.iterdir():
        Bucket(url).write(path.name, path.read_bytes())


def test_an_import_from_a_bucket_is_that_from_a_disk(tmp_path, monkeypatch, capsys):
    folder, url = hf_folder.write_folder(tmp_path / "theirs"), f"s3://runs/{tmp_path.name}/theirs"
    upload(folder, url)
    Bucket(url).write("original/consolidated.pth", b"not copied")
    Bucket(url).write("README.md", b"not copied")
    assert main(["import", url, str(tmp_path / "ours")]) == 0
    ours, theirs = js.load(tmp_path / "ours"), import_checkpoint(folder, tmp_path / "same")
    jax.tree.map(np.testing.assert_array_equal, ours.params(0), theirs.params(0))
    assert ours.info["source"] == url
    copied = local_folder(url)
    assert sorted(p.name for p in copied.iterdir()) == [".copied.json", "config.json", "model.safetensors"]

    made = hf_folder.tensors()
    made["model.norm.weight"] += 1
    upload(hf_folder.write_folder(tmp_path / "changed", made), url)
    copies, copy = [], bucket_files.BucketFile.copy_to
    monkeypatch.setattr(bucket_files.BucketFile, "copy_to", lambda *a: (copies.append(a[0].name), copy(*a))[1])
    local_folder(url)
    assert copies == ["model.safetensors"]  # the other file has not changed
    assert (copied / "model.safetensors").read_bytes() == (tmp_path / "changed" / "model.safetensors").read_bytes()


def test_copying_needs_a_few_blocks_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "THREADS", 2)
    monkeypatch.setattr(bucket_files, "BLOCK", 2**21)
    url, content = f"s3://runs/{tmp_path.name}/large", np.random.default_rng(0).bytes(2**24 + 7)
    Bucket(url).write("model.safetensors", content)
    tracemalloc.start()
    copied = local_folder(url)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24
    assert (copied / "model.safetensors").read_bytes() == content


def test_what_cannot_be_imported_is_one_sentence(tmp_path, stores, monkeypatch, capsys):
    url = f"s3://runs/{tmp_path.name}/theirs"
    with pytest.raises(CheckpointError, match=f"there is no folder {url}; name one with config.json"):
        local_folder(url)
    with pytest.raises(CheckpointError, match="there is no bucket s3://elsewhere; create it first"):
        local_folder("s3://elsewhere/model")
    Bucket(url).write("pytorch_model.bin", b"x")
    with pytest.raises(CheckpointError, match=r"has no file \*.safetensors; of pickled weights make them"):
        local_folder(url)
    folder = hf_folder.write_folder(tmp_path / "theirs")
    upload(folder, url)
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "5ms", "max_delay": "5ms"})

    def down(method, path):
        return 503 if "model.safetensors" in path and method == "GET" else None

    with failing(stores["AWS_ENDPOINT_URL"], down) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
        assert main(["import", url, str(tmp_path / "ours")]) == LOST
        assert "the server does not answer" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    assert main(["import", url, str(tmp_path / "ours")]) == 0
