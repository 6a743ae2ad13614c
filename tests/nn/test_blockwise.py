"""Operations that are quantised by blocks: against float64 NumPy, on layouts, and in a run that `quantize` writes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import BCT
from jaxscale.errors import ConfigError
from jaxscale.nn import (
    GELU,
    BlockwiseAttention,
    BlockwiseFeedForward,
    BlockwiseNorm,
    LayerNorm,
    MixtureOfExperts,
    SigmoidAttention,
    SwiGLU,
    as_weight,
    dot_product_attention,
)
from jaxscale.nn.blockwise import round_blocks
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying

MODEL = js.models.Transformer.Config(depth=1, vocab=32, width=16, heads=2, head_dim=8, hidden=32)


def numpy_blocks(x, bits, size):
    """The nearest integers times the smallest power of two that clips none of a block, in float64."""
    out, top = np.array(x, np.float64), 2 ** (bits - 1) - 1
    for at in range(0, x.shape[-1], size):
        block = out[..., at : at + size]
        largest = np.abs(block).max(-1, keepdims=True)
        power = 2.0 ** np.ceil(np.log2(np.where(largest > 0, largest, 1) / top))
        out[..., at : at + size] = np.round(block / power) * power
    return out


@pytest.mark.parametrize("bits, size", [(8, 4), (4, 8), (2, 5)])
def test_blocks_are_integers_times_the_smallest_power_of_two(bits, size):
    x = np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32)
    x[0, :4], x[1, 0] = 0, 127 * 2.0**5
    got = round_blocks(jnp.asarray(x), bits, size)
    assert np.array_equal(got, numpy_blocks(x, bits, size).astype(np.float32))


def test_gradients_pass_straight_through_the_rounding():
    x = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    by = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert np.array_equal(jax.grad(lambda x: jnp.sum(round_blocks(x, 4, 4) * by))(x), by)


@pytest.mark.long
def test_attention_feed_forward_and_norm_equal_float64_numpy_with_rounding_between():
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(1, 6, heads, 4)).astype(np.float32) for heads in (2, 1, 1))
    a = BlockwiseAttention(8, 4)(q, k, v)
    r = lambda x, n=4: numpy_blocks(x, 8, n)  # noqa: E731
    scores = np.einsum("bshd,btd->bhst", r(q), r(k)[:, :, 0]) / 2
    scores = np.where(np.tril(np.ones((6, 6), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = r(weights / weights.sum(-1, keepdims=True))
    want = r(np.einsum("bhst,btd->bshd", weights, r(v)[:, :, 0]))
    # a float32 sum may round to the other of two neighbours
    assert np.abs(a - want).max() < 2**-6 and np.mean(np.abs(a - want) > 1e-5) < 0.1

    x = random.normal(size=(3, 8)).astype(np.float32)
    layer = BlockwiseFeedForward(8, 8, GELU)(8, 16, rngs=nnx.Rngs(0))
    up, down = (np.float64(m.kernel.get_value()) for m in (layer.up, layer.down))
    h = r(x.astype(np.float64) @ up, 8)
    h = r(0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))), 8)
    np.testing.assert_allclose(layer(x[None])[0], h @ down, atol=1e-2)

    norm = BlockwiseNorm(8, 8, LayerNorm)(8)
    y = r(x, 8)
    y = r((y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5), 8)
    assert np.abs(norm(x) - y).max() <= 2**-5 and np.mean(np.abs(norm(x) - y) > 1e-5) < 0.1


@pytest.mark.parametrize("bits, within", [(8, 0.02), (6, 0.08), (4, 0.35)])
def test_the_error_of_attention_falls_with_the_bits(bits, within):
    random = np.random.default_rng(2)
    q, k, v = (random.normal(size=(2, 16, 2, 8)).astype(np.float32) for _ in range(3))
    exact = np.asarray(dot_product_attention(q, k, v), np.float64)
    error = np.linalg.norm(BlockwiseAttention(bits, 8)(q, k, v) - exact) / np.linalg.norm(exact)
    assert within / 5 < error < within


def test_a_later_token_does_not_change_an_earlier_one():
    random = np.random.default_rng(3)
    q, k, v = (random.normal(size=(1, 7, 1, 4)).astype(np.float32) for _ in range(3))
    kernel = jax.jit(BlockwiseAttention(4, 4))
    whole = kernel(q, k, v)
    np.testing.assert_array_equal(kernel(q[:, :5], k[:, :5], v[:, :5])[0], whole[0, :5])


def test_attention_is_the_same_on_a_layout():
    random = np.random.default_rng(4)
    q, k, v = (random.normal(size=(2, 8, 4, 8)).astype(np.float32) for _ in range(3))
    plain = jax.jit(BlockwiseAttention(8, 4))(q, k, v)
    names = ("batch", "seq", "heads", "head_dim")
    with js.Layout("data=2,tensor=4"):
        cut = jax.jit(lambda *x: BlockwiseAttention(8, 4)(*(js.constrain(a, *names) for a in x)))(q, k, v)
    np.testing.assert_allclose(cut, plain, atol=1e-6)


@pytest.mark.long
def test_a_quantised_run_has_the_parameters_of_the_run_and_rounds_all_operations(tmp_path, caplog):
    data = js.data.synthetic(documents=40, length=30, vocab_size=32)
    options = dict(data=data, layout=None, batch_size=2, seq_len=8, eval_batches=0, quiet=True)
    base = js.fit(model=MODEL, run=tmp_path / "base", steps=1, **options)
    graphdef, params = describe_model(MODEL)[0], base.params()
    run = js.load(quantize(base, tmp_path / "q", BCT(group=8, size=8), say=lambda _: None).path)
    model = run.config.model
    assert (model.mlp, model.attention) == (BlockwiseFeedForward(8, 8, SwiGLU), BlockwiseAttention(8, 8))
    weights = run.weights()
    stored = weights["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"]
    kernel = np.asarray(params["runs"][0]["blocks"][0]["mlp"]["up"]["kernel"], np.float64)[0]
    want = kernel.reshape(2, 8, 4, 8)
    least = 2.0 ** np.floor(np.log2(np.abs(want).max((1, 3), keepdims=True) / 7))  # a larger one clips nothing
    got = np.asarray(as_weight(stored).dense(jnp.float32))[0].reshape(2, 8, 4, 8)
    assert np.array_equal(np.round(got / least), got / least)
    assert np.abs(got - want).max() <= 2 * least.max()
    tokens = np.arange(6, dtype=np.int32)[None]
    exact = nnx.merge(graphdef, params)(tokens)
    rounded = nnx.merge(describe_model(model)[0], weights)(tokens)
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.5
    ids = list(run.generate([3, 1], max_tokens=2, temperature=0, ignore_end=True).ids)
    assert "BlockwiseAttention cannot generate with a cache" in caplog.text
    again = nnx.merge(describe_model(model)[0], weights)(np.asarray([[3, 1, *ids]], np.int32))
    assert ids == np.argmax(again[0, 1:-1], -1).tolist()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: BlockwiseAttention(bits=9), ("BlockwiseAttention.bits = 9", "from 2 to 8")),
        (lambda: BlockwiseNorm(size=0), ("BlockwiseNorm.size = 0", "at least 1")),
        (lambda: BlockwiseNorm(norm=3), ("BlockwiseNorm.norm = 3", "@RMSNorm")),
        (lambda: BlockwiseFeedForward(layer=MixtureOfExperts()), ("BlockwiseFeedForward.layer", "@SwiGLU")),
        (lambda: BCT(bits=1), ("BCT.bits = 1", "2 to 8")),
        (lambda: BCT(activations=1), ("BCT.activations = 1", "from 2 to 8")),
        (
            lambda: BCT().model(dataclasses.replace(MODEL, attention=SigmoidAttention(8))),
            ("SigmoidAttention", "BCT.softmax = False"),
        ),
        (lambda: BCT().model(dataclasses.replace(MODEL, blocks=(js.models.BlockConfig(),))), ("blocks", "GPTQ")),
    ],
)
def test_what_cannot_be_rounded_is_refused_with_what_can(make, words):
    with raises_saying(ConfigError, *words):
        make()
    BCT(softmax=False).model(dataclasses.replace(MODEL, attention=SigmoidAttention(8)))
