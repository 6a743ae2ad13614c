"""Compressed convolutional attention against NumPy and against ZAYA1 in `transformers`; caches and layouts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import CCA, Context, KeyValues, Rotary
from jaxscale.testing import check_mixer, compare_layouts

H, K, D = 4, 2, 4
X = np.random.default_rng(0).normal(size=(1, 9, 6)).astype(np.float32)


def layer_of(**fields):
    return CCA(**fields)(6, H, K, D, rngs=nnx.Rngs(0))


def values_of(module):
    return np.float64(module.get_value())


def in_numpy(layer, x):
    """The paper's steps for one document, token by token, without positions; (S, E)."""
    q, k, v = (np.einsum("se,ehd->shd", x, values_of(m.kernel)) for m in (layer.q, layer.k, layer.v))

    def convolved(conv, y):
        kernel, mixing = values_of(conv.kernel), values_of(conv.mixing)
        padded = np.concatenate([np.zeros((len(kernel) + len(mixing) - 2, *y.shape[1:])), y])
        once = [
            sum(w * padded[t + i] for i, w in enumerate(kernel)) + values_of(conv.bias)
            for t in range(len(padded) - len(kernel) + 1)
        ]
        out = [
            sum(np.einsum("hd,hde->he", once[t + i], w) for i, w in enumerate(mixing)) + values_of(conv.mixing_bias)
            for t in range(len(y))
        ]
        return np.stack(out)

    q_mean = (q + np.repeat(k, H // K, axis=1)) / 2
    k_mean = q_mean.reshape(-1, K, H // K, D).mean(2)
    q, k = convolved(layer.q_conv, q) + q_mean, convolved(layer.k_conv, k) + k_mean
    q, k = (2 * y / np.linalg.norm(y, axis=-1, keepdims=True) for y in (q, k))
    k = k * values_of(layer.key_scale)[:, None]
    before = np.concatenate([np.zeros_like(v[:1]), v[:-1]])
    v = np.concatenate([v[:, : K // 2], before[:, K // 2 :]], axis=1)  # half of the heads see the previous token
    out = np.zeros_like(q)
    for t in range(len(x)):
        for h in range(H):
            scores = k[: t + 1, h // 2] @ q[t, h] / 2
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[: t + 1, h // 2]
    return np.einsum("shd,hde->se", out, values_of(layer.out.kernel))


def test_documents_of_a_packed_row_equal_the_papers_steps():
    layer = layer_of(taps=3)
    layer.key_scale[...] = jnp.array([0.5, 1.5])
    segments = np.array([[1] * 5 + [2] * 3 + [0]], np.int32)
    got = jax.jit(lambda x, ids: layer(x, Context(segment_ids=ids)))(X, segments)
    want = [in_numpy(layer, np.float64(X[0, part])) for part in (slice(0, 5), slice(5, 8))]
    np.testing.assert_allclose(got[0, :8], np.concatenate(want), atol=1e-5)


def test_a_cache_is_the_narrow_keys_and_a_tail_of_constant_size():
    state, keys = layer_of().decode_state, KeyValues(K, D, D, jnp.float32)
    for numbers in (None, "int8"):
        cache = Contiguous(numbers)
        tails = {state.bytes(cache, 1, 1, 1, n, 0) - cache.bytes(keys, 1, 1, 1, n) for n in (8, 4096)}
        assert tails == {4 * (2 * H * D + 2 * K * D + K * D)}


@pytest.mark.torch
def test_it_equals_zaya():
    torch, zaya = pytest.importorskip("torch"), pytest.importorskip("transformers.models.zaya.modeling_zaya")
    from transformers import ZayaConfig

    sizes = dict(hidden_size=6, num_attention_heads=H, num_key_value_heads=K, head_dim=D, num_hidden_layers=1)
    config = ZayaConfig(**sizes, vocab_size=8, moe_intermediate_size=4, num_experts=2, router_hidden_size=4)
    config._attn_implementation = "eager"
    theirs, layer = zaya.ZayaAttention(config, 0), layer_of()

    def as_torch(x, *shape):
        return torch.tensor(np.array(x, np.float32)).reshape(*shape)

    with torch.no_grad():
        theirs.qk_norm.temp.copy_(as_torch([0.5, 1.5], K))
        layer.key_scale[...] = jnp.array([0.5, 1.5])
        of = theirs.qkv_proj
        v = values_of(layer.v.kernel).reshape(6, -1).T
        for linear, matrix in (
            (of.q_proj, values_of(layer.q.kernel).reshape(6, -1).T),
            (of.k_proj, values_of(layer.k.kernel).reshape(6, -1).T),
            (of.v_proj_current, v[: K * D // 2]),
            (of.v_proj_delayed, v[K * D // 2 :]),
            (theirs.o_proj, values_of(layer.out.kernel).reshape(-1, 6).T),
        ):
            linear.weight.copy_(as_torch(matrix, *matrix.shape))
        convs = layer.q_conv, layer.k_conv
        kernel = np.concatenate([values_of(c.kernel) for c in convs], 1)  # (taps, heads, D)
        mixing = np.concatenate([values_of(c.mixing) for c in convs], 1)  # (taps, heads, in, out)
        of.conv_qk_depthwise.weight.copy_(as_torch(kernel.reshape(2, -1).T, -1, 1, 2))
        of.conv_qk_grouped.weight.copy_(as_torch(mixing.transpose(1, 3, 2, 0), -1, D, 2))
        of.conv_qk_depthwise.bias.copy_(as_torch(np.concatenate([values_of(c.bias) for c in convs]), -1))
        of.conv_qk_grouped.bias.copy_(as_torch(np.concatenate([values_of(c.mixing_bias) for c in convs]), -1))
        mask = torch.full((9, 9), -1e30).triu(1)[None, None]
        flat = torch.ones(1, 9, D), torch.zeros(1, 9, D)  # no rotation
        want, _ = theirs(torch.tensor(X), attention_mask={"causal": mask}, position_embeddings=flat)
    np.testing.assert_allclose(layer(X, Context()), want, atol=1e-5)


@pytest.mark.long
def test_it_keeps_documents_apart_and_decodes_after_going_back():
    check_mixer(CCA(taps=3), positions=Rotary(), kv_heads=2)


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    sizes = dict(depth=1, vocab=32, width=16, heads=4, kv_heads=2, head_dim=2, hidden=16, positions=Rotary())
    config = TransformerConfig(**sizes, attention_layer=CCA())
    zigzag = dataclasses.replace(config, attention=js.nn.RingAttention())
    for each in (config, zigzag):
        compare_layouts(each, [js.Layout("data=2,tensor=2,context=2")]).check()


def test_what_it_does_itself_is_refused():
    with pytest.raises(ConfigError, match="Transformer.qk_norm has no place in CCA"):
        TransformerConfig(attention_layer=CCA(), qk_norm=True)
    with pytest.raises(ConfigError, match="CCA.taps = 0: must be a whole number of at least 1"):
        CCA(taps=0)
    TransformerConfig(blocks=(BlockConfig(CCA()),))
