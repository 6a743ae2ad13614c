"""Cached log-probabilities in buckets, and commands whose run is in one."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.buckets import Bucket
from jaxscale.cli import main
from jaxscale.data import annotated
from jaxscale.errors import DataError
from jaxscale.infer.annotate import annotate
from jaxscale.step import Distill
from tests.truth.errors import raises_saying

pytest.importorskip("moto", reason="needs moto[server] and gcp-storage-emulator")
pytestmark = pytest.mark.long


def test_annotations_of_a_bucket_are_those_of_a_disk(whole, url, tmp_path):
    config = dataclasses.replace(whole.config, objective=Distill(top=3), layout=None)
    folder, quiet = f"{url}/scores", dict(say=lambda _: None)
    with raises_saying(DataError, "it does not exist", "jaxscale annotate"):
        annotated(config.data, folder).source(None, seq_len=16, split="train")
    assert annotate(config, whole, folder, **quiet) == folder
    annotate(config, whole, tmp_path / "scores", **quiet)
    folders = (folder, str(tmp_path / "scores"))
    rows = [annotated(config.data, f).source(None, seq_len=16, split="train") for f in folders]
    assert rows[0].fingerprint == rows[1].fingerprint
    stored, local = (source.rows(np.arange(len(source))) for source in rows)
    assert all(np.array_equal(stored[name], local[name]) for name in local) and "teacher_logprobs" in local
    with raises_saying(DataError, "already exists"):
        annotate(config, whole, folder, **quiet)
    Bucket(folder).write("train.teacher_ids.digests", b"12345678")
    with raises_saying(DataError, "train.teacher_ids.digests is not what was written"):
        annotated(config.data, folder).source(None, seq_len=16, split="train")


def test_a_run_of_a_bucket_is_merged(copy, whole, tmp_path):
    assert main(["merge", copy, str(tmp_path / "merged")]) == 0
    params = (jax.tree.map(np.asarray, r.params(r.last_step())) for r in (js.load(tmp_path / "merged"), whole))
    jax.tree.map(np.testing.assert_array_equal, *params)
