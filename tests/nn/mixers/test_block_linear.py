"""Block-linear attention against float64 NumPy, by blocks with a cache, and on layouts."""

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
from jaxscale.infer.forward import one_per_batch_row
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Bidirectional, BlockLinear, Context, LayerCache, Rotary
from jaxscale.testing import check_mixer, compare_layouts

OPTIONS = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)
X = np.random.default_rng(0).normal(size=(1, 12, 6)).astype(np.float32)


def layer_of(block, rotary=None):
    return BlockLinear(block=block)(6, 2, 2, 4, rngs=nnx.Rngs(0), rotary=rotary, **OPTIONS)


def rotated(y):
    angles = np.arange(len(y))[:, None, None] * 10000.0 ** -(np.arange(0, 4, 2) / 4)
    a, b = y[..., :2], y[..., 2:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def in_numpy(layer, x, block, rotary=False):
    """The scores of full linear attention, masked by blocks, for one document; (S, E)."""
    q, k, v = (np.einsum("se,ehd->shd", x, np.float64(m.kernel.get_value())) for m in (layer.q, layer.k, layer.v))
    q, k = np.maximum(q, 0), np.maximum(k, 0)
    blocks = np.arange(len(x)) // block
    seen = blocks[:, None] >= blocks
    plain = np.einsum("shd,thd->hst", q, k) * seen
    turned = np.einsum("shd,thd->hst", rotated(q), rotated(k)) * seen if rotary else plain
    out = np.einsum("hst,thd->shd", turned, v) / (plain.sum(-1).T[..., None] + 1e-6)
    return np.einsum("shd,hde->se", out, np.float64(layer.out.kernel.get_value()))


def test_blocks_of_packed_documents_equal_full_linear_attention_masked_by_blocks():
    layer, rotary = layer_of(3, Rotary()), Rotary()
    segments = np.array([[1] * 7 + [2] * 4 + [0]], np.int32)
    places = np.array([[*range(7), *range(4), 11]], np.int32)

    def run(x, segments, places):
        return layer(x, Context(segment_ids=segments, rotary={rotary: rotary.tables(places, 4)}))

    got = jax.jit(run)(X, segments, places)
    want = [in_numpy(layer, np.float64(X[0, part]), 3, True) for part in (slice(0, 7), slice(7, 11))]
    np.testing.assert_allclose(got[0, :11], np.concatenate(want), atol=1e-5)


def test_a_cache_goes_on_by_blocks_in_constant_memory():
    layer, cache, got = layer_of(3), Contiguous(), []
    state = layer.sums.init(cache, 1, 1, 1, 12, 0)

    @jax.jit
    def run(x, step, state):
        held = LayerCache(cache, step, state, jnp.int32(0))
        return layer(x, Context(cache=held, segment_ids=step.slots + 1)), held.state

    for first in (0, 6):  # two blocks a step
        out, state = run(X[:, first : first + 6], one_per_batch_row(jnp.array([first]), jnp.array([6]), 6), state)
        got.append(out)
    np.testing.assert_allclose(np.concatenate(got, 1)[0], in_numpy(layer, np.float64(X[0]), 3), atol=1e-5)
    sizes = {layer.sums.bytes(cache, 1, 1, 1, length, 0) for length in (12, 10**6)}
    assert sizes == {4 * (2 * 4 * 4 + 2 * 4)} == {sum(a.nbytes for a in jax.tree.leaves(state))}


@pytest.mark.long
def test_it_keeps_documents_apart_and_decodes_token_by_token_where_it_is_causal():
    check_mixer(BlockLinear(), positions=Rotary())
    check_mixer(BlockLinear(block=None), attention=Bidirectional())


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    sizes = dict(depth=1, vocab=32, width=16, heads=2, hidden=16, positions=Rotary())
    config = TransformerConfig(**sizes, blocks=(BlockConfig(BlockLinear(block=3)),), attention=Bidirectional())
    zigzag = dataclasses.replace(config, attention=Bidirectional(js.nn.RingAttention()))
    for each in (config, zigzag):
        compare_layouts(each, [js.Layout("data=2,tensor=2,context=2")], objective=js.step.MaskedToken()).check()


def test_blocks_that_see_later_tokens_are_refused_in_a_causal_model():
    def model(**fields):
        return TransformerConfig(blocks=(BlockConfig(BlockLinear(block=4)),), **fields)

    with pytest.raises(ConfigError, match="set Transformer.attention = @Bidirectional"):
        model()
    model(attention=Bidirectional())
    with pytest.raises(ConfigError, match="BlockLinear.block = 0: must be a whole number of at least 1, or None"):
        BlockLinear(block=0)
