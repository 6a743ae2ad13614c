"""explain: the tensor table of a run that need not exist, on a machine that need not either."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import pytest
from rich.console import Console

import jaxscale as js
from jaxscale.errors import LayoutError
from tests.truth.errors import raises_saying

MODEL = js.models.Transformer.Config(depth=2, width=64, heads=8, hidden=128)


def explained(mesh="data=2,fsdp=2,tensor=2", **changes):
    layout = None if mesh is None else js.Layout(mesh)
    return js.explain(js.TrainConfig(model=MODEL, layout=layout, **changes))


def row(found, path):
    (one,) = [r for r in found.params if r.path == path]
    return one


def test_every_parameter_has_a_row():
    assert sum(math.prod(r.shape) for r in explained().params) == MODEL.param_count()


def test_a_row_says_what_lives_where_and_why():
    one = row(explained(), "embed/weight")
    assert (one.shape, one.axes, one.dtype) == ((256, 64), ("vocab", "embed"), "float32")
    assert one.spec == ("tensor", "fsdp")
    assert "vocab→tensor" in one.rules and "embed→fsdp" in one.rules
    assert one.bytes_per_device == 256 * 64 * 4 // 4


def test_bytes_are_those_of_a_real_run(finished_run):
    found = js.explain(finished_run)
    device = jax.devices()[0]
    for kind, bytes_ in (
        ("params", sum(r.bytes_per_device for r in found.params)),
        ("opt_state", found.state_bytes_per_device),
    ):
        shards = [s for x in jax.tree.leaves(getattr(finished_run.state, kind)) for s in x.addressable_shards]
        assert sum(s.data.nbytes for s in shards if s.device == device) == bytes_, kind


def test_specs_are_those_of_a_real_run(finished_run):
    spec = row(js.explain(finished_run), "embed/weight").spec
    assert spec == tuple(finished_run.state.params["embed"]["weight"].sharding.spec)


def test_a_mesh_larger_than_the_machine_is_explained():
    assert row(explained("data=64,fsdp=8,tensor=8"), "embed/weight").bytes_per_device == 256 * 64 * 4 // 64


def test_one_device_is_explained():
    found = explained(None)
    assert found.layout == "on one device"
    assert {r.rules for r in found.params} == {"one device"}


def test_what_does_not_divide_is_named():
    with raises_saying(LayoutError, "attn", "cuts 8 into 16 pieces", "nearest"):
        explained("tensor=16")


@pytest.mark.parametrize(
    "optimizer, moments", [(js.optim.AdamW(), 2), (js.optim.SGD(), 0), (js.optim.SGD(momentum=0.9), 1)]
)
def test_the_state_counts_its_moments(optimizer, moments):
    found = explained(None, optimizer=optimizer)
    assert found.state_bytes_per_device - moments * 4 * MODEL.param_count() in range(0, 16)


def test_the_loss_and_the_attention_that_run_are_named():
    assert explained().loss.startswith("cross-entropy of materialised logits (a vocabulary of 256 is below")
    assert explained(loss=js.train.CutLoss()).loss.startswith("cut cross-entropy, no logits held")
    assert explained().attention == "dot_product_attention"
    tiles = functools.partial(js.nn.flash_attention, implementation="xla")
    for kernel, name in ((js.nn.flash_attention, "flash_attention"), (tiles, "flash_attention(implementation='xla')")):
        config = js.TrainConfig(model=dataclasses.replace(MODEL, attention=kernel))
        assert js.explain(config).attention == name
        assert f"attention: {name}" in str(js.explain(config))


def test_an_explanation_is_json():
    found = json.loads(json.dumps(explained().to_json()))
    assert {"layout", "params", "state_bytes_per_device", "loss", "attention", "notes"} == found.keys()
    assert found["params"][0].keys() >= {"path", "shape", "axes", "spec", "rules", "bytes_per_device"}


def test_a_terminal_shows_every_tensor():
    console = Console(width=132)
    with console.capture() as capture:
        console.print(explained())
    text = capture.get()
    assert all(r.path in text for r in explained().params)
    assert "because" in text and "optimizer state:" in text and "loss: cross-entropy" in text


def test_a_notebook_shows_text_and_html():
    shown = explained()._repr_mimebundle_()
    assert "embed/weight" in shown["text/plain"] and "<span" in shown["text/html"]


def test_an_explanation_printed_is_its_table(finished_run):
    text = str(js.explain(finished_run))
    assert "embed/weight" in text and "optimizer state" in text
