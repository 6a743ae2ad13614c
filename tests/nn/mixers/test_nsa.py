"""Native sparse attention against float64 NumPy, with caches, and on layouts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import NSA, Context
from jaxscale.parallel import block_sparse_attention as module
from jaxscale.plan.flops import count
from jaxscale.testing import check_mixer, compare_layouts
from tests.truth.paged_texts import in_sharded_pages

OPTIONS = dict(rotary=None, out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)
SMALL = NSA(block=2, selected=4, window=3)


@functools.cache
def small():
    return SMALL(8, 4, 2, 4, rngs=nnx.Rngs(0), **OPTIONS)


def softmax(x, seen):
    x = np.where(seen, np.exp(x - x.max()), 0)
    return x / max(x.sum(), 1e-300)


def in_numpy(layer, x, mixer, heads, kv_heads, dim):
    """The paper's equations for one document, query by query, with masks over all keys; (S, E)."""

    def weight(p):
        return np.asarray(p.get_value(), np.float64)

    n, block = len(x), mixer.block
    q = np.einsum("se,ehd->shd", x, weight(layer.q.kernel)) / np.sqrt(dim)
    k, v = (np.einsum("se,ehd->shd", x, weight(m.kernel)).reshape(n, kv_heads, 3, dim) for m in (layer.k, layer.v))
    gate = 1 / (1 + np.exp(-np.einsum("se,ehc->shc", x, weight(layer.gate.kernel))))

    def compressed(c, keys):
        blocks = keys[: n // block * block].reshape(-1, block, kv_heads, dim) + weight(c.position)[:, None]
        inner = np.einsum("nlkd,ldh->nkh", blocks, weight(c.hidden))
        return np.einsum("nkh,hd->nkd", inner / (1 + np.exp(-inner)), weight(c.out))

    small = compressed(layer.compress_keys, k[:, :, 0]), compressed(layer.compress_values, v[:, :, 0])
    out, column = np.zeros((n, heads, dim)), np.arange(n)
    for t in range(n):
        done = (t + 1) // block
        for group in range(kv_heads):
            mine = range(group * heads // kv_heads, (group + 1) * heads // kv_heads)
            weights = {h: softmax(small[0][:done, group] @ q[t, h], True) if done else np.zeros(0) for h in mine}
            importance, own = sum(weights.values()), t // block
            always = {0, own - 1, own} & set(range(own + 1))
            others = [j for j in np.argsort(-importance[:own], kind="stable") if j not in always]
            picked = [*always, *others[: mixer.selected - 1 - len(always - {own})]]
            seen = np.isin(column // block, picked) & (column <= t)
            near = (column <= t) & (column > t - mixer.window)
            for h in mine:
                slices = softmax(k[:, group, 1] @ q[t, h], seen), softmax(k[:, group, 2] @ q[t, h], near)
                parts = weights[h] @ small[1][:done, group], slices[0] @ v[:, group, 1], slices[1] @ v[:, group, 2]
                out[t, h] = sum(g * y for g, y in zip(gate[t, h], parts, strict=True))
    return np.einsum("shd,hde->se", out, weight(layer.out.kernel))


def test_documents_of_a_packed_row_equal_the_papers_formulas(monkeypatch):
    monkeypatch.setattr(module, "TILE", 8)  # four tiles of queries, the last one padded
    x = np.random.default_rng(0).normal(size=(1, 30, 8)).astype(np.float32) * 3
    layer = small()
    segments = np.array([[1] * 17 + [2] * 11 + [0] * 2], np.int32)

    def run(x):
        y = layer(x, Context(segment_ids=segments))
        return jnp.sum(y[:, :28]), y

    (_, got), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(x)
    want = [in_numpy(layer, np.float64(x[0, part]), SMALL, 4, 2, 4) for part in (slice(0, 17), slice(17, 28))]
    np.testing.assert_allclose(got[0, :28], np.concatenate(want), atol=1e-5)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[0, 28:])


@pytest.mark.long
def test_it_keeps_documents_apart_and_decodes_after_going_back():
    check_mixer(NSA(block=2, selected=3, window=3))


@pytest.mark.long
@pytest.mark.parametrize("numbers,atol", [(None, 1e-5), ("int8", 0.1)])
def test_sharded_pages_give_what_a_pass_over_the_whole_text_gives(numbers, atol):
    sizes = dict(depth=1, vocab=32, width=16, heads=4, kv_heads=2, head_dim=8, hidden=16)
    model = TransformerConfig(**sizes, blocks=(BlockConfig(SMALL),)).make(nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 12), dtype=np.int32)
    np.testing.assert_allclose(in_sharded_pages(model, tokens, numbers), jax.jit(model.hidden)(tokens), atol=atol)


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    sizes = dict(depth=1, vocab=32, width=16, heads=4, kv_heads=2, head_dim=8, hidden=16)
    config = TransformerConfig(**sizes, blocks=(BlockConfig(SMALL),))
    zigzag = dataclasses.replace(config, attention=js.nn.RingAttention())
    for each in (config, zigzag):
        compare_layouts(each, [js.Layout("data=2,tensor=2,context=2")]).check()
    compare_layouts(config, [js.Layout("fsdp=2,tensor=4")]).check()  # two key heads on four devices


def test_traced_flops_are_those_that_the_mixer_counts():
    config, layer = TransformerConfig(width=8, heads=4, kv_heads=2, head_dim=4), small()

    def traced(seq):
        return count(lambda x: layer(x, Context()), jax.ShapeDtypeStruct((1, seq, 8), jnp.float32)).matmul

    counted = [sum(SMALL.products(config, 1, seq, None).values()) for seq in (64, 128)]
    assert [traced(seq) for seq in (64, 128)] == counted


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="NSA.selected = 2: .*at least 3"):
        NSA(selected=2)
    with pytest.raises(ConfigError, match="NSA.window = 0: must be a whole number of at least 1"):
        NSA(window=0)
    with pytest.raises(ConfigError, match="NSA has 3 key heads, which must divide its 4 heads"):
        TransformerConfig(width=16, heads=4, blocks=(BlockConfig(NSA(kv_heads=3)),)).validate()
    with pytest.raises(ConfigError, match="NSA is causal, and Transformer.attention is not"):
        TransformerConfig(attention=js.nn.Bidirectional(), blocks=(BlockConfig(NSA()),))
