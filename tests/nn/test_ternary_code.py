"""Experts in less than one bit for each weight: words against a decoder in Python, and exact."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import QMoE
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo, abstract, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, as_weight
from jaxscale.nn.formats import TernaryCode
from jaxscale.nn.formats.ternary_code import dictionary
from jaxscale.step.state import describe_model
from jaxscale.testing.params import random_params
from tests.truth.errors import raises_saying

DRAW = np.random.default_rng(0)
FORM = TernaryCode(0.8)


def python_rows(words, counts, n):
    """Read one word after the other, as a program of a file format would."""
    code, words, rows = dictionary(FORM.zeros), iter(words.tolist()), []
    for count in counts.tolist():
        row = []
        for _ in range(count):
            word = next(words)
            row += [(0, 1, -1)[int(code.symbols[word, k // 16]) >> 2 * (k % 16) & 3] for k in range(code.lengths[word])]
        assert len(row) >= n and not any(row[n:])
        rows.append(row[:n])
    return np.array(rows).T


def test_the_words_of_a_dictionary_are_all_sequences_and_their_mean_length_is_near_the_entropys():
    code, zeros = dictionary(FORM.zeros), FORM.zeros
    assert np.sum(3.0 ** -code.lengths.astype(np.float64)) == pytest.approx(1, abs=1e-12)
    symbols = code.symbols[:, np.arange(64) // 16] >> (2 * (np.arange(64) % 16)).astype(np.uint32) & 3
    inside = np.arange(64) < code.lengths[:, None]
    log = np.where(inside, np.where(symbols == 0, np.log(zeros), np.log((1 - zeros) / 2)), 0).sum(1)
    assert np.exp(log).sum() == pytest.approx(1, abs=1e-9)
    bits = 16 / np.sum(np.exp(log) * code.lengths)
    entropy = -zeros * np.log2(zeros) - (1 - zeros) * np.log2((1 - zeros) / 2)
    assert entropy <= bits <= 1.04 * entropy


def test_ternary_experts_decode_exactly_and_one_alone():
    signs = np.where(DRAW.random((2, 200, 48)) < 0.94, 0, DRAW.choice([-1, 1], (2, 200, 48)))
    kernel = (signs * 2.0 ** DRAW.integers(-3, 4, (2, 1, 48))).astype(np.float32)
    weight = FORM.encode(jnp.asarray(kernel), (-2,))
    assert np.array_equal(weight.dense(), kernel) and np.array_equal(weight.symbols(), signs)
    assert np.array_equal(python_rows(np.asarray(weight.words[0]), np.asarray(weight.counts[0]), 200), signs[0])
    one = jax.tree.map(lambda a: a[1], weight)
    assert one.shape == (200, 48) and np.array_equal(one.dense(jnp.bfloat16), kernel[1].astype(jnp.bfloat16))


def test_a_matrix_fills_its_bits_and_has_the_largest_weights_with_the_scale_of_least_error():
    kernel, by = DRAW.normal(size=(200, 48)).astype(np.float32), DRAW.uniform(0.5, 2, 200).astype(np.float32)
    weight = FORM.encode(jnp.asarray(kernel), (-2,), jnp.asarray(by))
    bits = 8 * sum(x.nbytes for x in jax.tree.leaves(weight)) / kernel.size
    assert 0.79 < bits <= 0.8 and int(weight.counts.sum()) > 0.97 * weight.words.size
    signs, most = np.asarray(weight.symbols()), int(np.abs(weight.symbols()).sum(0).max())
    for row, own, scale in zip(kernel.T, signs.T, np.asarray(weight.scale, np.float64), strict=True):
        best = np.argsort(-np.abs(row) * by, kind="stable")[:most]
        best = best[np.abs(row[best]) > 0.7 * np.abs(row).mean()]
        want = np.zeros(200)
        want[best] = np.sign(row[best])
        assert np.array_equal(own, want)
        assert scale == pytest.approx(np.sum(by**2 * row * want) / np.sum(by**2 * want**2), rel=5e-3)


@pytest.mark.long
def test_a_layer_of_words_is_that_of_its_dense_weights_on_every_layout():
    mixture = MixtureOfExperts(experts=4, top_k=2)
    graphdef, infos = abstract(lambda: nnx.eval_shape(lambda: mixture(128, 96, rngs=nnx.Rngs(0))))
    words = FORM.encoded(jax.tree.map(jnp.asarray, random_params(infos)), infos, None)
    dense = jax.tree.map(lambda i, w: as_weight(w).dense(i.dtype), infos, words)
    x = jnp.asarray(DRAW.normal(size=(8, 4, 128)), jnp.float32)

    def apply(weights, x):
        return nnx.merge(graphdef, weights)(x)[0]

    want = jax.jit(apply)(dense, x)
    np.testing.assert_allclose(jax.jit(apply)(words, x), want, atol=1e-6)
    for mesh in ("data=2,expert=4", "expert=2,tensor=2,fsdp=2"):
        layout = js.Layout(mesh)
        placed = jax.tree.map(jax.device_put, words, shardings_of(FORM.infos(infos), layout))
        assert not placed["up"].words.sharding.is_fully_replicated
        with layout:
            np.testing.assert_allclose(jax.jit(apply)(placed, x), want, atol=1e-5)


@pytest.mark.long
def test_a_quantised_run_generates_what_its_dense_weights_do(tmp_path):
    model = TransformerConfig(
        depth=2, vocab=256, width=64, heads=4, kv_heads=2, hidden=128, mlp=MixtureOfExperts(experts=4)
    )
    data = js.data.synthetic(documents=80, length=60, vocab_size=256)
    options = dict(data=data, layout=None, batch_size=8, seq_len=16, eval_batches=0, steps=2, quiet=True)
    base = js.fit(model=model, run=tmp_path / "base", **options)
    run = quantize(base, tmp_path / "words", QMoE(bits=1.2), rows=16, batch=8, say=lambda _: None)
    infos = describe_model(model)[1]
    stored = run.config.stored.infos(infos)["runs"][0]["blocks"][0]
    size = sum(i.nbytes for i in jax.tree.leaves(stored["mlp"]["up"]))
    assert 8 * size / (2 * 4 * 64 * 128) <= 1.2 and isinstance(stored["attn"]["q"]["kernel"], TensorInfo)
    ids = run.generate("ab", max_tokens=4, temperature=0).ids
    assert run.generate("ab", max_tokens=4, temperature=0, stream_layers="disk").ids == ids
    weights = run.weights()["runs"][0]["blocks"][0]["mlp"]["up"]
    assert np.isin(np.asarray(weights.symbols()), (-1, 0, 1)).all()


def test_what_does_not_fit_is_one_sentence():
    with raises_saying(ConfigError, "TernaryCode.bits = 2", "below 1.6"):
        TernaryCode(2)
    info = TensorInfo("up", (4, 16, 64), jnp.float32, ("experts", "embed", "expert_mlp"), (-2,))
    with raises_saying(ConfigError, "TernaryCode.bits = 0.8: scales and zeros of up take 3.0 bits", "use 'ternary'"):
        FORM.covers(info)
    info = dataclasses.replace(info, shape=(4, 64, 64))
    with raises_saying(ConfigError, "QMoE.bits = 0.8", "take 1.0 bits", "set at least 1.0"):
        QMoE().infos(info)
    assert TernaryCode(1.0).covers(info)
    with raises_saying(ConfigError, "QMoE.bits = '0.8': must be a number"):
        QMoE(bits="0.8")
    with raises_saying(ConfigError, "this model has none", "'ternary'"):
        FORM.check([TensorInfo("q", (16, 64), jnp.float32, ("embed", "mlp"), (-2,))])
    with raises_saying(ConfigError, "QMoE.group has no effect; set QMoE.bits"):
        QMoE(group=4)
