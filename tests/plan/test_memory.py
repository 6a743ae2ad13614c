"""A step's memory by arithmetic: what is counted by hand, and what a layout, a schedule or a router changes in it."""

from __future__ import annotations

import dataclasses
import random

import jax
import pytest
from jax.experimental import topologies

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Pipeline
from jaxscale.models import TransformerConfig
from jaxscale.models.presets import llama3_8b
from jaxscale.nn import MixtureOfExperts, flash_attention
from jaxscale.optim import OnHost
from jaxscale.parallel.pipeline import lower
from jaxscale.plan import compiled_bytes, estimate
from jaxscale.plan.heap import Heap, SteadyHeap
from jaxscale.plan.memory import held_bytes
from jaxscale.step import Backprop, LoRA, StreamLayers, blueprint_of
from jaxscale.train import FromRun
from tests.truth.errors import raises_saying

TOPOLOGY = "v5e:2x2"
TINY = js.TrainConfig(
    model=TransformerConfig(depth=8, width=256, heads=2, hidden=1024, vocab=256, dtype="bfloat16"),
    layout=js.Layout("fsdp=4"), batch_size=8, seq_len=512, prompt=None,
)  # fmt: skip
STREAM = 2 * 512 * 256 * 2
"""Its residual stream's bytes on one of four devices: two of eight rows, bfloat16."""


def _with(policy, **changes):
    return dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, memory=policy), **changes)


def test_a_buffer_takes_the_smallest_gap_that_fits_and_gaps_count():
    heap = Heap()
    a, b, c, d = (heap.take(what, size) for what, size in zip("abcd", (30, 10, 20, 5), strict=True))
    heap.drop(a, c)
    assert heap.take("e", 18).start == 40  # of 30 at 0 and 20 at 40
    assert heap.take("f", 31).start == d.end
    heap.drop(b)
    assert heap.take("g", 40).start == 0 and heap.peak == 65 + 31
    assert {x.what for x in heap.at_peak} == {"b", "d", "e", "f"}


def test_a_steady_heap_puts_a_buffer_into_free_memory_of_twice_its_size_or_where_its_like_was():
    heap = SteadyHeap()
    a, b = heap.take("a", 40), heap.take("b", 10)
    heap.drop(a)
    assert heap.take("fits", 20).end == 50  # 40 are free
    assert heap.take("half of it fits", 15).end == 60  # of 20 that are free 10 may lie apart
    assert heap.take("on top", 30).end == 90 and heap.peak == 90
    heap.drop(b)
    table = heap.take("table", 50, "table")
    heap.drop(table)
    assert heap.take("as large", 50, "table").end == table.end == heap.peak


def test_no_buffer_that_grows_lowers_the_peak_of_a_steady_heap():
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.randint(1, 50) for _ in range(12)]
        events = [draw.randrange(12) for _ in range(40)]
        grown = list(sizes)
        grown[draw.randrange(12)] += draw.randint(1, 30)
        assert _peak(sizes, events) <= _peak(grown, events)


def _peak(sizes, events):
    """Of a program in which a buffer comes where it is named first, goes at the second, and so on."""
    heap, live = SteadyHeap(), {}
    for n in events:
        if n in live:
            heap.drop(live.pop(n))
        else:
            live[n] = heap.take(str(n), sizes[n], str(n) if n % 2 else "")
    return heap.peak


def test_estimates_are_what_one_counts_by_hand():
    c = TINY.model
    result = {n: estimate(_with(n), TOPOLOGY) for n in ("none", "full", "offload_residual", "attention_only")}
    params = c.param_count() * 4
    assert abs(result["full"].state - 3 * params / 4) < 0.01 * params  # float32, and two moments of it
    assert result["full"].saved == 8 * STREAM and result["full"].host == 0
    assert result["offload_residual"].saved == 0 and result["offload_residual"].host == 8 * STREAM
    assert result["attention_only"].saved == 8 * 2 * STREAM
    # two norms, queries, keys, values, attention's mix; weights (two heads); gate, up, hidden; two float32 arrays of
    # each norm, among them the stream; the gate's sigmoid, silu, and its slope
    assert result["none"].saved == 8 * ((6 + 12 + 8 + 12) * STREAM + 2 * 2 * 512 * 512 * 2)
    away = estimate(dataclasses.replace(TINY, optimizer=OnHost()), TOPOLOGY)
    assert away.state + away.host == result["none"].state and 2 * away.state - away.host < 0.01 * params
    forward = c.flops(8, 512, training=False)
    last = c.product_flops(8, 512)["mlp_down"] + c.product_flops(8, 512)["logits"]
    assert result["full"].extra_flops == (forward - last) / (3 * forward)
    assert result["none"].extra_flops == 0
    table, norms = 256 * 256 * 4, (2 * 8 + 1) * 256 * 4
    assert result["full"].copies == (params - 2 * table - norms) // 4 // 2  # bfloat16, a quarter


def test_parameters_in_host_memory_are_not_on_the_device_nor_are_their_gradients():
    def held(algorithm):
        config = dataclasses.replace(TINY, optimizer=OnHost(), algorithm=algorithm)
        blueprint = blueprint_of(config)[0]
        layers = [i for i in jax.tree.leaves(blueprint.infos) if i.axes[0] == "layers" and len(i.shape) > 2]
        return held_bytes(blueprint, algorithm.infos(blueprint), TINY.layout), sum(i.nbytes for i in layers) // 4

    (state, gradients, host), layers = held(Backprop())
    assert layers > 0
    assert held(StreamLayers())[0] == (state - layers, gradients - layers, host + layers)


def test_adapters_have_gradients_and_states_and_what_is_frozen_has_neither():
    lora = LoRA(rank=16, targets=("q", "up"))
    adapted = _with("full", start=FromRun("runs/base"), adapters=lora)
    result, whole = (estimate(config, TOPOLOGY) for config in (adapted, _with("full")))
    frozen = TINY.model.param_count() * 4 / 4  # float32, over four devices
    # of each, one side lies along the stream, and is split; the other is whole
    trained = 8 * 16 * 4 * (2 * 256 / 4 + 256 + 1024)
    batch = 3 * 8 * 512 * 4 / 4
    assert abs(result.state - (frozen + 3 * trained + batch)) < 0.02 * frozen and result.gradients == trained
    assert result.saved == whole.saved and result.device < whole.device - frozen
    half = estimate(dataclasses.replace(adapted, adapters=dataclasses.replace(lora, base_dtype="bfloat16")), TOPOLOGY)
    assert result.state - half.state > 0.45 * frozen and half.copies < result.copies


def test_adapters_over_stages_are_not_known():
    layout = js.Layout("pipeline=2,fsdp=2")
    with raises_saying(ConfigError, "adapters over pipeline stages", "jaxscale plan"):
        estimate(_with("full", layout=layout, start=FromRun("runs/base"), adapters=LoRA()), TOPOLOGY)


def test_nothing_is_compiled_and_no_device_asked_for(monkeypatch):
    """A slice of 1,024 chips, on whatever is here."""
    monkeypatch.setattr(topologies, "get_topology_desc", None)
    model = llama3_8b(attention=flash_attention)
    layout = js.Layout("data=4,fsdp=-1,tensor=8", sequence_sharded=True)
    config = js.TrainConfig(model=model, layout=layout, batch_size=512, seq_len=8192)
    result = estimate(config, "v5p:8x8x16")
    assert abs(result.state - 3 * 4 * model.param_count() / 256) < 0.02 * result.state
    with raises_saying(LayoutError, "v9"):
        estimate(config, "v9:8x8")


@pytest.mark.parametrize(("layout", "topology", "tables"), [
    ("fsdp=4", "v5e:2x2", 1), ("fsdp=8", "v5p:2x2x2", 3),
], ids=("scattered", "summed and cut"))  # fmt: skip
def test_the_gradients_of_tables_are_whole_until_they_are_summed(layout, topology, tables):
    """Of short rows: the head's and the embedding's, and on a torus of three dimensions the sum itself."""
    model, table = dataclasses.replace(TINY.model, vocab=65536, memory="full"), 65536 * 256 * 4
    result = estimate(dataclasses.replace(TINY, model=model, layout=js.Layout(layout), seq_len=8), topology)
    assert sum(b.size == table for b in result.at_peak) == tables


def test_a_stream_cut_along_its_sequence_is_kept_in_pieces_and_gathered_for_each_sub_layer():
    whole, cut = (
        estimate(_with("full", layout=js.Layout("tensor=2", sequence_sharded=s), seq_len=4096), TOPOLOGY)
        for s in (False, True)
    )
    assert cut.saved == whole.saved // 2
    names = [b.what for b in cut.at_peak]
    assert "gathered" in names and "gathered" not in [b.what for b in whole.at_peak]


@pytest.mark.parametrize("schedule", ["gpipe:8", "1f1b:8", "zb-h1:8"])
def test_stages_stash_what_their_schedule_has_in_flight(schedule):
    layout = js.Layout("pipeline=4", pipeline=schedule)
    config = _with("full", layout=layout)
    result = estimate(config, TOPOLOGY)
    slots = lower(layout.schedule.table(4, 8)).size
    micro = 1 * 512 * 256 * 2  # a row, of a layer's stream
    stash = (slots["inputs"] + slots["cotangents"] + 2) * micro
    products = result.saved - stash - 2 * micro  # two layers' inputs
    assert products == 0 if schedule != "zb-h1:8" else products > 2 * 512 * 1024 * 2


def test_stages_with_whole_vocabularies_hold_the_tables_and_their_gradients_whole():
    model = dataclasses.replace(TINY.model, vocab=65536, memory="full")

    def peak(vocabulary):
        layout = js.Layout("pipeline=4", pipeline=Pipeline("1f1b", 8, vocabulary=vocabulary))
        return estimate(dataclasses.replace(TINY, model=model, layout=layout, seq_len=8), TOPOLOGY).peak

    rest = 2 * 65536 * 256 * 3 // 4  # numbers in the three quarters of both tables that other stages had
    assert peak("whole") - peak("sharded") > rest * (4 + 2)  # float32 gradients, and casts to bfloat16


def test_layers_that_do_not_divide_are_dealt_out_and_padded():
    for optimizer, padded in ((js.optim.AdamW(), True), (js.optim.ScheduleFreeAdamW(), False)):
        even, odd = (
            estimate(
                dataclasses.replace(
                    TINY,
                    model=dataclasses.replace(TINY.model, depth=d),
                    layout=js.Layout("pipeline=4"),
                    optimizer=optimizer,
                ),
                TOPOLOGY,
            )
            for d in (8, 7)
        )
        if padded:
            assert (odd.state, odd.peak) == (even.state, even.peak)
        else:  # each step sends layers to their stages
            assert odd.state < even.state and odd.peak > even.peak


def test_experts_that_drop_nothing_have_room_for_every_token_of_those_who_send():
    def peak(mlp, layout):
        model = dataclasses.replace(TINY.model, mlp=mlp, memory="full", attention=flash_attention)
        result = estimate(dataclasses.replace(TINY, model=model, layout=js.Layout(layout)), TOPOLOGY)
        return sum(b.size for b in result.at_peak if b.what == "mlp_up")

    dropless, capped = MixtureOfExperts(experts=8, top_k=2), MixtureOfExperts(experts=8, top_k=2, capacity=1.0)
    assert peak(dropless, "fsdp=4") == peak(capped, "fsdp=4") == peak(capped, "expert=4") > 0
    assert peak(dropless, "expert=4") == 4 * peak(dropless, "fsdp=4")  # four devices, two experts each


def test_the_models_products_are_its_flops():
    c = TINY.model
    assert sum(c.product_flops(4, 64).values()) == c.flops(4, 64, training=False)


def test_a_run_without_a_layout_is_one_sentence():
    with raises_saying(ConfigError, "layout=None"):
        estimate(dataclasses.replace(TINY, layout=None), TOPOLOGY)


@pytest.mark.once
@pytest.mark.tpu_aot
def test_arithmetic_is_near_what_a_tpus_compiler_says():
    """A small step, of which gaps and padding are a larger part than of a large one."""
    config = _with("full", seq_len=2048)
    assert abs(estimate(config, TOPOLOGY).device / compiled_bytes(config, TOPOLOGY) - 1) < 0.2
