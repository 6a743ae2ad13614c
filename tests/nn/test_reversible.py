"""Reversible runs: the gradients of autodiff, in memory that does not grow with depth."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import config
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Context, MemoryPolicy, ReversibleRun, Run
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.layouts import QUICKLY, assert_layouts_agree, random_batch
from tests.truth.long import short
from tests.truth.params import random_params

Small = functools.partial(
    TransformerConfig, depth=3, vocab=40, width=32, heads=4, head_dim=8, hidden=48, stack=ReversibleRun
)


def _by_hand(model, tokens, segment_ids, key):
    """The two streams of Gomez et al. (2017), layer by layer, for autodiff."""
    c = model.config
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    rotary = {c.positions: c.positions.tables(place, c.sizes.head_dim)}
    context = Context(segment_ids=segment_ids, rotary=rotary, key=key)
    a = b = model.embed(tokens).astype(jnp.float32)
    layer = 0
    for run in model.runs:
        for i in range(run.repeats):
            for block in jax.tree.map(lambda x, i=i: x[i], list(run.blocks)):
                a = a + block.attend(b, context.at(layer))[0]
                b = b + block.feed(a, context.at(layer))[0]
                layer += 1
    return model.norm(((a + b) / 2).astype(c.dtype))


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    # bfloat16 rounds a layer's output, and reconstruction computes it from inputs that differ in the last bits
    short(
        1,
        [
            ({"windows": (3, None), "dropout": 0.2}, 1e-5),
            ({"scan": False, "depth": 2}, 1e-5),
            ({"dtype": "bfloat16"}, 2e-2),
        ],
    ),
    ids=["a pattern, dropout", "unrolled", "bfloat16"],
)
def test_gradients_are_those_of_autodiff(changes, tolerance):
    graphdef, infos = describe_model(Small(**changes))
    params, batch = random_params(infos), random_batch(40, rows=2, seq=10, lengths=(6, 4))
    tokens, segments, key = batch["tokens"], batch["segment_ids"], jax.random.key(1)
    weights = np.random.default_rng(0).normal(size=(2, 10, 32)).astype(np.float32)

    def reversed_(params):
        return jnp.sum(nnx.merge(graphdef, params).hidden(tokens, segment_ids=segments, key=key) * weights)

    def plain(params):
        return jnp.sum(_by_hand(nnx.merge(graphdef, params), tokens, segments, key) * weights)

    got, want = (jax.jit(jax.value_and_grad(f)).lower(params).compile(QUICKLY)(params) for f in (reversed_, plain))
    assert_leaves_agree(got[0], want[0], tolerance=tolerance, what="value")
    assert_leaves_agree(got[1], want[1], tolerance=tolerance, what="gradients")


def test_it_trains_alike_on_a_mixed_layout():
    batch = random_batch(40, rows=4, seq=8)
    assert_layouts_agree(Small(depth=2), [Layout("fsdp=2,tensor=2")], batch=batch, steps=1)


def _temporary_bytes(depth, **changes):
    graphdef, infos = describe_model(Small(depth=depth, **changes))
    params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
    f = jax.grad(lambda p, t: jnp.sum(nnx.merge(graphdef, p).hidden(t)))
    compiled = jax.jit(f).lower(params, jax.ShapeDtypeStruct((4, 64), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_memory_is_flat_in_depth():
    depths = (2, 4, 8, 16)
    stream = 4 * 64 * 32 * 4  # bytes of one residual stream
    flat = [_temporary_bytes(d) for d in depths]
    assert max(flat) - min(flat) < 0.05 * stream, flat
    full = [_temporary_bytes(d, stack=Run, memory="full") for d in depths[:2]]
    assert full[1] - full[0] >= 2 * stream, full


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"parallel": True}, ("parallel = False",)), ({"memory": "full"}, ("memory = 'none'",))],
    ids=["parallel", "policy"],
)
def test_what_cannot_be_reversed_is_one_sentence(changes, words):
    with raises_saying(ConfigError, "ReversibleRun", *words):
        describe_model(Small(**changes))


def test_tiles_go_with_it():
    describe_model(Small(memory=MemoryPolicy(rest="keep", tile=("mlp_hidden",))))


def test_gin_chooses_it():
    config.load(bindings=["Transformer.stack = @ReversibleRun"])
    model = config.call("Transformer")
    assert model.stack is ReversibleRun
    assert "Transformer.stack = @ReversibleRun" in config.dumps("Transformer", {"stack": model.stack})
