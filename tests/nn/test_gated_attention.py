"""Gated attention: heads' outputs are multiplied by a sigmoid of the layer's input."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.nn import Context, GatedMultiHead, MultiHead, dot_product_attention
from jaxscale.testing import check_mixer, compare_layouts
from tests.truth import numpy_transformer as truth

WIDTH, HEADS, KV_HEADS, DIM, SEQ = 12, 4, 2, 6, 7


@pytest.mark.parametrize("by_head", [False, True])
def test_gated_attention_equals_float64_numpy(by_head):
    layer = GatedMultiHead(by_head=by_head)(WIDTH, HEADS, KV_HEADS, DIM, kernel=dot_product_attention, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, SEQ, WIDTH)).astype(np.float32)
    got = layer(x, Context(None, None, {}))
    q, k, v, gate = (
        np.tensordot(x[0], np.float64(m.kernel.get_value()), 1) for m in (layer.q, layer.k, layer.v, layer.gate)
    )
    assert gate.shape == ((SEQ, HEADS) if by_head else (SEQ, HEADS, DIM))
    opened = 1 / (1 + np.exp(-(gate[..., None] if by_head else gate)))
    want = np.tensordot(truth.attention(q, k, v) * opened, np.float64(layer.out.kernel.get_value()), 2)
    np.testing.assert_allclose(got[0], want, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("by_head", [False, True])
def test_gated_attention_keeps_documents_apart_and_decodes(by_head):
    check_mixer(GatedMultiHead(by_head=by_head), kv_heads=2)


@pytest.mark.parametrize("by_head", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gated_attention_trains_alike_on_every_layout(by_head):
    config = js.models.Transformer.Config(
        depth=1, width=16, heads=4, kv_heads=2, head_dim=4, vocab=32, hidden=16, attention_layer=GatedMultiHead(by_head)
    )
    compare_layouts(config, [js.Layout("data=2,fsdp=2,tensor=2")]).check()


def test_the_gates_count_as_parameters_and_flops():
    plain, gated, by_head = (
        js.models.Transformer.Config(depth=1, width=32, heads=4, attention_layer=layer)
        for layer in (MultiHead(), GatedMultiHead(), GatedMultiHead(by_head=True))
    )
    for config, more in ((gated, 32 * 32), (by_head, 32 * 4)):
        assert config.param_count() - plain.param_count() == more
        assert config.flops(2, 8, training=False) - plain.flops(2, 8, training=False) == 2 * 2 * 8 * more


def test_a_gate_by_head_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ConfigError, match="GatedMultiHead.by_head = 3: must be True or False"):
        GatedMultiHead(by_head=3)
