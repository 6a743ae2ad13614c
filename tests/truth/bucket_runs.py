"""A small run, and copies of it in a bucket."""

from __future__ import annotations

import shutil

import jax
import numpy as np

import jaxscale as js
from jaxscale import working_copy
from jaxscale.buckets import Bucket
from jaxscale.train.files import read_json, write_json

SETTINGS = dict(
    model=js.models.Transformer.Config(depth=1, width=32, heads=2, hidden=64),
    data=js.data.synthetic(32, documents=40, length=60),
    layout=js.Layout("data=2,fsdp=2"),
    batch_size=8, seq_len=16, eval_batches=0, steps=6, checkpoint_every=2, keep=2, quiet=True,
)  # fmt: skip


def forget():
    """As on another machine: no working copy."""
    shutil.rmtree(working_copy.cache_root(), ignore_errors=True)
    working_copy._fetched.clear()


def assert_same_parameters(a, b):
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, run.params(6)) for run in (a, b)))


def copied(run, url, **replaced):
    """Copy a run into a bucket, with other entries in its run.json."""
    for file in run.path.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            Bucket(url).write(file.relative_to(run.path).as_posix(), file.read_bytes() or b" ")
    if replaced:
        changed = run.path.parent / "run.json"
        write_json(changed, {**read_json(run.path / "run.json"), **replaced})
        Bucket(url).write("run.json", changed.read_bytes())
    return url
