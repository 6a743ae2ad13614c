"""HSTU's pointwise attention against float64 NumPy, with caches, and on layouts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import HSTU, Bidirectional, Context
from jaxscale.parallel import pointwise_attention as module
from jaxscale.testing import check_mixer, compare_layouts
from tests.truth.paged_texts import in_sharded_pages

OPTIONS = dict(norm_eps=1e-6, out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)
BIAS = [0.5, -1.0, 2.0]


def silu(x):
    return x / (1 + np.exp(-x))


def in_numpy(layer, x):
    """The paper's equations for one document, pair by pair; (S, E)."""
    q, k, v, u = (
        silu(np.einsum("se,ehd->shd", x, np.float64(m.kernel.get_value())))
        for m in (layer.q, layer.k, layer.v, layer.gate)
    )
    out = np.zeros_like(v)
    for t in range(len(x)):
        for s in range(t + 1):
            score = np.sum(q[t] * k[s], -1) + BIAS[min(t - s, 2)]
            out[t] += silu(score)[:, None] / 7 * v[s]
    flat = out.reshape(len(x), -1)
    flat = (flat - flat.mean(-1, keepdims=True)) / np.sqrt(flat.var(-1, keepdims=True) + 1e-6)
    return np.einsum("shd,hde->se", flat.reshape(out.shape) * u, np.float64(layer.out.kernel.get_value()))


def test_documents_of_a_packed_row_equal_the_papers_formulas(monkeypatch):
    monkeypatch.setattr(module, "TILE", 4)  # three tiles of queries, the last one padded
    x = np.random.default_rng(0).normal(size=(1, 9, 6)).astype(np.float32)
    layer = HSTU(length=7, relative=3, value_dim=3)(6, 2, 2, 4, rngs=nnx.Rngs(0), **OPTIONS)
    layer.bias[...] = jnp.array(BIAS)
    segments = np.array([[1] * 5 + [2] * 3 + [0]], np.int32)
    got = jax.jit(lambda x, ids: layer(x, Context(segment_ids=ids)))(x, segments)
    want = [in_numpy(layer, np.float64(x[0, part])) for part in (slice(0, 5), slice(5, 8))]
    np.testing.assert_allclose(got[0, :8], np.concatenate(want), atol=1e-5)


@pytest.mark.long
def test_it_keeps_documents_apart_and_decodes_after_going_back():
    check_mixer(HSTU(length=16, relative=4))


@pytest.mark.long
@pytest.mark.parametrize("numbers,atol", [(None, 1e-5), ("int8", 0.1)])
def test_sharded_pages_give_what_a_pass_over_the_whole_text_gives(numbers, atol):
    sizes = dict(depth=1, vocab=32, width=16, heads=2, hidden=16)
    model = TransformerConfig(**sizes, blocks=(BlockConfig(HSTU(length=8)),)).make(nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 12), dtype=np.int32)
    np.testing.assert_allclose(in_sharded_pages(model, tokens, numbers), jax.jit(model.hidden)(tokens), atol=atol)


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    config = TransformerConfig(
        depth=1, vocab=32, width=16, heads=2, hidden=16, blocks=(BlockConfig(HSTU(length=16, relative=4)),)
    )
    zigzag = dataclasses.replace(config, attention=js.nn.RingAttention())
    for each in (config, zigzag):
        compare_layouts(each, [js.Layout("data=2,tensor=2,context=2")]).check()


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="HSTU.length = 0: must be a whole number of at least 1"):
        HSTU(length=0)
    with pytest.raises(ConfigError, match="HSTU is causal, and Transformer.attention is not"):
        TransformerConfig(attention=Bidirectional(), blocks=(BlockConfig(HSTU(length=8)),))
