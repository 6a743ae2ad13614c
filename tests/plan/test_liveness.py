"""Memory of a step from its traced program: counted by hand, against compiled programs, and without formulas."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxscale as js
from experiments.planner_accuracy.memory import Cell
from jaxscale.hardware import topology
from jaxscale.layout import Boxes
from jaxscale.models.presets import gpt2
from jaxscale.nn import MixtureOfExperts, dot_product_attention, flash_attention
from jaxscale.optim import AdamW, AdamW8bit, EightBit, Muon, OnHost
from jaxscale.plan import flops, plan_for
from jaxscale.plan.by_tracing import traced_plan
from jaxscale.plan.communication import partition
from jaxscale.plan.error_bars import REGIMES, TIME_REGIMES, error_bar, regime, time_error_bar
from jaxscale.plan.liveness import allocation
from jaxscale.plan.partition import partitioned
from jaxscale.plan.planner import on_hardware
from jaxscale.step import LocalSteps, LoRA
from jaxscale.train import FromRun
from pallas_kernels.grouped_stored_matmul import grouped_stored_matmul
from pallas_kernels.stored_matmul.examples import FORMATS, shapes

V5E = topology("v5e:2x2")
LAYOUT = js.Layout("fsdp=4").abstract(4)
MATRIX = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4
MODEL = js.models.TransformerConfig(depth=4, width=32, heads=2, vocab=64, attention=flash_attention)
TINY = js.TrainConfig(model=MODEL, layout=js.Layout("fsdp=4,tensor=2"), batch_size=16, seq_len=32)
ROWS = Path(__file__).parents[2] / "experiments" / "planner_accuracy" / "memory.jsonl"


def temporaries(fn, *args, split=((), ())):
    memory = allocation(partitioned(fn, args, [Boxes(split)] * len(args), LAYOUT).program, V5E)
    assert memory.arguments == sum(x.size * x.dtype.itemsize for x in args) // (4 if any(split) else 1)
    return memory.temporaries


def test_products_are_stored_and_elementwise_operations_are_not():
    assert temporaries(lambda x: jnp.exp(x + 1) * 2, MATRIX) == 0  # the result takes the argument's memory
    assert temporaries(lambda x: (x @ x) @ x, MATRIX) == 2 * SIZE  # the second product still reads the argument
    assert temporaries(lambda x: jnp.tanh(x @ x) + 1, MATRIX) == SIZE


def test_arrays_are_freed_after_their_last_read():
    def chain(x):
        for _ in range(5):
            x = x @ x
        return x

    def all_at_once(x):
        a, b, c = x @ x, x @ (x + 1), x @ (x + 2)
        return (a @ b) @ c

    assert temporaries(chain, MATRIX) == 2 * SIZE
    assert temporaries(all_at_once, MATRIX) == 3 * SIZE  # the result takes the argument's memory


def test_a_shard_takes_its_share_and_a_partial_sum_all_of_it():
    assert temporaries(lambda x: (x @ jnp.ones((256, 512))).sum(1), MATRIX, split=(("fsdp",), ())) == SIZE // 2 + 256
    assert temporaries(lambda x: x.T @ x, MATRIX, split=(("fsdp",), ())) == SIZE  # a partial sum is whole


def test_a_loop_holds_its_stacks_and_one_iteration():
    def loop(x):
        def step(carry, _):
            made = carry @ carry
            return made, made

        return jax.lax.scan(step, x, None, length=8)[1]

    assert temporaries(loop, MATRIX) == 10 * SIZE  # eight rows, the carry and the product


def test_a_loop_reads_the_slices_that_it_takes_and_writes_those_that_it_updates():
    """Each of four iterations reads a matrix of the stack and its square, and writes the square twice."""

    def loop(stack):
        def step(i, out):
            return jax.lax.dynamic_update_index_in_dim(out, stack[i] @ stack[i], i, 0)

        return jax.lax.fori_loop(0, 4, step, jnp.zeros_like(stack))

    stack = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)
    program = partitioned(loop, (stack,), [Boxes(((),) * 3)], LAYOUT).program
    assert allocation(program, V5E).moved == pytest.approx(4 * (2 + 2) * SIZE, rel=1e-3)


def test_a_product_with_stored_matrices_of_experts_has_a_tile_for_every_expert():
    """16 rows of 4 experts: tiles of 16 rows (twice the mean, up to a power of two), one for each expert."""
    weight = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape), a.dtype), shapes(8, 16, **FORMATS["int8"]))
    args = (jax.ShapeDtypeStruct((16, 8), jnp.bfloat16), weight, jax.ShapeDtypeStruct((4,), jnp.int32))
    product = functools.partial(grouped_stored_matmul, implementation="xla")
    boxes = jax.tree.map(lambda a: Boxes(((),) * a.ndim), args)
    result = partitioned(product, args, boxes, LAYOUT, platform="cuda")
    assert sum(result.flops.values()) == flops.count(product, *args).matmul == 4 * 2 * 16 * 8 * 16
    held = {b.what.rpartition("/")[2]: b.size for b in allocation(result.program, topology("h100:1")).at_peak}
    assert held["pad"] == (16 + 16) * 8 * 2 and held["dot_general"] == 16 * 16 * 2  # rows and a tile more; a tile


def test_a_broadcast_array_takes_what_it_is_broadcast_from():
    row = jax.ShapeDtypeStruct((256,), jnp.float32)

    def fn(r):
        return jnp.cumsum(jnp.broadcast_to(r * 2, (256, 256)), axis=0)

    program = partitioned(fn, (row,), [Boxes(((),))], LAYOUT).program
    assert allocation(program, V5E).temporaries == SIZE + 4 * 256


def test_predicted_memory_of_compiled_cells_is_that_of_the_table():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    row = next(r for r in rows if r["cell"] == "llama3_8b:8 v5e:4x4 fsdp=16 16x4096 full")
    cell = Cell.named(row["cell"])
    hardware = topology(cell.topology)
    memory = traced_plan(on_hardware(cell.config, hardware), hardware)[0]
    assert memory.device == row["traced"] and abs(memory.device / row["compiled"] - 1) < 0.05


def test_operations_without_a_rule_are_named_where_they_act_along_a_sharded_dimension():
    for axis, names in ((0, ("fft",)), (1, ())):
        fft = functools.partial(jnp.fft.fft, axis=axis)
        assert partitioned(fft, (MATRIX,), [Boxes((("fsdp",), ()))], LAYOUT).without_rule == names

    def attention(q, k, v, **options):
        return dot_product_attention(jnp.fft.fft(q, axis=1).real.astype(q.dtype), k, v, **options)

    config = dataclasses.replace(TINY, model=dataclasses.replace(MODEL, attention=attention))
    for layout, noted in (("context=4", True), ("fsdp=4", False)):
        plan = plan_for(dataclasses.replace(config, layout=js.Layout(layout)), "v5e:2x2", compile="never")
        assert ("communication of fft over sharded dimensions is not counted" in str(plan)) == noted


def _attention(q, k, v, *, mask=None, **_):
    return flash_attention(q, k, v)


LOCAL_STEPS = dict(algorithm=LocalSteps(every=2), layout=js.Layout("replica=2,fsdp=4", rules="fsdp_tensor"))


@pytest.mark.parametrize(
    "changes", [LOCAL_STEPS, dict(model=dataclasses.replace(MODEL, attention=_attention))], ids=["algorithm", "layer"]
)
def test_runs_without_formulas_are_planned_without_a_compiler(changes):
    plan = plan_for(dataclasses.replace(TINY, **changes), "v5e:2x4", compile="never")
    assert plan.compiled is None and plan.memory.device > plan.memory.state > 0
    assert plan.step.compute > 0 and plan.error_bar is not None


def test_traced_state_in_host_memory_takes_none_on_the_device():
    config = dataclasses.replace(TINY, model=dataclasses.replace(MODEL, attention=_attention), optimizer=AdamW())
    on_device, on_host = (
        plan_for(dataclasses.replace(config, optimizer=optimizer), "v5e:2x4", compile="never").memory
        for optimizer in (AdamW(), OnHost(AdamW()))
    )
    assert on_host.host == on_device.state - on_host.state > on_device.state / 2


def test_eight_bit_states_over_stages_are_planned():
    config = dataclasses.replace(
        TINY, optimizer=AdamW8bit(storage=EightBit(width=8)), layout=js.Layout("pipeline=2,fsdp=4")
    )
    assert partition(on_hardware(config, topology("v5e:2x4")), "v5e:2x4").collectives


def test_error_bars_by_kind_of_run():
    usual = dataclasses.replace(TINY, segments=False)
    adapted = dataclasses.replace(usual, start=FromRun("runs/x"), adapters=LoRA(4))
    tpu, gpu = topology("v5e:2x4"), topology("h100:8")
    assert [regime(c, tpu) for c in (usual, TINY, adapted)] == ["usual", "other", "adapters"]
    for kind, config in (("usual", usual), ("other", TINY)):
        bar = error_bar(config, topology("v5e:2x4"), 2**33)
        assert bar.regime == kind and bar.low < 1 <= bar.high and bar.cases >= 10 and not bar.outside
        assert REGIMES[kind] in str(bar)
    bar = error_bar(usual, gpu, 2**33)
    assert bar.regime == "gpus" and bar.cases >= 10 and not bar.outside and "TPU" not in str(bar)
    assert "adapters" in error_bar(adapted, gpu, 2**33).outside
    assert "a100" in error_bar(usual, topology("a100:8"), 2**33).outside
    assert "between" in error_bar(usual, topology("v5e:2x4"), 1000).outside


def test_error_bars_of_time_by_kind_of_run():
    dense = dataclasses.replace(TINY, model=gpt2(depth=48, width=8192, heads=64))
    experts = dataclasses.replace(MODEL, mlp=MixtureOfExperts(experts=4))
    long, small = dataclasses.replace(dense, seq_len=16384), dataclasses.replace(dense, model=gpt2())
    for kind, config in dict(
        dense=dense, long=long, small=small, experts=dataclasses.replace(dense, model=experts)
    ).items():
        bar = time_error_bar(config, topology("h100:8"))
        assert bar.regime == kind and bar.low <= 1 < bar.high and TIME_REGIMES[kind] in str(bar)
    assert time_error_bar(small, topology("h100:8")).outside == ""
    assert "on v5e" in time_error_bar(small, topology("v5e:2x4")).outside
    assert "AdamW" in time_error_bar(dataclasses.replace(small, optimizer=Muon()), topology("h100:8")).outside
    assert "parameters" in time_error_bar(TINY, topology("h100:8")).outside
    plan = plan_for(TINY, "v5e:2x4", compile="never")
    low, high = plan.seconds_range
    assert low == plan.time_error_bar.low * plan.step.total and high == plan.time_error_bar.high * plan.step.total
    assert str(plan.time_error_bar) in plan.notes and plan.to_json()["seconds_range"] == [low, high]


def test_to_fit_is_to_fit_at_the_upper_end_of_the_error_bar():
    """A GPT-2 step that is predicted to take less than a v5e has, and takes more when it is compiled."""
    config = js.TrainConfig(
        model=gpt2(memory="none"), layout=js.Layout("data=8", rules="replicated"), batch_size=40, seq_len=1024
    )
    plan = plan_for(config, "v5e:2x4", compile="never")
    assert plan.bytes < plan.hardware.chip.capacity < plan.bytes_range[1]
    assert not plan.fits and "may not fit" in str(plan)
    assert plan.to_json()["bytes_range"] == list(plan.bytes_range)
