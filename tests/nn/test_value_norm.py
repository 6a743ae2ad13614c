"""Attention with normalised values and heads that differ by layer, and layers that read the keys of others."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    Context,
    CrossDecoderAttention,
    GeGLU,
    PerLayer,
    ProportionalScaling,
    QKNorm,
    Rotary,
    TimesWider,
    ValueNormMultiHead,
    dot_product_attention,
)
from jaxscale.testing import check_model, compare_layouts
from tests.truth import numpy_transformer as truth
from tests.truth.errors import raises_saying

WIDTH, HEADS, SEQ = 12, 4, 7
WHOLE, NEAR = BlockConfig(ValueNormMultiHead(8, 1, keys_as_values=True)), BlockConfig(window=4)
COMMON = dict(
    vocab=60,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=4,
    hidden=32,
    mlp=GeGLU,
    positions=Rotary(1e6, ProportionalScaling(0.5)),
    local_positions=Rotary(),
    attention_layer=ValueNormMultiHead(),
    attention_scale=1.0,
    qk_norm=QKNorm(),
    post_norm=True,
)
"""Gemma 4, in small."""
READERS = (
    BlockConfig(CrossDecoderAttention(same_window=True), TimesWider(GeGLU, 2), 4),
    BlockConfig(CrossDecoderAttention(8, same_window=True), TimesWider(GeGLU, 2)),
)
LENDER = BlockConfig(ValueNormMultiHead(lends=True), window=4)
SHARING = TransformerConfig(
    **COMMON, depth=5, blocks=(NEAR, LENDER, WHOLE, *READERS), per_layer=PerLayer(8, scaled=True)
)


@pytest.mark.parametrize("same", [False, True])
def test_values_are_divided_by_their_root_mean_square_and_may_be_the_keys(same):
    layer = ValueNormMultiHead(6, 2, keys_as_values=same)(
        WIDTH, HEADS, 4, 4, kernel=dot_product_attention, qk_norm=QKNorm(), scale=1.0, norm_eps=0.01, rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(0).normal(size=(1, SEQ, WIDTH)).astype(np.float32)
    q, k = (np.tensordot(x[0], np.float64(m.kernel.get_value()), 1) for m in (layer.q, layer.k))
    v = k if same else np.tensordot(x[0], np.float64(layer.v.kernel.get_value()), 1)
    assert q.shape == (SEQ, 4, 6) and k.shape == (SEQ, 2, 6)
    q, k, v = (y / np.sqrt((y**2).mean(-1, keepdims=True) + 0.01) for y in (q, k, v))
    want = np.tensordot(truth.attention(q * 6**0.5, k, v), np.float64(layer.out.kernel.get_value()), 2)
    np.testing.assert_allclose(layer(x, Context())[0], want, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("sharing", [False, True])
def test_a_stack_keeps_documents_apart_and_decodes(sharing):
    config = SHARING if sharing else TransformerConfig(**COMMON, depth=4, blocks=(NEAR, WHOLE))
    assert "Decodable" in check_model(config)


@pytest.mark.long
def test_layouts_and_pipelines_train_alike():
    compare_layouts(SHARING, [js.Layout("fsdp=2,tensor=2,context=2")]).check()
    layered = TransformerConfig(**COMMON, depth=4, blocks=(NEAR, WHOLE), per_layer=PerLayer(8, scaled=True))
    compare_layouts(layered, [js.Layout("data=2,tensor=2,pipeline=2")]).check()


def test_the_heads_of_each_layer_count():
    same, own = (
        TransformerConfig(**COMMON, depth=2, blocks=(NEAR, BlockConfig(ValueNormMultiHead(8, 1, keys_as_values=k))))
        for k in (True, False)
    )
    assert own.param_count() - same.param_count() == 32 * 8
    assert own.flops(2, 8, training=False) - same.flops(2, 8, training=False) == 2 * 2 * 8 * 32 * 8
    assert same.runs == (((4, None), 1),)


def test_what_does_not_fit_together_is_refused():
    def of(*blocks, **changes):
        return TransformerConfig(**COMMON | {"depth": len(blocks), "blocks": blocks} | changes)

    with raises_saying(ConfigError, "make it even"):
        ValueNormMultiHead(7)
    with raises_saying(ConfigError, "ValueNormMultiHead.kv_heads = 3 does not divide heads = 4; the nearest", "is 2"):
        of(NEAR, BlockConfig(ValueNormMultiHead(kv_heads=3)))
    with raises_saying(ConfigError, "layers with heads of the widths [4, 8]; give those with a window"):
        of(NEAR, WHOLE, local_positions=None)
    with raises_saying(
        ConfigError, "block 2", "width 4", "block 1, of width 8; set CrossDecoderAttention.head_dim = 8"
    ):
        of(NEAR, WHOLE, BlockConfig(CrossDecoderAttention(same_window=True)))
    with raises_saying(ConfigError, "block 1", "with the window 4, and there is none"):
        of(WHOLE, READERS[0])
    with raises_saying(ConfigError, "ValueNormMultiHead has its own widths"):
        of(NEAR, WHOLE).at_width(64)
