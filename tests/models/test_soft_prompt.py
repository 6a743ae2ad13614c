"""Soft prompts: against the embeddings of real tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.models.positions import Learned
from jaxscale.models.soft_prompt import prompted_hidden
from jaxscale.nn.formats import Stored
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.long import short
from tests.truth.params import random_params

MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=2, hidden=32)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)


def model_of(config=MODEL, weights=None):
    graphdef, infos = describe_model(config)
    params = jax.tree.map(jnp.asarray, random_params(infos))
    return nnx.merge(graphdef, params if weights is None else weights.encoded(params, infos, None))


@pytest.mark.parametrize("weights", short(1, [None, Stored("int4", group=8)]))
def test_a_prompt_of_token_embeddings_is_those_tokens_before_the_row(weights):
    model = model_of(weights=weights)
    first = TOKENS[:1, :5]
    whole = model.hidden(jnp.concatenate([jnp.broadcast_to(first, (2, 5)), TOKENS], axis=1))
    got = prompted_hidden(model, model.embed(first)[0], TOKENS)
    np.testing.assert_allclose(got, whole[:, 5:], atol=1e-5)
    assert float(jnp.max(jnp.abs(got - model.hidden(TOKENS)))) > 1e-2


def test_only_the_first_document_of_a_packed_row_sees_the_prompt():
    model = model_of()
    segments = jnp.asarray([[1] * 7 + [2] * 5] * 2)
    positions = jnp.asarray([[*range(7), *range(5)]] * 2, jnp.int32)
    prompt = model.embed(TOKENS[:1, :4])[0]
    got = prompted_hidden(model, prompt, TOKENS, positions=positions, segment_ids=segments)
    plain = model.hidden(TOKENS, positions=positions, segment_ids=segments)
    np.testing.assert_allclose(got[:, 7:], plain[:, 7:], atol=1e-5)
    np.testing.assert_allclose(got[:, :7], prompted_hidden(model, prompt, TOKENS[:, :7]), atol=1e-5)


def test_padding_before_the_first_document_does_not_hide_the_prompt_from_it():
    model = model_of()
    segments = jnp.asarray([[0] * 2 + [1] * 10] * 2)
    positions = jnp.asarray([[0, 0, *range(10)]] * 2, jnp.int32)
    prompt = model.embed(TOKENS[:1, :4])[0]
    got = prompted_hidden(model, prompt, TOKENS, positions=positions, segment_ids=segments)
    np.testing.assert_allclose(got[:, 2:], prompted_hidden(model, prompt, TOKENS[:, 2:]), atol=1e-5)


def test_learned_positions_are_refused():
    model = model_of(dataclasses.replace(MODEL, positions=Learned(32)))
    with raises_saying(ConfigError, "use a model with rotary positions"):
        prompted_hidden(model, jnp.zeros((3, 32)), TOKENS)
