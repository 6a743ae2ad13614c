"""SOFT against float64 NumPy and its limits, in packed rows, and on layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, DataError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import SOFT, Bidirectional, Context, dot_product_attention
from jaxscale.parallel.landmark_attention import newton_inverse
from jaxscale.step.prepare import prepare
from jaxscale.testing import check_mixer, compare_layouts

OPTIONS = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)


def layer_of(**fields):
    return SOFT(**fields)(6, 2, 2, 4, rngs=nnx.Rngs(0), **OPTIONS)


def kernel(x, y):
    return np.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / (2 * np.sqrt(x.shape[-1])))


def in_numpy(layer, x, stride, iterations):
    """The paper's formulas for one document, with landmarks by mean; (S, E)."""
    q, v = (np.einsum("se,ehd->shd", x, np.float64(m.kernel.get_value())) for m in (layer.q, layer.v))
    out = np.zeros_like(v)
    for h in range(2):
        points = np.stack([q[i : i + stride, h].mean(0) for i in range(0, len(x), stride)])
        a, c = kernel(points, points), kernel(q[:, h], points)
        inverse = a / a.sum(0).max() ** 2
        for _ in range(iterations):
            inverse = 2 * inverse - inverse @ a @ inverse
        out[:, h] = c @ inverse @ c.T @ v[:, h]
    return np.einsum("shd,hde->se", out, np.float64(layer.out.kernel.get_value()))


def test_documents_of_a_packed_row_equal_the_papers_formulas_and_too_many_are_nan():
    x = np.random.default_rng(0).normal(size=(1, 12, 6)).astype(np.float32)
    layer = layer_of(stride=3, iterations=6, documents=2)
    run = jax.jit(lambda x, ids: layer(x, Context(segment_ids=ids)))
    got = run(x, np.array([[1] * 7 + [2] * 4 + [0]], np.int32))
    want = [in_numpy(layer, np.float64(x[0, part]), 3, 6) for part in (slice(0, 7), slice(7, 11))]
    np.testing.assert_allclose(got[0, :11], np.concatenate(want), atol=2e-5)
    # what training refuses is what has no room, to the document
    for lengths in ([12], [4, 4, 4], [3, 3, 2, 2], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1], [1] * 12):
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids = np.pad(ids, (0, 12 - len(ids))).astype(np.int32)[None]
        fits = bool(np.isfinite(run(x, ids)).all())
        with contextlib.nullcontext() if fits else pytest.raises(DataError, match="has no room"):
            SOFT(stride=3, documents=2).check_documents(ids)


def test_a_packed_row_with_more_documents_than_there_is_room_for_is_refused_before_it_is_trained_on():
    rows = [np.arange(1, 3)] * 40  # two tokens and eos: five documents of a row of 13
    data = js.data.records(rows, heldout=0.5, vocab_size=8, eos=0)
    mixer = SOFT(stride=4, documents=1)
    model = TransformerConfig(1, 8, 16, blocks=(BlockConfig(mixer),), attention=Bidirectional())
    same = dict(objective=js.step.MaskedToken(), layout=None, seq_len=13, batch_size=2, eval_batches=0)
    config = js.TrainConfig(model=model, data=data, **same)
    with pytest.raises(DataError, match="SOFT.documents = 1 has no room for a row with 5 documents") as error:
        prepare(config).loader.batch_at(0)
    with pytest.raises(DataError, match="SOFT.documents = 1 has no room"):
        prepare(dataclasses.replace(config, eval_batches=1))
    needed = int(re.search("SOFT.documents = ([0-9]+) or more", str(error.value))[1])
    blocks = (BlockConfig(dataclasses.replace(mixer, documents=needed)),)
    prepare(dataclasses.replace(config, model=dataclasses.replace(model, blocks=blocks))).loader.batch_at(0)


def test_newtons_method_converges_and_the_error_falls_with_landmarks():
    random = np.random.default_rng(0)
    points = random.normal(size=(6, 2))
    a = kernel(points, points)
    errors = [np.abs(newton_inverse(a, np.full(6, a.sum(0).max()), n) @ a - np.eye(6)).max() for n in (4, 12, 24)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3
    q = np.cumsum(0.3 * random.normal(size=(32, 2)), axis=0)  # neighbours are alike, as in an image
    exact, far = kernel(q, q), []
    for stride in (16, 8, 4, 1):
        marks = q.reshape(-1, stride, 2).mean(1)
        c = kernel(q, marks)
        far.append(np.abs(c @ np.linalg.pinv(kernel(marks, marks), rcond=1e-9) @ c.T - exact).max())
    assert sorted(far, reverse=True) == far and far[-1] < 1e-6


def test_a_rows_products_are_linear_in_its_length_for_a_number_of_landmarks():
    config = TransformerConfig(width=16, heads=2, attention=Bidirectional())
    short, long = (sum(SOFT(stride=n // 8).products(config, 1, n, None).values()) for n in (64, 6400))
    per_token = sum(SOFT(stride=8).products(config, 1, 64, None)[name] for name in ("qkv", "residual_mid")) // 64
    assert long - short == (6400 - 64) * (per_token + 3 * 2 * 8 * 16)


@pytest.mark.long
def test_it_keeps_documents_apart():
    check_mixer(SOFT(stride=3, documents=6), attention=Bidirectional())


@pytest.mark.long
def test_layouts_train_alike_in_packed_rows():
    config = TransformerConfig(
        depth=1,
        vocab=32,
        width=16,
        heads=2,
        hidden=16,
        blocks=(BlockConfig(SOFT(stride=3)),),
        attention=Bidirectional(),
    )
    zigzag = dataclasses.replace(config, attention=Bidirectional(js.nn.RingAttention()))
    for each in (config, zigzag):
        compare_layouts(each, [js.Layout("data=2,tensor=2,context=2")], objective=js.step.MaskedToken()).check()


def test_causal_models_and_numbers_below_one_are_refused():
    config = TransformerConfig(attention=Bidirectional(), blocks=(BlockConfig(SOFT()),))
    with pytest.raises(ConfigError, match="SOFT lets every token see its whole document"):
        dataclasses.replace(config, attention=dot_product_attention)
    with pytest.raises(ConfigError, match="SOFT.stride = 0: must be a whole number of at least 1"):
        SOFT(stride=0)
