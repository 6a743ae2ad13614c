"""Attention sinks: a learned score per head in the softmax's denominator, with every kernel and with caches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import (
    Context,
    GatherAttention,
    RingAttention,
    SigmoidAttention,
    SinkMultiHead,
    TokenRingAttention,
    UlyssesAttention,
    dot_product_attention,
    flash_attention,
)
from jaxscale.testing import check_mixer
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, random_batch

WIDTH, HEADS, KV_HEADS, DIM, SEQ = 12, 4, 2, 6, 7
SMALL = TransformerConfig(
    depth=1, width=16, heads=4, kv_heads=2, head_dim=4, vocab=32, hidden=16, attention_layer=SinkMultiHead()
)


def _layer(kernel):
    layer = SinkMultiHead()(WIDTH, HEADS, KV_HEADS, DIM, kernel=kernel, window=5, rngs=nnx.Rngs(0))
    layer.sinks.set_value(jnp.asarray([-1.0, 0.5, 2.0, 0.0]))
    return layer, np.random.default_rng(0).normal(size=(1, SEQ, WIDTH)).astype(np.float32)


def _numpy(q, k, v, sinks, out):
    """One more column of scores, whose weight is dropped after the softmax; all float64."""
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("shd,thd->hst", q, k) * DIM**-0.5
    away = np.arange(SEQ)[:, None] - np.arange(SEQ)
    scores = np.where((away >= 0) & (away < 5), scores, -np.inf)
    scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (HEADS, SEQ, 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    return np.tensordot(np.einsum("hst,thd->shd", weights, v), out, 2)


@pytest.mark.parametrize("kernel", [dot_product_attention, flash_attention])
def test_a_sink_is_one_more_score_of_the_softmax_with_a_value_of_zero(kernel):
    layer, x = _layer(kernel)
    q, k, v = (np.tensordot(x[0], np.float64(m.kernel.get_value()), 1) for m in (layer.q, layer.k, layer.v))
    out, sinks = (np.float64(m.get_value()) for m in (layer.out.kernel, layer.sinks))
    np.testing.assert_allclose(layer(x, Context(None, None, {}))[0], _numpy(q, k, v, sinks, out), atol=1e-5)

    graphdef, params = nnx.split(layer)
    loss = lambda p: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(x, Context(None, None, {}))))  # noqa: E731
    got = jax.jit(jax.grad(loss))(params).sinks.get_value()
    for h in range(HEADS):
        step = 1e-5 * np.eye(HEADS)[h]
        up, down = (np.sin(_numpy(q, k, v, sinks + s, out)).sum() for s in (step, -step))
        np.testing.assert_allclose(got[h], (up - down) / 2e-5, rtol=1e-3, atol=1e-5)


CUT = {
    Layout("context=2,tensor=2"): RingAttention(),
    Layout("context=4"): TokenRingAttention(),
    Layout("context=2,fsdp=2"): GatherAttention(),
    Layout("context=2,data=2"): UlyssesAttention(),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [layout if i == 0 else pytest.param(layout, marks=pytest.mark.long) for i, layout in enumerate(CUT)]
)
def test_sinks_train_alike_where_the_sequence_is_sharded(layout):
    config = dataclasses.replace(SMALL, attention=CUT[layout], windows=(6,))
    assert_layouts_agree(config, [layout], batch=random_batch(32, rows=4, seq=16, lengths=(7, 2, 4)))


@pytest.mark.long
def test_sinks_keep_documents_apart_and_decode():
    check_mixer(SinkMultiHead(), kv_heads=2)


def test_a_kernel_without_a_softmax_is_refused():
    with raises_saying(ConfigError, "Transformer.attention = SigmoidAttention", "log-sum-exp", "use flash_attention"):
        dataclasses.replace(SMALL, attention=SigmoidAttention(16))
    assert dataclasses.replace(SMALL, attention=flash_attention).param_count() == SMALL.param_count()
