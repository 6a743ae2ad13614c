"""Layers on pipeline stages, lanes in turns: what a model says is what it says on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.infer.cache import Contiguous, Paged, cache_bytes, generating, init_cache
from jaxscale.infer.forward import forward, logits_at, one_row_a_lane
from jaxscale.infer.stages import on_stages, turns
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts
from jaxscale.step.state import describe_model
from tests.truth.params import random_params

LANES, LENGTH = 4, 12
DENSE = TransformerConfig(depth=4, vocab=64, width=32, heads=4, kv_heads=1, hidden=64, windows=(5, None))
# a run of one layer and one of two: neither divides over two stages
UNEVEN = TransformerConfig(
    depth=3, vocab=64, width=32, heads=4, hidden=64, mlp=MixtureOfExperts(experts=4, top_k=2), dense_layers=1
)
TOKENS = np.random.default_rng(0).integers(1, 64, (LANES, LENGTH)).astype(np.int32)
CASES = {
    "pipeline": (DENSE, "pipeline=2", Contiguous()),
    "with tensor and data": (DENSE, "data=2,tensor=2,pipeline=2", Paged(page=4)),
    "uneven, with experts": (UNEVEN, "expert=2,pipeline=2", Contiguous()),
}


def _said(config, layout, how):
    """The logits of every token, by steps of five and of one, lanes at places of their own."""
    graphdef, infos = describe_model(config)
    params = jax.device_put(random_params(infos), shardings_of(infos, layout))
    params = on_stages(graphdef, params, infos, layout)
    per = how.per_row(LENGTH) if isinstance(how, Paged) else 0
    tables = jnp.broadcast_to(jnp.arange(per, dtype=jnp.int32), (LANES, per)) if per else None
    with layout:
        states = init_cache(nnx.merge(graphdef, infos), how, LANES, 1, LENGTH)

        @functools.partial(jax.jit, static_argnames="width")
        def run(params, states, tokens, starts, counts, width):
            model = nnx.merge(graphdef, params)
            hidden, states = forward(model, tokens, one_row_a_lane(starts, counts, width, tables), how, states)
            return logits_at(model, hidden, jnp.broadcast_to(jnp.arange(width), tokens.shape)), states

        out, starts = np.zeros((LANES, LENGTH, 64), np.float32), np.zeros(LANES, np.int32)
        while starts.min() < LENGTH:
            width = 5 if starts.max() < 8 else 1
            counts = np.minimum(np.maximum(1, width - np.arange(LANES) % 3), LENGTH - starts).astype(np.int32)
            chunk = np.zeros((LANES, width), np.int32)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                chunk[b, :n] = TOKENS[b, start : start + n]
            logits, states = run(params, states, chunk, starts, counts, width)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                out[b, start : start + n] = logits[b, :n]
            starts = starts + counts
    return out, states


@pytest.mark.parametrize("case", [pytest.param("pipeline", marks=pytest.mark.long), *list(CASES)[1:]])
def test_stages_say_what_one_device_says(case):
    config, mesh, how = CASES[case]
    said, _ = _said(config, generating(Layout(mesh)), how)
    graphdef, infos = describe_model(config)
    whole = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(random_params(infos), TOKENS)
    np.testing.assert_allclose(said, np.asarray(whole), atol=2e-5, rtol=1e-4)


def test_each_stage_keeps_its_own_layers_cache_and_weights():
    layout = generating(Layout("pipeline=2"))
    graphdef, infos = describe_model(DENSE)
    model = nnx.merge(graphdef, infos)
    with layout:
        states = init_cache(model, Contiguous(), LANES, 1, LENGTH)
        whole = cache_bytes(model, Contiguous(), LANES, 1, LENGTH)
    for device in layout.device_mesh.devices.flat:
        held = sum(s.data.nbytes for x in jax.tree.leaves(states) for s in x.addressable_shards if s.device == device)
        assert held == whole // 2
    assert whole == LANES * LENGTH * DENSE.depth * 2 * DENSE.kv_heads * 8 * 4  # nothing is kept twice


def test_weights_stay_on_their_stages_while_a_step_runs():
    layout, how = generating(Layout("pipeline=2")), Contiguous()
    graphdef, infos = describe_model(DENSE)
    with layout:
        states = jax.eval_shape(lambda: init_cache(nnx.merge(graphdef, infos), how, LANES, 1, LENGTH))

        def run(params, states, tokens, starts):
            step = one_row_a_lane(starts, jnp.ones_like(starts), 1)
            return forward(nnx.merge(graphdef, params), tokens, step, how, states)

        shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        given = shapes, states, jax.ShapeDtypeStruct((LANES, 1), jnp.int32), jax.ShapeDtypeStruct((LANES,), jnp.int32)
        text = jax.jit(run, in_shardings=(shardings_of(infos, layout), None, None, None)).lower(*given).compile()
    kernel = 32 * 64  # of the smallest matrix of a feed-forward layer
    moved = [line for line in text.as_text().splitlines() if " all-gather(" in line or " all-to-all(" in line]
    assert not [line for line in moved if f"[{kernel}" in line or "32,64]" in line or "64,32]" in line], moved


def test_a_step_takes_as_many_turns_as_its_lanes_allow():
    layout = Layout("data=2,pipeline=4")
    assert [turns(n, layout) for n in (2, 4, 6, 8, 12, 16)] == [1, 2, 3, 4, 3, 4]
    with pytest.raises(LayoutError, match="3 lanes do not divide over the 2 devices"):
        turns(3, layout)


def test_parameters_that_are_not_on_their_stages_are_refused():
    layout, how = generating(Layout("expert=2,pipeline=2")), Contiguous()
    graphdef, infos = describe_model(UNEVEN)
    params = jax.device_put(random_params(infos), shardings_of(infos, layout))
    with layout, pytest.raises(LayoutError, match="on_stages"):
        states = init_cache(nnx.merge(graphdef, infos), how, LANES, 1, LENGTH)
        step = one_row_a_lane(jnp.zeros(LANES, jnp.int32), jnp.ones(LANES, jnp.int32), 1)
        jax.eval_shape(lambda p: forward(nnx.merge(graphdef, p), TOKENS[:, :1], step, how, states), params)
