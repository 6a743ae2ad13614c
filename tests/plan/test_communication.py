"""predict: a step's collectives, against sums from the literature and against compiled programs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import experiments.planner_accuracy.communication as measured
import experiments.planner_accuracy.communication_wide as wide
import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Boxes
from jaxscale.nn import flash_attention
from jaxscale.optim import SOAP, AdamW, Muon
from jaxscale.optim.layers import is_hidden_matrix, view_of
from jaxscale.plan import compile_for, flops, plan_for
from jaxscale.plan.collectives import Collective, collectives
from jaxscale.plan.communication import partition, predict
from jaxscale.plan.partition import partitioned
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.traffic import traffic
from jaxscale.step import TrainConfig, blueprint_of
from tests.train.test_step_collectives import CASES, MATRICES, MODEL, OF_STAGES, SCALARS, STREAM, TABLES
from tests.truth.errors import raises_saying
from tests.truth.long import short

ROWS = measured.read()
NARROW = [("latent", "fsdp-tensor"), ("latent", "fsdp-sequence"), ("latent", "keep"), ("latent-queries", "fsdp-tensor")]
"""Cases with weights of latent attention that `tensor` does not shard, where the compiler sends more.

It shards the work of these weights' gradients over `tensor`, and exchanges shards (COMMUNICATION.md).
"""


def config_of(layout, model=MODEL, **run):
    run = {"batch_size": 16, "seq_len": 128, "prompt": None} | run
    return TrainConfig(model=model, layout=layout, **run)


def sums(sent):
    """Return payloads by mesh axes: of all-gathers, and of all other collectives."""
    gathered, summed = Counter(), Counter()
    for c in sent:
        (gathered if c.kind == "all-gather" else summed)[c.axes] += c.payload * c.times
    return gathered, summed


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_a_step_has_to_send_what_its_compiled_program_sends(layout):
    # tests/train/test_step_collectives.py compares the same sums with compiled programs
    gathered, summed = sums(predict(config_of(layout), "v5p:2x2x1"))
    want_gathered, want_summed = CASES[layout]
    assert dict(gathered) == want_gathered
    extra = {axes: n - want_summed.get(axes, 0) for axes, n in summed.items()}
    assert set(want_summed) <= set(extra) and all(0 <= n <= SCALARS for n in extra.values()), extra


@pytest.mark.parametrize("layout", OF_STAGES, ids=str)
def test_replicas_of_a_pipeline_have_to_sum_their_gradients_once(layout):
    topology, want = OF_STAGES[layout]
    sent = [c for c in predict(config_of(layout), topology) if c.axes in (("data",), ("fsdp",)) and c.payload > 4]
    assert {c.times for c in sent} == {1}
    assert sum(c.payload for c in sent if c.kind != "all-gather") == want


def test_devices_that_have_other_tokens_have_to_sum_a_pipelines_matrices_once():
    layout = js.Layout("pipeline=2,context=2", pipeline="gpipe:4")
    sent = [c for c in predict(config_of(layout), "v5p:2x2x1") if c.axes == ("context",) and c.kind != "all-gather"]
    once = [c for c in sent if c.times == 1 and c.payload > 4]
    assert sum(c.payload for c in once) == 4 * MATRICES // 2  # one of two layers
    # in each micro-batch those of a stage's half of a table and of norms, and cotangents of keys and values
    table, keys = 4 * TABLES // 2 // 2, STREAM // 4
    assert {c.payload for c in sent if c.times > 1 and c.payload > SCALARS} <= {table, keys}


@pytest.mark.parametrize("cell", short(8, [pytest.param(c) for c in measured.cells() if c in ROWS]), ids="-".join)
def test_compiled_steps_send_what_is_predicted(cell):
    row = ROWS[cell]
    config, topology = measured.config_of(*cell), row["topology"]
    sent = as_compiled(predict(config, topology, every_branch=True), topology)
    ours, theirs = (measured.by_axes(rows) for rows in (measured.summed(sent), row["compiled"]))
    left = 0
    for axes in ours.keys() | theirs.keys():
        more = theirs.get(axes, 0) - ours.get(axes, 0)
        if cell in NARROW and axes in ("fsdp", "fsdp·tensor"):
            left += more
        else:
            assert abs(more) <= max(measured.SCALARS, theirs.get(axes, 0) // 1000), (axes, more)
    assert 0 <= left <= 0.03 * sum(theirs.values())


@pytest.mark.parametrize(
    "name", ["llama3_8b:4 h100:8 fsdp=8 dense 8x2048 dots", "llama3_8b:4 v6e:2x4 fsdp=8 8x4096 full"]
)
def test_compiled_steps_of_real_width_send_what_is_predicted(name):
    # with the GPU compiler's repeated gathers, and the TPU compiler's rings in place of reduce-scatters
    ours, theirs = wide.predicted(name)["stood_in"], wide.read()[name]["compiled"]
    assert abs(wide.total(ours) / wide.total(theirs) - 1) < 0.001


@pytest.mark.parametrize("repeats, gathers", [(False, 1), (True, 2)])
def test_a_gather_that_equals_another_is_made_once_or_again(repeats, gathers):
    layout = js.Layout("fsdp=4").abstract(4)

    def fn(x):
        whole, again = (jax.lax.with_sharding_constraint(x, PartitionSpec()) for _ in range(2))
        return jnp.sin(whole) + jnp.cos(again)

    like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    sent = partitioned(fn, (like,), [Boxes((("fsdp",), ()))], layout, repeats=repeats).collectives
    assert [c.kind for c in sent] == ["all-gather"] * gathers


def gradient(topology, tokens, devices=8):
    """Return predicted collectives of a product whose sum is scattered, and a function that compiles it."""
    layout, cut = js.Layout(f"fsdp={devices}").abstract(devices), PartitionSpec("fsdp", None)
    like = jax.ShapeDtypeStruct((tokens * devices, 1024), jnp.bfloat16, sharding=NamedSharding(layout.device_mesh, cut))

    def fn(a, b):
        dims = ((0,), (0,)), ((), ())
        product = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
        return jax.lax.with_sharding_constraint(product, cut)

    split = Boxes((("fsdp",), ()))
    sent = as_compiled(partitioned(fn, (like, like), [split, split], layout).collectives, topology)
    return sent, lambda: collectives(compile_for(fn, topology, like, like, layout=js.Layout("fsdp=8")), layout.sizes)


@pytest.mark.parametrize("topology, tokens", [("v5e:2x4", 1024), ("v5p:2x2x2", 992), ("v6e:2x4", 2432)])
def test_a_large_product_and_its_scatter_are_a_ring(topology, tokens):
    ((below,), _), ((above,), _) = gradient(topology, tokens), gradient(topology, tokens + 64)
    assert not below.ring and above.ring == "reduce-scatter"
    assert above.sent == 4 * 1024 * 1024 * 9 // 8  # a shard for each of eight devices, and one more


@pytest.mark.tpu_aot
@pytest.mark.parametrize("tokens", [1024, 1088])
def test_a_compiler_makes_a_ring_of_a_large_product_and_its_scatter(tokens):
    sent, compiled = gradient("v5e:2x4", tokens)
    assert sum(c.sent for c in compiled()) == sum(c.sent for c in sent)


def test_branches_of_a_pipeline_are_counted_when_they_are_taken():
    config = config_of(js.Layout("pipeline=4", pipeline="gpipe:4"), dataclasses.replace(MODEL, depth=4))
    on_branch, every = (predict(config, "v5p:2x2x1", every_branch=b) for b in (False, True))
    # four micro-batches in seven ticks each way; permutes to the next stage run at every tick
    assert {c.times for c in on_branch if c.kind == "all-reduce" and c.payload > SCALARS} == {4}
    assert {c.times for c in every if c.payload > SCALARS} == {14}
    assert {c.times for c in on_branch if c.kind == "collective-permute"} == {14}


def one(kind, size, topology, devices):
    """Return the collectives that a compiler makes of a single gather or scatter over a whole slice."""
    layout = js.Layout(f"fsdp={devices}")
    cut, whole = PartitionSpec("fsdp", None), PartitionSpec()
    like = lambda shape, dtype, spec: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=NamedSharding(layout.abstract(devices).device_mesh, spec)
    )
    if kind == "all-gather":
        fn = lambda x: jax.lax.with_sharding_constraint(x, whole) * 2  # noqa: E731
        args = (like((size // 512, 256), jnp.bfloat16, cut),)
    else:
        dims = ((0,), (0,)), ((), ())
        fn = lambda a, b: jax.lax.with_sharding_constraint(  # noqa: E731
            jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32), cut
        )
        args = tuple(like((64 * devices, n), jnp.bfloat16, cut) for n in (size // 1024, 256))
    return collectives(compile_for(fn, topology, *args, layout=layout), layout.sizes)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology, devices", [("v5p:2x2x1", 4), ("v5p:4x4x4", 64)])
@pytest.mark.parametrize("kind, size", [("all-gather", 2**20), ("reduce-scatter", 2**15), ("reduce-scatter", 2**20)])
def test_a_compiler_puts_sums_in_the_place_of_gathers_and_scatters(topology, devices, kind, size):
    size *= 2 if size < 2**16 and devices == 64 else 1  # a row for each chip
    expected = as_compiled([Collective(kind, ("fsdp",), devices, size)], topology)
    assert [(c.kind, c.payload) for c in one(kind, size, topology, devices)] == [(c.kind, c.payload) for c in expected]


def test_one_device_sends_nothing():
    assert predict(config_of(js.Layout("data=1")), "cpu:1") == []


def test_a_mesh_takes_the_rest_of_a_topology():
    sent = predict(config_of(js.Layout("fsdp=-1"), batch_size=64), "v5p:4x4x4")
    assert {c.devices for c in sent} == {64} and {c.axes for c in sent} == {("fsdp",)}


def test_what_cannot_be_planned_raises():
    with raises_saying(ConfigError, "layout=None", "Layout('data=1')"):
        predict(config_of(None), "cpu:1")
    with raises_saying(LayoutError, "v5x"):
        predict(config_of(js.Layout()), "v5x:2x2")
    with raises_saying(LayoutError, "shards 4 over 8"):
        predict(config_of(js.Layout("tensor=8")), "v5e:2x4")
    cut = dataclasses.replace(MODEL, attention=flash_attention)
    with raises_saying(LayoutError, "flash_attention", "RingAttention", "context"):
        predict(config_of(js.Layout("context=4"), cut), "v5p:2x2x1")


def test_an_optimizers_own_products_and_exchanges_are_planned():
    model = dataclasses.replace(MODEL, depth=4)
    config = config_of(js.Layout("fsdp=4"), model, optimizer=Muon())
    traced = partition(config, "v5p:2x2x1")
    of_update = [c for c in traced.collectives if c.name.startswith("optimizer") and c.kind == "all-to-all"]
    matrices = [i for i in jax.tree.leaves(blueprint_of(config)[0].infos) if is_hidden_matrix(i)]
    # one device gathers each float32 matrix and scatters its update: a device sends 3/4 of its quarter each way
    assert sum(c.sent for c in of_update) == 2 * sum(4 * i.size * 3 // 16 for i in matrices)
    (flops,) = traced.flops_within("optimizer").values()
    made = 0
    for i in matrices:
        *stack, m, n = view_of(i).shape
        m, n = min(m, n), max(m, n)
        made += math.prod(stack) * 5 * 2 * (2 * m * m * n + m**3)  # Newton-Schulz: a gram, its square, and a product
    assert flops == made // 4
    configs = (dataclasses.replace(config, optimizer=AdamW()), config)
    plain, muon = (plan_for(c, "v5p:2x2x1", compile="never").step for c in configs)
    assert muon.compute > plain.compute and muon.total > plain.total


@pytest.mark.parametrize("frequency", [1, 10])
def test_soaps_decompositions_count_as_often_as_it_makes_them(frequency):
    """QR of n x n with Q is 8/3 n^3 (Golub & Van Loan), after a product in six passes; `eigh` is for the first update.

    Work on sharded sides is divided over the mesh; work on other sides is on every device.
    """
    config = config_of(js.Layout("fsdp=4"), dataclasses.replace(MODEL, depth=4), optimizer=SOAP(frequency=frequency))
    by_scope = partition(config, "v5p:2x2x1").flops
    every = {scope: n for (scope, _), n in by_scope.items() if f"every_{frequency}_updates" in scope}
    assert not any("first_update" in scope for scope, _ in by_scope)
    counted = 0.0
    for i in (i for i in jax.tree.leaves(blueprint_of(config)[0].infos) if is_hidden_matrix(i)):
        view = view_of(i)
        for n, axis in zip(view.shape[-2:], view.axes[-2:], strict=True):
            stack = math.prod(view.shape[:-2]) / (4 if axis == "embed" else 1)
            counted += stack * (8 / 3 + 6 * 2) * n**3
    assert sum(every.values()) == pytest.approx(counted / frequency, rel=1e-6)
    whole = flops.of_step(config).rows
    assert {r.what for r in whole if r.module.startswith("optimizer")} >= {"qr"} and all(r.certain for r in whole)


MOVES = ("all-to-all", "collective-permute")


def test_exchanges_of_layers_between_stages_name_their_module():
    """Layers that chunks do not divide are exchanged in each step if they have no padding; others are not."""
    layout, sent = js.Layout("pipeline=2,fsdp=2", pipeline="interleaved:4:2"), []
    for depth, optimizer in ((4, js.optim.AdamW()), (6, js.optim.AdamW()), (6, js.optim.ScheduleFreeAdamW())):
        config = config_of(layout, dataclasses.replace(MODEL, depth=depth))
        config = dataclasses.replace(config, optimizer=optimizer)
        sent.append([t for t in traffic(predict(config, "v5p:2x2x1")) if t.kind in MOVES and not t.loop])
    modules = {i.path.rpartition("/")[0] for i in jax.tree.leaves(blueprint_of(config)[0].infos["runs"])}
    assert not sent[0] and not sent[1] and {t.module for t in sent[2]} == modules
    assert all(t.source.startswith("jaxscale/step/pipeline.py") for t in sent[2])


@pytest.mark.long
def test_overlap_hides_collectives_that_run_as_rings_only():
    layout, wide = js.Layout("tensor=4", sequence_sharded=True), dict(width=4096, hidden=16384, heads=32, head_dim=128)
    none, some, both = (
        plan_for(
            config_of(layout, dataclasses.replace(MODEL, overlap=o, **wide), seq_len=4096), "v5p:2x2x1", compile="never"
        ).step.exposed
        for o in ((), ("mlp",), ("mlp", "attention"))
    )
    assert 0 < both < some < none


ASYNCHRONOUS = """HloModule step

%start (p: bf16[1,64]) -> bf16[4,64] {
  %p = bf16[1,64]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[4,64]{1,0} all-gather(%p), channel_id=60, replica_groups={{0,1,2,3}}, chain_id="3"
}

%done (p.2: bf16[1,64]) -> bf16[4,64] {
  %p.2 = bf16[1,64]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[4,64]{1,0} all-gather(%p.2), channel_id=60, replica_groups={{0,1,2,3}}, chain_id="3"
}

ENTRY %main (x: bf16[1,64]) -> bf16[4,64] {
  %x = bf16[1,64]{1,0} parameter(0)
  %a = bf16[4,64]{1,0} fusion(%x), kind=kCustom, calls=%start
  ROOT %b = bf16[4,64]{1,0} fusion(%x), kind=kCustom, calls=%done
}
"""


def test_an_asynchronous_collective_is_counted_once():
    (sent,) = collectives(ASYNCHRONOUS, js.Layout("fsdp=4").abstract().sizes)
    assert (sent.kind, sent.axes, sent.payload) == ("all-gather", ("fsdp",), 4 * 64 * 2)
    assert len(collectives(ASYNCHRONOUS.replace('chain_id="3"', ""), js.Layout("fsdp=4").abstract().sizes)) == 2
