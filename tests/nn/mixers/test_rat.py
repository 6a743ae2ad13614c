"""RAT against its paper's formulas in float64 NumPy, its two limits, caches, and layouts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.infer.cache import Contiguous, Paged, generating, init_cache
from jaxscale.infer.forward import forward, one_per_batch_row
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import RAT, Context, KeyValues, Rotary, dot_product_attention
from jaxscale.testing import check_mixer, compare_layouts

OPTIONS = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)
X = np.random.default_rng(0).normal(size=(1, 11, 6)).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_of(chunk, rotary=None):
    return RAT(chunk=chunk, groups=1)(6, 2, 2, 4, rngs=nnx.Rngs(0), rotary=rotary, **OPTIONS)


def in_numpy(layer, x, chunk, rotary):
    """The paper's equations for one document, token by token; (S, E)."""
    q, k, v, forget, gate = (
        np.einsum("se,ehd->shd", x, np.float64(m.kernel.get_value()))
        for m in (layer.q, layer.k, layer.v, layer.forget, layer.gate)
    )
    g = sigmoid(forget + np.float64(layer.forget_bias.get_value()))
    ends, out = [], []

    def rotated(y, place):
        if not rotary:
            return y
        angles = place * 10000.0 ** -(np.arange(0, 4, 2) / 4)
        a, b = y[:2], y[2:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])

    for t in range(len(x)):
        if t % chunk == 0:
            key, value = np.zeros((2, 2, 4))
        key = g[t] * key + (1 - g[t]) * k[t]  # one head of keys, repeated
        value = g[t] * value + (1 - g[t]) * v[t]
        heads, place = [], t // chunk
        for h in range(2):
            rows = [
                *[(rotated(ek[h], i), ev[h]) for i, (ek, ev) in enumerate(ends)],
                (rotated(key[h], place), value[h]),
            ]
            scores = np.array([rotated(q[t, 0], place) @ a for a, _ in rows]) / 2
            weights = np.exp(scores - scores.max())
            heads.append(sum(w * b for w, (_, b) in zip(weights / weights.sum(), rows, strict=True)))
        out.append(sigmoid(gate[t]) * np.stack(heads))
        if t % chunk == chunk - 1:
            ends.append((key, value))
    return np.einsum("shd,hde->se", np.stack(out), np.float64(layer.out.kernel.get_value()))


def test_documents_of_a_packed_row_equal_the_papers_formulas():
    layer = layer_of(3, Rotary())
    segments = np.array([[1] * 7 + [2] * 3 + [0]], np.int32)
    got = jax.jit(lambda x, ids: layer(x, Context(segment_ids=ids)))(X, segments)
    want = [in_numpy(layer, np.float64(X[0, part]), 3, True) for part in (slice(0, 7), slice(7, 10))]
    np.testing.assert_allclose(got[0, :10], np.concatenate(want), atol=2e-6)


def test_chunks_of_one_token_are_attention_and_chunks_of_a_whole_row_are_a_recurrence():
    def heads(m):
        return np.einsum("bse,ehd->bshd", X, m.kernel.get_value())

    for chunk in (1, 11):
        layer = layer_of(chunk)
        keep = sigmoid(heads(layer.forget) + np.asarray(layer.forget_bias.get_value()))
        q, k, v = (np.broadcast_to(heads(m), keep.shape) for m in (layer.q, layer.k, layer.v))
        if chunk == 1:
            mixed = dot_product_attention(q, (1 - keep) * k, (1 - keep) * v)
        else:
            mixed, h = [], np.zeros(keep[:, 0].shape)
            for t in range(11):
                h = keep[:, t] * h + (1 - keep[:, t]) * v[:, t]
                mixed.append(h)
            mixed = np.stack(mixed, 1)
        want = np.einsum("bshd,hde->bse", sigmoid(heads(layer.gate)) * mixed, layer.out.kernel.get_value())
        got = jax.jit(lambda x, layer=layer: layer(x, Context()))(X)
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.long
def test_it_keeps_documents_apart_and_decodes_after_going_back():
    check_mixer(RAT(chunk=3), positions=Rotary())


def test_a_cache_has_one_key_for_each_chunk_and_refuses_pages_that_cut_chunks():
    state = layer_of(4).decode_state
    keys, running = 2 * 2 * 4 * 4, 2 * 8 * 4  # bytes of keys and values of a chunk, and of the state
    assert state.bytes(Contiguous(), 1, 1, 1, 64, 0) == 16 * keys + running
    assert state.bytes(Paged(page=8), 1, 1, 1, 64, 0) == 16 * keys + running
    assert state.reusable(Paged(page=8)) and not state.reusable(Contiguous())
    one_byte = state.bytes(Paged(page=8, numbers="int8"), 1, 1, 1, 64, 0)
    assert one_byte == Paged(page=2, numbers="int8").bytes(KeyValues(2, 4, 4, jnp.float32), 1, 1, 1, 16) + running
    with pytest.raises(ConfigError, match="set PagedCache.page = 12"):
        state.init(Paged(page=10), 1, 1, 1, 64, 0)
    state.init(Paged(page=12), 1, 1, 1, 64, 0)


@pytest.mark.long
def test_sharded_pages_give_what_a_pass_over_the_whole_text_gives():
    sizes = dict(depth=1, vocab=32, width=16, heads=2, hidden=16)
    model = TransformerConfig(**sizes, blocks=(BlockConfig(RAT(chunk=2)),)).make(nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 32, (1, 12), dtype=np.int32)
    whole, got = jax.jit(model.hidden)(tokens), []
    run = jax.jit(lambda tokens, step, states: forward(model, tokens, step, Paged(page=4), states))
    with generating(js.Layout("tensor=2,context=2")):
        states = init_cache(model, Paged(page=4), 1, 1, 16)
        tables = np.array([[0, 2, 1, 3]], np.int32)  # entry i is a page of device i modulo 2, which has two
        for first, n in ((0, 5), (5, 1), (6, 1), (7, 5)):
            step = one_per_batch_row(jnp.array([first]), jnp.array([n]), n, jnp.asarray(tables))
            hidden, states = run(tokens[:, first : first + n], step, states)
            got.append(hidden)
    np.testing.assert_allclose(np.concatenate(got, 1), whole, atol=1e-5)


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    config = TransformerConfig(
        depth=1, vocab=32, width=16, heads=2, hidden=16, blocks=(BlockConfig(RAT(chunk=3)),), positions=Rotary()
    )
    zigzag = dataclasses.replace(config, attention=js.nn.RingAttention())
    fewer = BlockConfig(RAT(chunk=3, groups=1))  # than devices that heads are sharded over
    compare_layouts(config, [js.Layout("data=2,tensor=2,context=2")]).check()
    compare_layouts(dataclasses.replace(config, blocks=(fewer,)), [js.Layout("tensor=2")]).check()
    compare_layouts(zigzag, [js.Layout("data=2,tensor=2,context=2")]).check()


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: RAT(chunk=0), "RAT.chunk = 0: must be a whole number of at least 1"),
        (lambda: TransformerConfig(heads=4, blocks=(BlockConfig(RAT(groups=3)),)), "which must divide its 4 heads"),
        (
            lambda: TransformerConfig(attention=js.nn.Bidirectional(), blocks=(BlockConfig(RAT()),)),
            "RAT is causal, and Transformer.attention is not",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
