"""The roofline: what a step computes, touches and sends over what hardware does in a second, by hand arithmetic."""

from __future__ import annotations

import dataclasses
import math

import pytest

import jaxscale as js
from jaxscale.hardware import Link, Topology, topology
from jaxscale.models.presets import deepseek_moe_16b, gemma3, gpt2, llama3_8b, mixtral_8x7b, qwen3
from jaxscale.nn import Int8, flash_attention
from jaxscale.plan.by_tracing import traced_plan
from jaxscale.plan.collectives import Collective
from jaxscale.plan.flops import of_step
from jaxscale.plan.memory import Estimate
from jaxscale.plan.roofline import Op, Work, collective_time, hides_behind, step_time
from jaxscale.plan.work import products, work_of
from jaxscale.step import TrainConfig

NOTHING = Estimate(0, 0, 0, 0, 0, 0, 0.0)
GB = 10**9
CHIP = dataclasses.replace(
    topology("h100:8").chip,
    flops={"bfloat16": 100e12, "float32": 50e12},
    bandwidth=1e12,
    host_bandwidth=10e9,
    links=(Link("wire", "switch", 100e9, 1e-6, None),),
    efficiency={},
)
HERE = Topology("made up", CHIP, (32,))


def _work(ops=(), collectives=(), **more) -> Work:
    return Work(tuple(ops), tuple(collectives), {"data": 2, "fsdp": 4, "tensor": 4}, 1600e12, 1000, **more)


@pytest.mark.parametrize("preset", [gpt2, llama3_8b, qwen3, gemma3, mixtral_8x7b, deepseek_moe_16b])
def test_products_have_the_sizes_that_make_the_models_flops(preset):
    model, result = preset(), {}
    for p in products(model, 4096):
        result[p.name] = result.get(p.name, 0) + p.flops * 4096
    known = model.product_flops(1, 4096)
    assert {n: known[n] for n in result} == result
    assert set(known) - set(result) <= {"scores", "attn_out", "router"}


@pytest.mark.parametrize(
    "mesh",
    ["data=8", "fsdp=2,tensor=4", "fsdp=4,context=2", "pipeline=4,tensor=2", "data=2,pipeline=2,tensor=2"],
)
def test_devices_together_compute_what_the_model_does(mesh):
    model = llama3_8b(attention=flash_attention, memory="none")
    config = TrainConfig(model=model, layout=js.Layout(mesh), batch_size=16, seq_len=4096)
    work = work_of(config, config.layout, NOTHING, ())
    forward = model.product_flops(16, 4096)
    whole = 3 * sum(forward.values()) + forward["scores"] + forward["logits"]  # kernels make those once more
    if config.layout.stages > 1:  # a backward phase runs its stage again
        whole += sum(forward.values()) - forward["logits"]
    assert math.isclose(sum(op.flops for op in work.ops) * 8, whole, rel_tol=1e-12)
    assert work.flops == 3 * sum(forward.values())


@pytest.mark.parametrize(
    "memory, mesh", [("none", "fsdp=2,tensor=2"), ("full", "pipeline=2,data=2"), ("dots", "fsdp=2,tensor=2")]
)
def test_products_are_those_of_the_steps_own_program(memory, mesh):
    """Counted from its jaxpr: forward, backward, and what the memory policy or a stage makes again."""
    model = js.models.TransformerConfig(depth=4, width=64, heads=4, kv_heads=2, vocab=256, memory=memory)
    config = TrainConfig(model=model, layout=js.Layout(mesh), batch_size=8, seq_len=32)
    work = work_of(config, config.layout, NOTHING, ())
    assert sum(op.flops for op in work.ops) * 4 == of_step(config).matmul


def test_key_heads_that_no_axis_divides_are_made_on_every_device():
    """Of 8 query heads and one key head on tensor=4, a device makes 2 and all of the one."""
    model = js.models.TransformerConfig(depth=2, width=64, heads=8, kv_heads=1, head_dim=8, vocab=256)
    flops = {}
    for mesh in ("tensor=4", "data=4"):
        work = work_of(TrainConfig(model=model, batch_size=8, seq_len=32), js.Layout(mesh), NOTHING, ())
        for op in work.ops:
            flops[mesh, op.name] = op.flops or op.bytes
    of = lambda name: flops["tensor=4", name] / flops["data=4", name]  # noqa: E731
    assert of("qkv") == pytest.approx(4 * (2 + 2 * 1) / (8 + 2 * 1))
    assert of("rotary") == pytest.approx(4 * (2 + 1) / (8 + 1))
    assert of("residual_mid") == of("mlp_up") == 1


def test_experts_are_computed_where_they_are():
    model = mixtral_8x7b(attention=flash_attention)
    on = lambda mesh: {  # noqa: E731
        op.name: op
        for op in work_of(TrainConfig(model=model, batch_size=16, seq_len=4096), js.Layout(mesh), NOTHING, ()).ops
        if op.name == "router" or op.flops > 1e15
    }
    spread, whole = on("fsdp=2,expert=4"), on("fsdp=8")
    assert {n: op.flops for n, op in spread.items()} == {n: op.flops for n, op in whole.items()}


def test_products_of_experts_have_a_kind_of_their_own():
    model = deepseek_moe_16b()
    config = TrainConfig(model=model, layout=js.Layout("data=1"), batch_size=1, seq_len=1024)
    result = [(op.name, op.kind) for op in work_of(config, config.layout, NOTHING, ()).ops if op.name == "mlp_up"]
    assert sorted(result) == [("mlp_up", "experts"), ("mlp_up", "matmul"), ("mlp_up", "matmul")]


def test_dense_attention_computes_what_its_mask_hides():
    flops = {}
    for attention in (flash_attention, js.nn.dot_product_attention):
        model = llama3_8b(attention=attention, memory="none")
        config = TrainConfig(model=model, layout=js.Layout("data=1"), batch_size=1, seq_len=1024)
        ops = {op.name: op.flops for op in work_of(config, config.layout, NOTHING, ()).ops}
        flops[attention.__name__] = ops["attn_out"]
    assert math.isclose(flops["dot_product_attention"], flops["flash_attention"] * 2 * 1024 / 1025)


def test_an_operation_takes_the_longer_of_its_arithmetic_and_its_bytes():
    ops = [Op("a", "matmul", 10e12, 1, "bfloat16"), Op("b", "matmul", 1e12, 50 * GB, "bfloat16")]
    result = step_time(_work([*ops, Op("c", "memory", 0, 20 * GB, "bfloat16")]), HERE)
    assert math.isclose(result.compute, 0.11) and math.isclose(result.memory, 0.04 + 0.02)
    assert math.isclose(result.total, 0.17)
    assert math.isclose(result.mfu, 1600e12 / 0.17 / 3200e12) and math.isclose(result.tokens_per_second, 1000 / 0.17)


def test_efficiencies_are_shares_of_the_data_sheet():
    chip = dataclasses.replace(CHIP, efficiency={"matmul": 0.5, "attention": 0.25, "memory": 0.8})
    ops = [
        Op(kind, kind, 10e12 * (kind != "memory"), 8 * GB * (kind == "memory"), "bfloat16")
        for kind in ("matmul", "attention", "experts", "memory")
    ]
    result = step_time(_work(ops), Topology("", chip, (32,)))
    assert math.isclose(result.compute, 0.2 + 0.4 + 0.2) and math.isclose(result.memory, 0.01)
    chip = dataclasses.replace(chip, efficiency={**chip.efficiency, "experts": 0.1})
    assert math.isclose(step_time(_work(ops), Topology("", chip, (32,))).compute, 0.2 + 0.4 + 1.0)


@pytest.mark.parametrize(
    ("hardware", "width", "times"),
    [("v6e:4x8", 128, 2), ("v6e:4x8", 192, 4 / 3), ("v6e:4x8", 256, 1), ("v5e:4x8", 128, 1), ("h100:8x4", 64, 1)],
)
def test_heads_narrower_than_a_tpus_systolic_array_take_as_long_as_ones_that_fill_it(hardware, width, times):
    target = topology(hardware)
    plain, narrow = (Op("scores", "attention", 1e15, 0, "bfloat16", width=w) for w in (None, width))
    whole, result = (step_time(_work([op]), target).compute for op in (plain, narrow))
    assert math.isclose(result, whole * times)


@pytest.mark.parametrize("attention", [flash_attention, js.nn.dot_product_attention])
def test_attentions_products_have_the_width_of_a_head(attention):
    model = llama3_8b(attention=attention)
    config = TrainConfig(model=model, layout=js.Layout("data=1"), batch_size=1, seq_len=1024)
    ops = work_of(config, config.layout, NOTHING, ()).ops
    assert {op.name for op in ops if op.width == 128} == {"scores", "attn_out"}
    assert {op.name for op in ops if op.width is not None} == {"scores", "attn_out"}


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 0.75 / 100 + 3e-6),
        ("reduce-scatter", 0.75 / 100 + 3e-6),
        ("all-reduce", 1.5 / 100 + 6e-6),
        ("all-to-all", 0.75 / 100 + 1e-6),
        ("collective-permute", 1.0 / 100 + 1e-6),
    ],
)
def test_a_collective_takes_its_latency_and_its_bytes(kind, seconds):
    c = Collective(kind, ("fsdp",), 4, GB, times=3)
    assert math.isclose(collective_time(c, HERE, {"data": 2, "fsdp": 4}), 3 * seconds)


def test_a_torus_adds_the_bandwidth_of_its_dimensions():
    """Of the scaling book: V / (dimensions * W) for gathers, a quarter of one dimension's for all-to-alls."""
    v5p = topology("v5p:4x4x4")
    ici, sizes = v5p.chip.links[0].bandwidth, {"fsdp": 16, "tensor": 4}
    time = lambda kind, axes, n, payload: collective_time(Collective(kind, axes, n, payload), v5p, sizes)  # noqa: E731
    assert math.isclose(time("all-gather", ("tensor",), 4, 64 * GB), 64 * GB * 3 / 4 / ici, rel_tol=1e-3)
    assert math.isclose(time("all-gather", ("fsdp",), 16, 64 * GB), 64 * GB * 15 / 16 / (2 * ici), rel_tol=1e-3)
    assert math.isclose(time("all-to-all", ("tensor",), 4, 16 * GB), 64 * GB / ici / 4, rel_tol=1e-3)
    assert math.isclose(time("collective-permute", ("tensor",), 4, GB), GB / (ici / 2), rel_tol=1e-3)


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("v5p:4x4x4", 4),
        ("v5p:4x4x16", 16),  # the cube root of its 256 chips is 6.3
        ("v5p:2x2x2", 4),  # sides that do not close into rings count double
        ("v5e:4x4", 8),
        ("v5e:2x8", 16),
        ("tpu7x:4x4x8", 8),  # two devices a chip: sides count chips
    ],
)
def test_an_all_to_all_waits_for_the_middle_of_the_longest_side(name, longest):
    """Half of the bytes of each half cross: n * payload / 4 one way, over n / side rings of one bandwidth each way."""
    target = topology(name)
    link = next(each for each in target.chip.links if each.shape == "torus")
    exchange = Collective("all-to-all", ("expert",), target.devices, 64 * GB)
    sides = {"v5p:4x4x16": 12, "tpu7x:4x4x8": 8, "v5p:2x2x2": 3, "v5e:4x4": 4, "v5e:2x8": 5, "v5p:4x4x4": 6}
    seconds = 64 * GB * longest / 4 / link.bandwidth + sides[name] * link.latency
    share = target.chip.efficiency.get(link.name, target.chip.efficiency.get("link", 1.0))
    assert math.isclose(collective_time(exchange, target, {"expert": target.devices}), seconds / share, rel_tol=1e-3)


def test_what_may_run_beside_arithmetic_is_exposed_only_where_it_lasts_longer():
    gather = Collective("all-gather", ("fsdp",), 4, 4 * GB)  # 30 ms
    wait = dataclasses.replace(gather, axes=("tensor",))
    for arithmetic, exposed in ((0.04, 0.0), (0.02, 0.01), (0.0, 0.03)):
        ops = [Op("a", "matmul", 100e12 * arithmetic, 0, "bfloat16")]
        result = step_time(_work(ops, [gather]), HERE)
        assert math.isclose(result.exposed, exposed, abs_tol=1e-5)
        assert math.isclose(step_time(_work(ops, [wait]), HERE).exposed, 0.03, abs_tol=1e-5)
    assert hides_behind(wait) is None and hides_behind(wait, ("tensor",)) == hides_behind(gather) == "layers"
    assert hides_behind(dataclasses.replace(wait, ring="all-gather")) == "layers"


def test_axes_through_one_switch_wait_for_each_other():
    gather = Collective("all-gather", ("fsdp",), 4, 4 * GB)
    both = [gather, dataclasses.replace(gather, axes=("tensor",), ring="all-gather")]  # 30 ms each, beside 40
    result = step_time(_work([Op("a", "matmul", 4e12, 0, "bfloat16")], both), HERE)
    assert math.isclose(result.exposed, 0.02, abs_tol=1e-5)


def test_a_pipeline_idles_as_its_schedule_says():
    config = TrainConfig(
        model=llama3_8b(attention=flash_attention, memory="none"),
        layout=js.Layout("pipeline=4", pipeline="gpipe:8"),
        batch_size=8,
        seq_len=1024,
    )
    work = work_of(config, config.layout, NOTHING, ())
    assert math.isclose(work.bubble, 3 / 11, rel_tol=0.01)  # (K - 1) / (M + K - 1), Huang et al. 2019
    result = step_time(work, HERE)
    staged = sum(op.flops for op in work.ops if op.staged) / 100e12
    assert result.bubble > 3 / 8 * staged * 0.99


def test_host_transfers_hide_behind_layers():
    ops = [Op("a", "matmul", 10e12, 0, "bfloat16")]
    assert step_time(_work(ops, host=0.9 * GB), HERE).host == 0
    assert math.isclose(step_time(_work(ops, host=3 * GB), HERE).host, 0.2)


def test_stages_without_layers_are_refused():
    config = TrainConfig(model=llama3_8b(depth=2), layout=js.Layout("pipeline=4"), batch_size=8, seq_len=64)
    with pytest.raises(js.errors.LayoutError, match="use pipeline=2"):
        work_of(config, config.layout, NOTHING, ())


def test_two_operations_that_are_alike_take_twice_the_time_of_one():
    op = Op("mlp_up", "matmul", 1e15, 1e9, "bfloat16")
    assert step_time(_work([op, op]), HERE).compute == 2 * step_time(_work([op]), HERE).compute


def test_products_in_8_bits_are_planned_at_their_rate_and_gathered_in_bytes():
    v6e = topology("v6e:2x2")

    def planned(products):
        model = js.models.Transformer.Config(depth=2, width=256, heads=2, vocab=64, dtype="bfloat16", products=products)
        config = TrainConfig(model=model, layout=js.Layout("fsdp=4"), batch_size=4, seq_len=64, prompt=None)
        work = traced_plan(config, v6e)[1]
        flops = {d: sum(op.flops for op in work.ops if op.dtype == d) for d in ("int8", "bfloat16")}
        return flops, sum(c.sent for c in work.collectives if c.kind == "all-gather")

    (plain, sent), (eight, sent_eight) = planned(None), planned(Int8())
    assert plain["int8"] == 0 and eight["int8"] + eight["bfloat16"] == plain["bfloat16"]
    layers = 2 * 2 * (4 * 256 * 256 + 3 * 256 * 704)  # FLOPs of a token forward, and as many for the input's gradient
    assert eight["int8"] == 2 * layers * 4 * 64 / 4
    assert v6e.chip.rate("int8") == 2 * v6e.chip.rate("bfloat16")
    assert sent_eight < 0.6 * sent
