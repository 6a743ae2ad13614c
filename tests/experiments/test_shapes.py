"""Shapes that suit the hardware, and those that do not."""

from __future__ import annotations

import dataclasses

import pytest

import jaxscale as js
from experiments.calculators.shapes import sizing, small_messages
from jaxscale.errors import ConfigError
from jaxscale.hardware import topology
from jaxscale.layout import MESH_AXES
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.plan.collectives import Collective
from tests.truth.errors import raises_saying

WIDE = TransformerConfig(depth=2, width=1024, heads=8, hidden=4096, vocab=32768, dtype="bfloat16")
RUN = js.TrainConfig(model=WIDE, layout=js.Layout("fsdp=2,tensor=2"), batch_size=8, seq_len=512, prompt=None)


def _with(**changed):
    return dataclasses.replace(RUN, model=dataclasses.replace(WIDE, **changed))


def test_shapes_in_whole_tiles_waste_nothing():
    result = sizing(RUN, "v5e:2x2")
    assert result.tile == (128, 128, 128) and result.waste == 0
    up = next(r for r in result.rows if r.name == "mlp_up")
    assert (up.rows, up.inner, up.outer, up.bound, up.advice) == (8 // 2 * 512, 1024, 2 * 4096 // 2, "compute", "")


@pytest.mark.parametrize(
    "changed, name, waste, words",
    [
        # half of a tile's depth or columns are empty; a third of the last tile of 1.5; one word more than 128 tiles
        ({"heads": 16, "head_dim": 64}, "scores", 1 / 2, ("inner 64 -> 128", "head_dim 64")),
        ({"hidden": 4096 + 128}, "mlp_down", 1 - 2112 / 2176, ("inner 2112 -> 2048", "mlp 4224 in 2")),
        ({"vocab": 32768 + 2}, "logits", 1 - 16385 / 16512, ("outer 16385 -> 16384", "vocab 32770 in 2")),
    ],
)
def test_what_is_left_of_a_tile_is_padding(changed, name, waste, words):
    result = sizing(_with(**changed), "v5e:2x2")
    row = next(r for r in result.rows if r.name == name)
    assert row.waste == pytest.approx(waste) and all(w in row.advice for w in words)
    assert 0 < result.waste < row.waste
    assert all(r.waste == 0 for r in result.rows if r.name in ("qkv", "residual_mid"))


def test_whole_key_heads_and_a_filled_vocabulary_have_the_sizes_that_devices_have():
    result = sizing(dataclasses.replace(_with(kv_heads=1, vocab=32767), layout=js.Layout("tensor=4")), "v5e:2x2")
    rows = {r.name: r for r in result.rows}
    assert rows["qkv"].outer == (8 // 4 + 2 * 1) * 128
    assert rows["logits"].outer == 32768 // 4 and rows["logits"].advice == ""


def test_experts_with_few_tokens_are_bound_by_memory():
    few = dataclasses.replace(_with(mlp=MixtureOfExperts(experts=64, top_k=2)), layout=js.Layout("expert=4"))
    rows = {r.name: r for r in sizing(few, "v5e:2x2").rows}
    # each expert gets its share of what the four devices route
    assert rows["mlp_up"].rows < 8 * 512 // 4 and rows["mlp_up"].bound == "memory"
    assert rows["qkv"].bound == "compute"


def test_a_message_whose_steps_outlast_its_bytes_is_small():
    target = topology("v5e:4x4")
    sizes = {a: {"fsdp": 4, "tensor": 4}.get(a, 1) for a in MESH_AXES}
    small, large = (Collective("all-gather", ("fsdp",), 4, n, times=7) for n in (2**10, 2**26))
    ((result, even),) = small_messages([small, large], target, sizes)
    link, speed = target.link(sizes, ("fsdp",))
    assert result is small and even * 3 / 4 / speed == pytest.approx(3 * link.latency)


def test_what_cannot_be_sized_is_said():
    with raises_saying(ConfigError, "layout=None"):
        sizing(dataclasses.replace(RUN, layout=None), "v5e:2x2")
