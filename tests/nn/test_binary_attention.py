"""Attention weights of one bit: the least error of all masks, below plain sign's; packed, on a layout, and cached."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.nn import BinaryAttention
from jaxscale.nn.binary_attention import binarise
from tests.truth.errors import raises_saying


def softmaxes(rows, n, sharpness=2.0):
    scores = sharpness * np.random.default_rng(0).normal(size=(rows, n))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def error(a, b):
    return np.sum((np.asarray(a, np.float64) - b) ** 2, -1)


def least(row):
    """The least squared error over all masks, each with its best scale, in float64."""
    row = row.astype(np.float64)
    masks = np.array(list(itertools.product((0, 1), repeat=len(row)))[1:])
    scales = masks @ row / masks.sum(1)
    return ((row - scales[:, None] * masks) ** 2).sum(1).min()


def test_no_mask_and_scale_have_a_smaller_error():
    weights = softmaxes(20, 8)
    weights[0], weights[1], weights[2] = 1 / 8, np.eye(8)[3], [0.5, 0.5, 0, 0, 0, 0, 0, 0]
    got = np.asarray(binarise(jnp.asarray(weights)))
    assert all(len(set(row[row > 0].tolist())) == 1 for row in got)
    np.testing.assert_allclose(error(got, weights), [least(row) for row in weights], atol=1e-6)


def test_the_error_is_below_plain_signs():
    weights = softmaxes(64, 32).astype(np.float64)
    ours = error(binarise(jnp.asarray(weights)), weights).sum()
    mean = weights.mean(-1, keepdims=True)
    # signs times the mean magnitude, as matrices are binarised; of weights around their mean; and a threshold of 1/2
    sign = np.sign(weights) * mean
    centred = mean + np.sign(weights - mean) * np.abs(weights - mean).mean(-1, keepdims=True)
    half = np.where(weights >= 0.5, 1.0, 0.0)
    others = [error(other, weights).sum() for other in (sign, centred, half)]
    assert ours < 0.8 * min(others), (ours, others)


def test_gradients_are_those_of_the_softmax():
    weights, by = softmaxes(2, 8), np.arange(16.0).reshape(2, 8).astype(np.float32)
    np.testing.assert_array_equal(jax.grad(lambda w: jnp.sum(binarise(w) * by))(weights), by)


def test_a_document_has_the_same_output_alone_and_packed():
    q, k, v = (np.random.default_rng(1).normal(size=(1, 8, h, 4)).astype(np.float32) for h in (4, 2, 2))
    kernel = jax.jit(BinaryAttention())
    packed = kernel(q, k, v, segment_ids=np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32))
    np.testing.assert_allclose(kernel(q[:, 3:7], k[:, 3:7], v[:, 3:7])[0], packed[0, 3:7], atol=1e-6)


def test_attention_is_the_same_on_a_layout():
    q, k, v = (np.random.default_rng(2).normal(size=(2, 8, 4, 4)).astype(np.float32) for _ in range(3))
    plain = jax.jit(BinaryAttention())(q, k, v)
    names = ("batch", "seq", "heads", "head_dim")
    with js.Layout("data=2,tensor=4"):
        cut = jax.jit(lambda *x: BinaryAttention()(*(js.constrain(a, *names) for a in x)))(q, k, v)
    np.testing.assert_allclose(cut, plain, atol=1e-6)


def test_a_kv_cache_is_refused():
    model = js.models.Transformer.Config(
        depth=1, vocab=32, width=16, heads=2, head_dim=8, hidden=32, attention=BinaryAttention()
    )
    made = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    with raises_saying(ConfigError, "BinaryAttention", "cannot generate with a cache"):
        _ = made.runs[0].blocks[0].decode_state
