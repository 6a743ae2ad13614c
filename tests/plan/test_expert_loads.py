"""Loads of experts: rows of the slowest device, and dispatchers' buffers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxscale.errors import ConfigError
from jaxscale.hardware import chip, topology
from jaxscale.layout import Layout
from jaxscale.models import BlockConfig
from jaxscale.models.presets import gpt2, mixtral_8x7b
from jaxscale.nn import GELU, MixtureOfExperts, flash_attention
from jaxscale.parallel.dispatch import (
    AllGatherDispatch,
    Choices,
    Dispatcher,
    DroplessDispatch,
    ExpertAxes,
    HierarchicalDispatch,
)
from jaxscale.plan import plan_for, search
from jaxscale.plan.collectives import Collective
from jaxscale.plan.expert_loads import EVEN, Loads, loads_of, mixture_of, slowest_rows
from jaxscale.plan.roofline import step_time
from jaxscale.plan.search_formulas import NOTHING
from jaxscale.plan.space import Space
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig
from tests.truth.errors import raises_saying

EXPERTS, TOP, TOKENS = 16, 4, 24
MODEL = mixtral_8x7b(depth=2, vocab=512, attention=flash_attention)


@pytest.mark.parametrize("local_experts", (2, 8))
@pytest.mark.parametrize(
    "dispatcher",
    [DroplessDispatch(), AllGatherDispatch(), HierarchicalDispatch(), HierarchicalDispatch(within=AllGatherDispatch())],
    ids=repr,
)
def test_experts_multiply_as_many_rows_as_their_dispatcher_says(dispatcher: Dispatcher, local_experts: int):
    """The rows that reach the experts of each of eight devices, in the traced program."""
    sent, shapes = {"expert": 2, "tensor": 4}, []

    def apply(rows, scale, sizes):
        shapes.append(rows.shape)
        return rows

    def layer(x, ids, weights):
        axes = ExpertAxes(tuple(sent), tuple(sent), tokens=tuple(sent))
        return dispatcher(x, Choices(ids, weights), local_experts, apply, axes)

    layout, cut = Layout("expert=2,tensor=4"), PartitionSpec(tuple(sent))
    with layout:
        mapped = jax.shard_map(layer, mesh=layout.device_mesh, in_specs=cut, out_specs=cut, check_vma=False)
        x, ids, weights = (jax.ShapeDtypeStruct((8, TOKENS, n), t) for n, t in ((3, "f4"), (TOP, "i4"), (TOP, "f4")))
        jax.eval_shape(mapped, x, ids, weights)
    assert shapes[0][0] == dispatcher.rows(sent, TOP, local_experts).multiplied * TOKENS * TOP


def test_the_slowest_device_has_the_most_of_the_rows_that_were_routed():
    """Against rows counted one by one, where the recorded loads are those of the routing itself."""
    layout, devices = Layout("expert=4"), 4
    random = np.random.default_rng(0)
    ids = np.argsort(random.gumbel(size=(devices * TOKENS, EXPERTS)) - 0.3 * np.arange(EXPERTS), axis=1)[:, -TOP:]
    counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    loads = Loads.counted({3: {0: counts.tolist()}})
    result = slowest_rows(loads, MixtureOfExperts(EXPERTS, TOP), TOKENS, 64, layout, chip("cpu"))
    mine = counts.reshape(devices, -1).sum(1)
    assert result.used == result.multiplied == result.exchanged == mine.max() / mine.mean() > 1.2
    assert result.held == devices


def test_rows_of_small_groups_fill_tiles():
    """16 rows for each of 64 experts on a device: the kernel multiplies a tile's part for every one of them."""
    moe = MixtureOfExperts(64, 2, hidden=256)
    result = slowest_rows(loads_of("even", 64), moe, 512, 256, Layout("data=1"), chip("v5p"))
    assert result.used == 1 and result.multiplied == 64 * 128 / 1024


def test_slots_cost_the_same_whatever_the_loads():
    moe = MixtureOfExperts(8, 2, capacity=1.0)
    assert set(
        dataclasses.astuple(slowest_rows(loads_of("zipf:2", 8), moe, 64, 64, Layout("expert=4"), chip("v5p")))
    ) == {1.0}


def test_a_step_waits_for_the_device_with_the_most_rows():
    layout = Layout("expert=8")
    config = TrainConfig(model=MODEL, layout=layout, batch_size=8, seq_len=2048)
    rows = slowest_rows(loads_of("zipf:1", 8), MODEL.mlp, 2048, MODEL.sizes.width, layout, chip("v5p"))
    sent = [Collective("all-to-all", ("expert",), 8, 1000, name=f"experts/{n}") for n in ("ragged_all_to_all", "x")]
    even, skewed = (work_of(config, layout, NOTHING, sent, slowest=slowest) for slowest in (EVEN, rows))
    flops = [{op.name: op.flops for op in work.ops} for work in (even, skewed)]
    assert flops[1]["mlp_up"] == pytest.approx(rows.multiplied * flops[0]["mlp_up"]) and rows.multiplied > 1.5
    assert flops[1]["qkv"] == flops[0]["qkv"]
    assert [c.payload for c in skewed.collectives] == [round(1000 * rows.exchanged), 1000]
    target = topology("v5p:2x2x2")
    assert step_time(skewed, target).total > step_time(even, target).total


def test_layers_without_experts_do_not_wait_for_skewed_ones():
    """Of 4 layers the first is dense (DeepSeek), or every second block: their products have as many rows as ever."""
    layout, moe = Layout("expert=8"), dataclasses.replace(MODEL.mlp, hidden=1024)
    first = dataclasses.replace(MODEL, depth=4, mlp=moe, dense_layers=1, dense_mlp=GELU)
    blocks = dataclasses.replace(MODEL, depth=4, mlp=moe, blocks=(BlockConfig(), BlockConfig(mlp=GELU)))
    for model, dense in ((first, 1), (blocks, 2)):
        assert mixture_of(model) == moe
        config = TrainConfig(model=model, layout=layout, batch_size=8, seq_len=2048)
        rows = slowest_rows(loads_of("zipf:1", 8), moe, 2048, model.sizes.width, layout, chip("v5p"))
        even, skewed = (work_of(config, layout, NOTHING, (), slowest=slowest) for slowest in (EVEN, rows))
        flops = [sum(op.flops for op in w.ops if op.name == "mlp_up" and op.kind == "matmul") for w in (even, skewed)]
        passes = flops[0] / (2 * 2048 * model.sizes.width * model.sizes.hidden * dense)
        assert flops[0] == flops[1] and passes in (3, 4)
        gates = next(op.bytes for op in even.ops if op.name == "gates")  # in tokens of a device, layers and elements
        widths = 2 * dense * model.sizes.hidden + 3 * (4 - dense) * 2 * 1024  # GELU writes one, SwiGLU reads two
        assert gates == pytest.approx(2048 * widths * 2 * passes)


@pytest.mark.long
def test_a_search_under_skewed_loads_has_the_time_of_that_skew():
    config = TrainConfig(model=MODEL, layout=Layout("fsdp=8"), batch_size=8, seq_len=2048, segments=False)
    space = Space(axes=("fsdp", "expert"), policies=("full",), accumulate=(1,))
    best = {
        text: search(config, "v5p:2x2x2", space=space, compile="never", loads=loads_of(text, 8)).winner
        for text in ("even", "zipf:3")
    }
    assert best["even"].step.total < best["zipf:3"].step.total
    assert any("'zipf:3'" in note for note in best["zipf:3"].notes)
    assert best["zipf:3"].config.layout.sizes["expert"] <= best["even"].config.layout.sizes["expert"]


def test_loads_are_refused_in_a_sentence():
    for text in ("zipf:x", "hot", "zipf:-1", "zipf:inf"):
        with raises_saying(ConfigError, text):
            loads_of(text, 8)
    with raises_saying(ConfigError, "16 experts", "8"):
        slowest_rows(loads_of("even", 16), MODEL.mlp, 64, 64, Layout("expert=8"), chip("v5p"))
    with raises_saying(ConfigError, "loads of experts", "at least 0"):
        Loads(((1.0, -1.0),))
    other = BlockConfig(mlp=dataclasses.replace(MODEL.mlp, top_k=1))
    with raises_saying(ConfigError, "layer 1 differs from layer 0 in top_k"):
        mixture_of(dataclasses.replace(MODEL, blocks=(BlockConfig(), other)))
    with raises_saying(ConfigError, "no layer of the model has any"):
        mixture_of(gpt2())
    apart = dataclasses.replace(MODEL, mlp=GELU, blocks=(BlockConfig(), BlockConfig(mlp=MODEL.mlp)))
    run = TrainConfig(model=apart, layout=Layout("expert=8"), batch_size=8, seq_len=64)
    with raises_saying(ConfigError, "layer 1, whose experts are not those of Transformer.mlp", "leave loads out"):
        plan_for(run, "v5p:2x2x2", compile="never", loads=loads_of("even", 8))
    with raises_saying(ConfigError, "no recorded loads", "zipf:1"):
        Loads.counted({}, "runs/demo")


def test_recorded_loads_are_those_of_the_last_tenth_of_the_lines():
    lines = {step: {0: [step, 1], 1: [1, 3]} for step in range(20)}
    assert Loads.counted(lines).layers == ((37 / 39, 2 / 39), (0.25, 0.75))
