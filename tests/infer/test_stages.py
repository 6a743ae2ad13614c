"""Generation over pipeline stages gives what one device gives."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import LayoutError
from jaxscale.infer.cache import Contiguous, Paged, cache_bytes, generating, init_cache
from jaxscale.infer.forward import forward, logits_at, one_per_batch_row
from jaxscale.infer.stages import micro_batches, on_stages
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, PerLayer
from jaxscale.step.state import describe_model
from tests.truth.params import random_params

BATCH, LENGTH = 4, 12
DENSE = TransformerConfig(depth=4, vocab=64, width=32, heads=4, kv_heads=1, hidden=64, windows=(5, None))
# a run of one layer and one of two: neither divides over two stages
UNEVEN = TransformerConfig(
    depth=3, vocab=64, width=32, heads=4, hidden=64, mlp=MixtureOfExperts(experts=4, top_k=2), dense_layers=1
)
INPUTS = dataclasses.replace(DENSE, depth=3, windows=(None,), per_layer=PerLayer(8, scaled=True))
TOKENS = np.random.default_rng(0).integers(1, 64, (BATCH, LENGTH)).astype(np.int32)
CASES = {
    "pipeline": (DENSE, "pipeline=2", Contiguous()),
    "with tensor and data": (DENSE, "data=2,tensor=2,pipeline=2", Paged(page=4)),
    "uneven, with experts": (UNEVEN, "expert=2,pipeline=2", Contiguous()),
    "uneven, with inputs of each layer": (INPUTS, "pipeline=2", Contiguous()),
}
LONG = ("pipeline", "with tensor and data", "uneven, with inputs of each layer")


def _logits(config, layout, cache):
    """The logits of every token, from steps of five and of one, sequences at different positions."""
    graphdef, infos = describe_model(config)
    params = jax.device_put(random_params(infos), shardings_of(infos, layout))
    params = on_stages(graphdef, params, infos, layout)
    per = cache.per_slot(LENGTH) if isinstance(cache, Paged) else 0
    tables = jnp.broadcast_to(jnp.arange(per, dtype=jnp.int32), (BATCH, per)) if per else None
    with layout:
        states = init_cache(nnx.merge(graphdef, infos), cache, BATCH, 1, LENGTH)

        @functools.partial(jax.jit, static_argnames="width")
        def run(params, states, tokens, starts, counts, width):
            model = nnx.merge(graphdef, params)
            hidden, states = forward(model, tokens, one_per_batch_row(starts, counts, width, tables), cache, states)
            return logits_at(model, hidden, jnp.broadcast_to(jnp.arange(width), tokens.shape)), states

        out, starts = np.zeros((BATCH, LENGTH, 64), np.float32), np.zeros(BATCH, np.int32)
        while starts.min() < LENGTH:
            width = 5 if starts.max() < 8 else 1
            counts = np.minimum(np.maximum(1, width - np.arange(BATCH) % 3), LENGTH - starts).astype(np.int32)
            chunk = np.zeros((BATCH, width), np.int32)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                chunk[b, :n] = TOKENS[b, start : start + n]
            logits, states = run(params, states, chunk, starts, counts, width)
            for b, (start, n) in enumerate(zip(starts, counts, strict=True)):
                out[b, start : start + n] = logits[b, :n]
            starts = starts + counts
    return out, states


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.long] * (c in LONG)) for c in CASES])
def test_stages_give_what_one_device_gives(case):
    config, mesh, cache = CASES[case]
    logits, _ = _logits(config, generating(Layout(mesh)), cache)
    graphdef, infos = describe_model(config)
    whole = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(random_params(infos), TOKENS)
    np.testing.assert_allclose(logits, np.asarray(whole), atol=2e-5, rtol=1e-4)


def test_each_stage_keeps_its_own_layers_cache_and_weights():
    layout = generating(Layout("pipeline=2"))
    graphdef, infos = describe_model(DENSE)
    model = nnx.merge(graphdef, infos)
    with layout:
        states = init_cache(model, Contiguous(), BATCH, 1, LENGTH)
        whole = cache_bytes(model, Contiguous(), BATCH, 1, LENGTH)
    for device in layout.device_mesh.devices.flat:
        nbytes = sum(s.data.nbytes for x in jax.tree.leaves(states) for s in x.addressable_shards if s.device == device)
        assert nbytes == whole // 2
    assert whole == BATCH * LENGTH * DENSE.depth * 2 * DENSE.kv_heads * 8 * 4  # nothing is stored twice


def test_weights_stay_on_their_stages_while_a_step_runs():
    layout, cache = generating(Layout("pipeline=2")), Contiguous()
    graphdef, infos = describe_model(DENSE)
    with layout:
        states = jax.eval_shape(lambda: init_cache(nnx.merge(graphdef, infos), cache, BATCH, 1, LENGTH))

        def run(params, states, tokens, starts):
            step = one_per_batch_row(starts, jnp.ones_like(starts), 1)
            return forward(nnx.merge(graphdef, params), tokens, step, cache, states)

        shapes = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        inputs = shapes, states, jax.ShapeDtypeStruct((BATCH, 1), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
        compiled = jax.jit(run, in_shardings=(shardings_of(infos, layout), None, None, None)).lower(*inputs).compile()
    kernel = 32 * 64  # of the smallest matrix of a feed-forward layer
    collectives = [line for line in compiled.as_text().splitlines() if " all-gather(" in line or " all-to-all(" in line]
    shapes_of_kernel = f"[{kernel}", "32,64]", "64,32]"
    assert not [line for line in collectives if any(shape in line for shape in shapes_of_kernel)], collectives


def test_batch_rows_are_split_into_as_many_micro_batches_as_divide():
    layout = Layout("data=2,pipeline=4")
    assert [micro_batches(n, layout) for n in (2, 4, 6, 8, 12, 16)] == [1, 2, 3, 4, 3, 4]
    with pytest.raises(LayoutError, match="3 batch rows do not divide over the 2 devices"):
        micro_batches(3, layout)


def test_parameters_that_are_not_on_their_stages_are_rejected():
    layout, cache = generating(Layout("expert=2,pipeline=2")), Contiguous()
    graphdef, infos = describe_model(UNEVEN)
    params = jax.device_put(random_params(infos), shardings_of(infos, layout))
    with layout, pytest.raises(LayoutError, match="on_stages"):
        states = init_cache(nnx.merge(graphdef, infos), cache, BATCH, 1, LENGTH)
        step = one_per_batch_row(jnp.zeros(BATCH, jnp.int32), jnp.ones(BATCH, jnp.int32), 1)
        jax.eval_shape(lambda p: forward(nnx.merge(graphdef, p), TOKENS[:, :1], step, cache, states), params)
