"""The pipeline executor: computation, memory and collectives of its programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.interpreters import partial_eval

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, Pipeline, simulate
from jaxscale.models import TransformerConfig
from jaxscale.parallel.pipeline import Split, assign, lower
from jaxscale.step import batch_sharding, describe_model, jit_step, make_loss_and_grads, make_step
from jaxscale.step.pipeline import kernels_of
from tests.truth.errors import raises_saying
from tests.truth.hlo import branches
from tests.truth.layouts import QUICKLY, build, random_batch, remembering_sgd
from tests.truth.long import short
from tests.truth.schedules import random_table

MODEL = TransformerConfig(depth=4, vocab=64, width=16, heads=4, kv_heads=2, head_dim=4, hidden=32)


@functools.cache
def compiled(layout: Layout, model: TransformerConfig = MODEL, rows: int = 8, seq: int = 8):
    """A training step."""
    setup = build(model, layout, remembering_sgd())
    batch = random_batch(model.vocab, rows=rows, seq=seq)
    with layout:
        sharding = batch_sharding(layout, rows, seq)
        step = make_step(make_loss_and_grads(setup.blueprint), setup.blueprint.tx)
        lowered = jit_step(step, setup.blueprint, sharding).lower(setup.state, jax.device_put(batch, sharding))
        return lowered.compile(QUICKLY)


# --- branches


@pytest.mark.parametrize(
    "layout,alone",
    short(
        1,
        [
            (Layout("pipeline=2,data=2,tensor=2", pipeline="lockstep-zb:4"), False),
            (Layout("pipeline=2", pipeline="zb-h1:4"), True),
            (Layout("pipeline=2,data=2", pipeline="zb-h1:2"), True),
        ],
    ),
    ids=str,
)
def test_no_collective_stands_under_a_branch_that_devices_take_differently(layout, alone):
    result = branches(compiled(layout).as_text())
    wrong = {b.name: sorted(b.collectives) for b in result if b.divergent and b.collectives}
    assert not wrong
    # Without mesh axes inside a stage, each stage runs only its own phases; else all devices run them together.
    assert sum(b.divergent for b in result) == (3 if alone else 0)
    assert any(
        b.collectives for b in result if not b.divergent
    )  # embedding and loss, which all stages compute together


def test_a_permute_under_such_a_branch_is_noticed():
    def shift(x):
        mine = lax.axis_index("pipeline") == 0
        ring = lambda x: lax.ppermute(x, "pipeline", [(0, 1), (1, 0)])  # noqa: E731
        return lax.cond(mine, ring, lambda x: x * 2, x)

    with Layout("pipeline=2"):
        one = jax.shard_map(shift, in_specs=jax.P("pipeline"), out_specs=jax.P("pipeline"), check_vma=False)
        text = jax.jit(one).lower(jnp.ones(4)).compile().as_text()
    assert [(b.divergent, set(b.collectives)) for b in branches(text)] == [(True, {"collective-permute"})]


def test_stages_send_by_two_permutes_whatever_the_schedule():
    for schedule in ("zb-h1:4", "gpipe:4"):
        text = compiled(Layout("pipeline=2", pipeline=schedule)).as_text()
        assert text.count(" collective-permute(") + text.count(" collective-permute-start(") == 2


# --- the split backward


def _flops(f, *args) -> int:
    """FLOPs of matrix products, without unused ones."""

    def walk(jaxpr) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                summed = eqn.params["dimension_numbers"][0][0]
                total += 2 * eqn.outvars[0].aval.size * int(np.prod([eqn.invars[0].aval.shape[d] for d in summed]))
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    total += walk(inner) * eqn.params.get("length", 1)
        return total

    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return walk(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _stage(model: TransformerConfig):
    """A stage with all layers: its function, parameters, input, and split."""
    graphdef, infos = describe_model(model)
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    kernels = kernels_of(graphdef, infos)["runs"]
    ends = {k: jax.tree.map(lambda i: jnp.zeros(0), v) for k, v in infos.items() if k != "runs"}

    def stage(runs, x):
        merged = nnx.merge(graphdef, {**ends, "runs": runs})
        return merged.layers(x, merged.context(x.shape[1]))[0]

    x = jax.ShapeDtypeStruct((2, 8, model.sizes.width), jnp.float32)
    return stage, params["runs"], x, Split.of(stage, params["runs"], kernels, x)


@pytest.mark.parametrize("memory", ["none", "full"])
def test_three_phases_cost_what_an_ordinary_backward_costs(memory):
    stage, params, x, split = _stage(TransformerConfig(depth=2, width=16, heads=2, hidden=48, memory=memory, scan=True))
    pairs = jax.eval_shape(split.zeros)
    ordinary = _flops(lambda p, x, ct: jax.vjp(stage, p, x)[1](ct), params, x, x)
    dx = _flops(lambda p, x, ct: split.backward(stage, p, x, ct), params, x, x)
    dw = _flops(split.weights, pairs)
    assert abs(dx + dw - ordinary) <= 0.05 * ordinary
    # All weights are deferred: a third of the products with weights, without recomputation.
    weights = _flops(stage, params, x) - 2 * 2 * 2 * 2 * 8 * 8 * 16  # without scores and values
    assert dw == weights


def test_no_weight_waits_in_a_stash_and_no_input_twice():
    *_, split = _stage(TransformerConfig(depth=2, width=16, heads=2, hidden=48, scan=True))
    names = split.axes()
    # gate, up and down; q, k, v and out: seven products of four inputs
    assert len(names) == 7 and sum(x is not None for x, _ in names) == 4
    assert all(axes is None or axes[1:3] == ("batch", "seq") for pair in names for axes in pair)


def test_a_weight_used_in_tiles_does_not_wait():
    from jaxscale.nn import MemoryPolicy

    tiled = MemoryPolicy(rest="keep", tile=("mlp_hidden",), tile_size=4)
    *_, split = _stage(TransformerConfig(depth=2, width=16, heads=2, hidden=48, memory=tiled, scan=True))
    assert len(split.waiting) == 4  # those of attention


# --- memory


def test_buffers_are_as_large_as_the_schedules_stash():
    for seed in range(3):
        table = random_table(3, 5, chunks=2, phases=3, seed=seed)
        slots, result = lower(table), simulate(table)
        assert max(result.stash) <= slots.size["inputs"] + slots.size["pairs"]
    assert lower(Pipeline("gpipe").table(2, 8)).size == {"inputs": 8, "cotangents": 8, "pairs": 0}
    assert lower(Pipeline("1f1b").table(2, 8)).size == {"inputs": 2, "cotangents": 1, "pairs": 0}
    assert lower(Pipeline("lockstep").table(2, 8)).size == {"inputs": 3, "cotangents": 1, "pairs": 0}


@pytest.mark.long
def test_compiled_memory_differs_by_what_the_simulator_says():
    model = TransformerConfig(depth=2, vocab=32, width=64, heads=2, head_dim=8, hidden=16)
    rows, seq, micro = 32, 64, 8
    temp = {}
    for name in ("gpipe", "1f1b"):
        layout = Layout("pipeline=2", pipeline=Pipeline(name, micro))
        temp[name] = compiled(layout, model, rows, seq).memory_analysis().temp_size_in_bytes
    slot = rows // micro * seq * 64 * 4
    stash = {name: max(simulate(Pipeline(name).table(2, micro)).stash) for name in temp}
    assert stash == {"gpipe": 8, "1f1b": 2}
    # Inputs as the simulator counts them; on the last stage gpipe stores as many cotangents, and 1f1b one.
    want = (8 + 8 - 2 - 1) * slot
    assert abs(temp["gpipe"] - temp["1f1b"] - want) <= 0.1 * want


# --- assignment of layers


@pytest.mark.parametrize(
    "repeats,stages,chunks,held,padded",
    [
        ((4,), 2, 1, [[[[0, 1]], [[2, 3]]]], (0,)),
        ((4,), 2, 2, [[[[0], [2]], [[1], [3]]]], (0,)),
        ((5,), 2, 1, [[[[0, 1, 2]], [[3, 4, 4]]]], (1,)),
        ((5,), 4, 1, [[[[0, 1]], [[2, 2]], [[3, 3]], [[4, 4]]]], (3,)),
        ((4, 1), 2, 1, [[[[0, 1]], [[2, 3]]], [[[0]], [[0]]]], (0, 1)),
        ((5,), 2, "v", [[[[0, 1], [4, 4]], [[2, 2], [3, 3]]]], (3,)),
    ],
    ids=["even", "chunks", "uneven", "few", "two runs", "v"],
)
def test_layers_are_dealt_out_in_order_with_little_padding(repeats, stages, chunks, held, padded):
    placed = (2, "v") if chunks == "v" else (chunks,)
    result = assign(repeats, (1,) * len(repeats), stages, *placed)
    assert [a.tolist() for a in result.index] == held
    assert result.padded == padded


def test_what_is_spread_over_stages_is_collected_again():
    stack = jnp.arange(5 * 3).reshape(5, 3)
    for placement in ("ring", "v"):
        result, names = assign((5,), (1,), 2, 2, placement), ("layers", "norm")
        assert (result.collect(0, result.spread(0, stack, names), names) == stack).all()


def test_more_stages_than_layers_are_refused():
    with raises_saying(LayoutError, "4 stages", "3 layers", "pipeline=2"):
        assign((3,), (1,), 4, 1)
    with raises_saying(
        LayoutError, "2 stages of 2 chunks has 4 virtual stages", "3 groups of layers", "1 chunk a stage"
    ):
        assign((3,), (2,), 2, 2)
    with raises_saying(LayoutError, "only 1 group of layers;"):
        assign((1,), (2,), 2, 1)
