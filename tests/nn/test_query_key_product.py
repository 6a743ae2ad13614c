"""Query and key matrices rounded as one: equal to attention without rounding, NumPy's numbers with it, and refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import Attention, Context, QKNorm, QueryKeyProduct, Rotary, StatsQ, Stored
from tests.truth.errors import raises_saying

WIDTH, HEADS, KV_HEADS, DIM = 16, 4, 2, 8
MODEL = TransformerConfig(
    depth=1, vocab=32, width=WIDTH, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, hidden=32, positions=Learned(16),
    attention_layer=QueryKeyProduct(),
)  # fmt: skip


def layers(weights):
    ours = QueryKeyProduct(weights)(WIDTH, HEADS, KV_HEADS, DIM, rngs=nnx.Rngs(0))
    plain = Attention(WIDTH, HEADS, KV_HEADS, DIM, rngs=nnx.Rngs(0))
    return ours, plain, np.random.default_rng(0).normal(size=(2, 6, WIDTH)).astype(np.float32)


def test_with_fine_numbers_it_is_attention():
    ours, plain, x = layers(Stored("int8"))
    a, b = (np.asarray(m(x, Context(None, None, {}))) for m in (ours, plain))
    assert 0 < np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def test_the_product_of_both_matrices_is_rounded_once():
    ours, _, _ = layers(StatsQ(group=None))
    q, k = (np.float64(m.kernel.get_value()) for m in (ours.q, ours.k))
    both = np.einsum("ehd,fhd->ehf", q, np.repeat(k, HEADS // KV_HEADS, 1))
    # StatsQ of 2 bits, from the paper: (k + 1/2) s for k from -2 to 1, s the mean magnitude of an output's weights
    s = np.abs(both).mean(0, keepdims=True)
    want = (np.clip(np.floor(both / s), -2, 1) + 0.5) * s
    got = np.asarray(ours.product(), np.float64)
    assert np.mean(np.abs(got - want) > 1e-5) < 0.01
    assert len(np.unique(np.round(got[:, 0, 0] / s[0, 0, 0], 3))) <= 4


def test_gradients_pass_the_rounding_and_reach_both_matrices():
    ours, _, _ = layers(StatsQ(group=None))
    by = np.random.default_rng(1).normal(size=(WIDTH, HEADS, WIDTH)).astype(np.float32)
    graphdef, params = nnx.split(ours)
    got = jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p).product() * by))(params)
    q, k = (np.float64(m.kernel.get_value()) for m in (ours.q, ours.k))
    of_q = np.einsum("ehf,fhd->ehd", by, np.repeat(k, HEADS // KV_HEADS, 1))
    of_k = np.einsum("ehf,ehd->fhd", by, q).reshape(WIDTH, KV_HEADS, -1, DIM).sum(2)
    np.testing.assert_allclose(got.q.kernel.get_value(), of_q, atol=1e-4)
    np.testing.assert_allclose(got.k.kernel.get_value(), of_k, atol=1e-4)


def test_it_is_the_same_on_a_layout():
    ours, _, x = layers(Stored("int4", group=8))
    graphdef, params = nnx.split(ours)
    call = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x, Context(None, None, {})))
    alone = np.asarray(call(params, x))
    with Layout("fsdp=2,tensor=2"):
        cut = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x, Context(None, None, {})))(params, x)
    np.testing.assert_allclose(cut, alone, atol=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(positions=Rotary()), ("Transformer.positions = Rotary", "@LearnedPositions()")),
        (dict(qk_norm=QKNorm()), ("Transformer.qk_norm", "MultiHead()")),
        (dict(qkv_bias=True), ("Transformer.qkv_bias = True", "remove it")),
        (dict(overlap=("attention",)), ("Transformer.overlap", "remove it")),
        (dict(attention_layer=QueryKeyProduct(Stored("int4", group=6))), ("a head's product", "group")),
    ],
)
def test_what_stands_between_the_matrices_is_refused(change, words):
    with raises_saying(ConfigError, *words):
        dataclasses.replace(MODEL, **change)


def test_a_kv_cache_is_refused():
    made = nnx.eval_shape(lambda: MODEL.make(nnx.Rngs(0)))
    with raises_saying(ConfigError, "QueryKeyProductAttention cannot generate with a cache"):
        _ = made.runs[0].blocks[0].decode_state
