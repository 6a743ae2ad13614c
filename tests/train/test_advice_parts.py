"""Advice in errors of rotary tables, signatures, slices, snapshots, adapters, elastic runs works. Nothing trains."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import JaxscaleError
from jaxscale.hardware import topology
from jaxscale.layout import Layout
from jaxscale.layout.boxing import Boxes, infer, rebox
from jaxscale.layout.mesh import _check_slices, parse_mesh, resolve_sizes
from jaxscale.models import TransformerConfig
from jaxscale.nn.rotary import Llama3Scaling, LongRopeScaling, Rotary
from jaxscale.optim import MuP
from jaxscale.step import Snapshots, TrainConfig
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.lora import LoRA
from jaxscale.train import elastic
from jaxscale.train.elastic import Elastic, recut
from jaxscale.train.snapshots import taker
from jaxscale.train.snapshots.keeper import code_for
from jaxscale.train.snapshots.shelf import Shelf
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, head_dim=8, hidden=64)
GIB = 2**30


def tables(head_dim=8, **rotary):
    """The cosines and sines of a head, by their shapes."""
    return lambda: jax.eval_shape(lambda: Rotary(**rotary).tables(np.arange(4)[None], head_dim))


def long_rope(pairs):
    return tables(scaling=LongRopeScaling(short=(1.0,) * pairs, long=(2.0,) * pairs, length=8))


GROWING = LongRopeScaling(short=(1.0,), long=(2.0,), original_length=16)

ROTARY = {
    "an odd head": (tables(7), ("use 8",), [tables(8)]),
    "an odd fraction": (tables(fraction=0.4), ("the nearest is 2, Rotary.fraction = 0.25",), [tables(fraction=0.25)]),
    "no fraction": (tables(fraction=0.1), ("Rotary.fraction = 0.25",), [tables(fraction=0.25)]),
    "an odd fraction of many": (
        tables(96, fraction=0.1),
        ("rotates 9", "the nearest is 8, Rotary.fraction = 0.08333333333333333"),
        [tables(96, fraction=0.08333333333333333)],
    ),
    "factors of another head": (long_rope(3), ("has 3 factors", "give 4"), [long_rope(4)]),
    "texts beyond the first factors": (
        lambda: GROWING.refuse_length(32),
        ("set LongRopeScaling.length = 32", "at most 16 tokens"),
        [lambda: dataclasses.replace(GROWING, length=32).refuse_length(32), lambda: GROWING.refuse_length(16)],
    ),
    "frequencies in the wrong order": (
        lambda: Llama3Scaling(low_freq_factor=4.0, high_freq_factor=4.0),
        ("must be above low_freq_factor, 4.0",),
        [lambda: Llama3Scaling(low_freq_factor=4.0, high_freq_factor=5.0)],
    ),
}


# --- signatures -------------------------------------------------------------------------------------------------------

BROADCAST, ROWS, COLUMNS = Boxes(((), ())), Boxes((("data",), ())), Boxes(((), ("data",)))
PARTIAL = Boxes(((), ()), frozenset({"data"}))
NESTED, OTHERWISE = Boxes((("data", "tensor"), ())), Boxes((("tensor", "data"), ()))
SIZES = {"data": 4, "tensor": 2}


def product(a, b, equation="ij,jk->ik"):
    return lambda: infer(equation, a, b)


def cut(size):
    return lambda: rebox(ROWS, BROADCAST, (size, 3), 4, SIZES)


SIGNATURES = {
    "an axis twice": (lambda: Boxes((("data",), ("data",))), ("use each once",), [lambda: ROWS]),
    "no output": (
        product(BROADCAST, BROADCAST, "ij,jk"),
        ("with its output written out, such as 'bse,ef->bsf'",),
        [product(BROADCAST, BROADCAST, "ij,jk->ik")],
    ),
    "a product of sums": (
        product(PARTIAL, PARTIAL),
        ("make the partial operand broadcast (all-reduce) or split (reduce-scatter)",),
        [product(PARTIAL, BROADCAST), product(COLUMNS, ROWS)],
    ),
    "two letters on one axis": (
        product(ROWS, COLUMNS),
        ("splits the same letter or none",),
        [product(ROWS, BROADCAST), product(COLUMNS, ROWS)],
    ),
    "a letter split in one operand": (
        product(COLUMNS, BROADCAST),
        ("slice the other along it, which sends nothing",),
        [product(COLUMNS, ROWS)],
    ),
    "axes in another order": (
        product(NESTED, OTHERWISE, "ij,ik->jk"),
        ("nest the mesh axes in one order",),
        [product(NESTED, NESTED, "ij,ik->jk")],
    ),
    "a size a little too large": (cut(9), ("nearest size that it divides is 8",), [cut(8)]),
    "a size a little too small": (cut(7), ("nearest size that it divides is 8",), [cut(8)]),
    "a size below one piece": (cut(1), ("nearest size that it divides is 4",), [cut(4)]),
}


def test_the_slice_that_a_signature_is_advised_sends_nothing():
    assert [(move.kind, move.sent) for move in rebox(BROADCAST, ROWS, (8, 8), 4, SIZES)] == [("slice", 0)]


# --- slices -----------------------------------------------------------------------------------------------------------


def slices(mesh, across, count=2, devices=8):
    """A mesh over several TPU slices, checked as it is before the devices are dealt."""
    return lambda: _check_slices(mesh, resolve_sizes(parse_mesh(mesh), devices, mesh), count, devices, across)


def crossing(across, count=4, **sizes):
    return lambda: topology(f"v5p:2x2x2*{count}").link({"data": 1, "fsdp": 1, **sizes}, ("data",), across)


SLICES = {
    "no axis is named": (slices("data=2,fsdp=4", None), ("Layout.across = 'data'",), [slices("data=2,fsdp=4", "data")]),
    "no axis is named, and data is one": (
        slices("fsdp=8", None),
        ("Layout.across = 'fsdp'",),
        [slices("fsdp=8", "fsdp")],
    ),
    "an axis that slices do not divide": (
        slices("data=3,tensor=4", "data", devices=12),
        ("data=3 spans 2 slices", "Layout.across = 'tensor'"),
        [slices("data=3,tensor=4", "tensor", devices=12)],
    ),
    "no axis that slices divide": (
        slices("data=2,fsdp=2,tensor=2", None, count=4),
        ("no axis is a multiple of 4", "'data=4,fsdp=-1' and Layout.across = 'data'"),
        [slices("data=4,fsdp=-1", "data", count=4)],
    ),
    "some of the devices": (
        slices("data=2,fsdp=2", "data"),
        ("must use all of their devices; set data=-1",),
        [slices("data=-1,fsdp=2", "data")],
    ),
    "some of the devices, and no axis": (
        slices("fsdp=3", None),
        ("must use all of their devices; set data=-1",),
        [slices("data=-1,fsdp=2", "data")],
    ),
    "a plan": (crossing(None, data=2, fsdp=16), ("Layout.across = 'fsdp'",), [crossing("fsdp", data=2, fsdp=16)]),
    "chips of no pod": (
        lambda: topology("v5e:16x32"),
        ("take several slices, as", "*2"),
        [lambda: topology("v5e:16x16*2")],
    ),
    "slices of GPUs": (lambda: topology("h100:8*2"), ("'h100:8x4'",), [lambda: topology("h100:8x4")]),
}


# --- snapshots --------------------------------------------------------------------------------------------------------

Disk = collections.namedtuple("Disk", "total used free")


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """A gibibyte is free, and in a folder called large a hundred."""
    free = lambda folder: 100 * GIB if "large" in str(folder) else GIB  # noqa: E731
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Disk(0, 0, free(folder)))
    monkeypatch.setattr(Shelf, "_allocate", lambda self, name, size: np.zeros(0, np.uint8))


NUMBER = itertools.count()


def shelf(size, folder="small"):
    return lambda: Shelf(Path.cwd() / f"{folder}-{next(NUMBER)}", {"own": size, "parity": 0}, {})


SNAPSHOTS = {
    "too little memory": (
        shelf(2 * GIB),
        ("make it larger, set Snapshots.folder, or shard the state over more devices",),
        [shelf(2 * GIB, "large"), shelf(GIB // 4)],
    ),
    "below zero": (lambda: Snapshots(every=-1), ("at least 0",), [lambda: Snapshots(every=0)]),
    "no such folder": (
        lambda: Snapshots(folder="/nowhere"),
        ("name a folder that is in memory",),
        [lambda: Snapshots(folder="/dev/shm")],
    ),
    "too many parities": (
        lambda: code_for(200, 100),
        ("use Snapshots.parity = 56",),
        [lambda: code_for(200, 56)],
    ),
    "too many processes": (
        lambda: code_for(300, 0),
        ("use Snapshots.every = 0",),
        [lambda: taker(Snapshots(every=0), "run").newest()],
    ),
}


# --- adapters, elastic runs -------------------------------------------------------------------------------------------


def adapted(adapters, mesh=None, **model):
    """A model with adapters as training lays it out, without values."""
    layout = None if mesh is None else Layout(mesh).abstract(8)
    config = TrainConfig(model=dataclasses.replace(MODEL, **model), layout=layout)
    object.__setattr__(config, "adapters", adapters)  # of no run that was trained
    return lambda: blueprint_of(config)


ADAPTERS = {
    "a rank of zero": (lambda: LoRA(rank=0), ("at least 1",), [lambda: LoRA(rank=1)]),
    "targets in a text": (lambda: LoRA(targets="q"), ("such as ('q', 'v')",), [adapted(LoRA(targets=("q", "v")))]),
    "a type's other name": (lambda: LoRA(dtype="bf16"), ("'bfloat16'",), [lambda: LoRA(dtype="bfloat16")]),
    "a target that is not there": (
        adapted(LoRA(targets=("attention",))),
        ("did you mean 'attn'",),
        [adapted(LoRA(targets=("attn",)))],
    ),
    "a parametrisation": (
        adapted(LoRA(), parametrisation=MuP(base_width=16)),
        ("MuP has no rule for adapters; set the model's parametrisation to None",),
        [adapted(LoRA())],
    ),
    "rounded over stages": (
        adapted(LoRA(base_dtype="bfloat16"), "pipeline=2"),
        ("remove it, or use a mesh without pipeline",),
        [adapted(LoRA(), "pipeline=2"), adapted(LoRA(base_dtype="bfloat16"), "data=2")],
    ),
    "nothing to adapt": (
        lambda: TrainConfig(adapters=LoRA()),
        ("set train.start, as FromRun('runs/base')",),
        [lambda: TrainConfig(adapters=LoRA(), start=js.train.FromRun("runs/base"))],
    ),
}


class Passed(Exception):
    """All checks have."""


def elastic_run(**settings):
    """An elastic run up to where it would read its data."""

    def begin():
        def stop(config):
            raise Passed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "prepare", stop)
            try:
                Elastic(TrainConfig(model=MODEL, **settings))
            except Passed:
                return

    return begin


ELASTIC = {
    "no data axis": (
        elastic_run(layout=Layout("tensor=2")),
        ("needs a layout with a data axis, such as Layout('data=2')",),
        [elastic_run(layout=Layout("data=2"))],
    ),
    "too few devices": (
        lambda: recut(Layout("data=2,tensor=4"), jax.devices()[:3]),
        ("3 devices are left", "needs 4", "begin again with a smaller layout"),
        [lambda: recut(Layout("data=2,tensor=2"), jax.devices()[:3]).device_mesh],
    ),
}  # fmt: skip

EVERY = {"rotary": ROTARY, "signature": SIGNATURES, "slices": SLICES, "snapshots": SNAPSHOTS}
EVERY |= {"adapters": ADAPTERS, "elastic": ELASTIC}


@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in EVERY.items() for case in cases])
def test_what_a_refused_part_is_advised_passes(family, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad, words, ways = EVERY[family][case]
    with raises_saying(JaxscaleError, *words):
        bad()
    for way in ways:
        way()
