"""predict: what the rules say a step sends, against the literature's sums, written out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.nn import flash_attention
from jaxscale.plan.communication import predict
from jaxscale.train import TrainConfig
from tests.train.test_step_collectives import CASES, MODEL, SCALARS
from tests.truth.errors import raises_saying


def config_of(layout, model=MODEL, **run):
    run = {"batch_size": 16, "seq_len": 128, "prompt": None} | run
    return TrainConfig(model=model, layout=layout, **run)


def sums(found):
    """Bytes of the wholes: gathered, and summed, by axes."""
    gathered, summed = Counter(), Counter()
    for c in found:
        (gathered if c.kind == "all-gather" else summed)[c.axes] += c.payload * c.times
    return gathered, summed


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_a_step_has_to_send_what_its_compiled_program_sends(layout):
    # the same sums to which tests/train/test_step_collectives.py holds the TPU's compiler
    gathered, summed = sums(predict(config_of(layout), "v5p:2x2x1"))
    want_gathered, want_summed = CASES[layout]
    assert dict(gathered) == want_gathered
    extra = {axes: n - want_summed.get(axes, 0) for axes, n in summed.items()}
    assert set(want_summed) <= set(extra) and all(0 <= n <= SCALARS for n in extra.values()), extra


def test_one_device_sends_nothing():
    assert predict(config_of(js.Layout("data=1")), "cpu:1") == []


def test_a_mesh_takes_the_rest_of_a_topology():
    found = predict(config_of(js.Layout("fsdp=-1"), batch_size=64), "v5p:4x4x4")
    assert {c.devices for c in found} == {64} and {c.axes for c in found} == {("fsdp",)}


def test_what_cannot_be_planned_is_said():
    with raises_saying(ConfigError, "layout=None", "Layout('data=1')"):
        predict(config_of(None), "cpu:1")
    with raises_saying(LayoutError, "v5x"):
        predict(config_of(js.Layout()), "v5x:2x2")
    with raises_saying(LayoutError, "cuts 4 into 8"):
        predict(config_of(js.Layout("tensor=8")), "v5e:2x4")
    cut = dataclasses.replace(MODEL, attention=flash_attention)
    with raises_saying(ConfigError, "flash_attention", "RingAttention", "context"):
        predict(config_of(js.Layout("context=4"), cut), "v5p:2x2x1")
