"""Sigmoid attention as a model's kernel: on packed rows, on layouts, in generation and in exports."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.exporting import export_target
from jaxscale.errors import CheckpointError, ConfigError, LayoutError
from jaxscale.nn import MultiHeadLatent, SigmoidAttention
from jaxscale.step.state import TrainState, describe_model
from jaxscale.testing import check_model, compare_layouts
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

CONFIG = js.models.Transformer.Config(
    depth=1, vocab=256, width=32, heads=4, kv_heads=2, head_dim=8, hidden=32, attention=SigmoidAttention(16)
)


def _run(folder, model=CONFIG):
    state = TrainState(jnp.int32(0), random_params(describe_model(model)[1]), {}, jax.random.key(0))
    return js.Run(folder, js.TrainConfig(model=model, layout=None, seq_len=16), state)


def test_sigmoid_attention_equals_float64_numpy():
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, 6, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0]], np.int32)
    got = jax.jit(SigmoidAttention(100))(q, k, v, segment_ids=segments)
    k, v = (np.repeat(np.float64(x), 2, axis=2) for x in (k, v))
    weights = 1 / (1 + 100 * np.exp(-np.einsum("bshd,bthd->bhst", q, k) / 2))
    seen = np.tril(np.ones((6, 6), bool)) & (segments[:, :, None] == segments[:, None])
    np.testing.assert_allclose(got, np.einsum("bhst,bthd->bshd", weights * seen[:, None], v), atol=1e-6)


def test_a_document_has_the_same_output_alone_packed_and_token_by_token():
    model = dataclasses.replace(CONFIG, windows=(6,), attention_softcap=2.0, attention_scale=0.7)
    assert "Decodable" in check_model(model)


@pytest.mark.long
def test_sigmoid_attention_trains_alike_on_every_layout():
    layouts = [js.Layout("data=2,fsdp=2,tensor=2"), js.Layout("data=4,pipeline=2"), js.Layout("context=4,tensor=2")]
    compare_layouts(dataclasses.replace(CONFIG, depth=4, windows=(None, 6)), layouts).check()


@pytest.mark.parametrize("mesh", [None, pytest.param("context=2,tensor=4", marks=pytest.mark.long)])
def test_a_text_is_continued_with_a_cache_as_passes_over_it_would(tmp_path, mesh):
    run = _run(tmp_path)
    prompt = [3, 1, 4]
    layout = None if mesh is None else js.Layout(mesh)
    got = list(run.generate(prompt, max_tokens=4, temperature=0, ignore_end=True, layout=layout).ids)
    logits = nnx.merge(describe_model(CONFIG)[0], run.state.params)(np.asarray([prompt + got], np.int32))
    assert got == np.argmax(logits[0, 2:-1], axis=-1).tolist()


def test_no_cache_of_latents_is_used():
    layer = MultiHeadLatent(8, None, 8, 4, 8)
    model = dataclasses.replace(CONFIG, kv_heads=None, head_dim=None, attention_layer=layer)
    block = nnx.merge(*(lambda d: (d[0], random_params(d[1])))(describe_model(model))).runs[0].blocks[0]
    with raises_saying(ConfigError, "SigmoidAttention cannot generate with a cache in", "such as MultiHead()"):
        _ = block.decode_state


def test_an_export_says_that_no_family_has_sigmoid_attention(tmp_path):
    with raises_saying(CheckpointError, "SigmoidAttention, but every family that we export to has softmax attention"):
        export_target(_run(tmp_path), None, None)


@pytest.mark.parametrize("length", [0, 1.5, True])
def test_a_length_that_is_none_is_refused(length):
    with raises_saying(ConfigError, "SigmoidAttention.length = "):
        SigmoidAttention(length)


def test_a_sharded_sequence_of_fewer_queries_than_keys_is_refused_without_advice_for_another_function():
    q, k = jnp.zeros((1, 4, 4, 8)), jnp.zeros((1, 8, 2, 8))
    with js.Layout("data=2,context=4"), pytest.raises(LayoutError, match="use a mesh without context$"):
        SigmoidAttention(16)(q, k, k)
