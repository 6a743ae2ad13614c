"""Soft prompts: against the embeddings of real tokens, in whole rows and with a cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.infer.engine import Cached, Engine, Request
from jaxscale.infer.sampling import Sampling
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.models.positions import Learned
from jaxscale.nn.formats import Stored
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying
from tests.truth.long import short
from tests.truth.params import random_params

MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=2, hidden=32, embed_scale=3.0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)), jnp.int32)
FIRST = TOKENS[0, :5]


def models(weights=None, config=MODEL):
    """The model, and one with the same parameters and a prompt that is the embeddings of `FIRST`."""
    prompted = dataclasses.replace(config, soft_prompt=5)
    (plain, infos), (own, _) = map(describe_model, (config, prompted))
    params = jax.tree.map(jnp.asarray, random_params(infos))
    prompt = params["embed"]["weight"][FIRST]
    params = params if weights is None else weights.encoded(params, infos, None)
    return nnx.merge(plain, params), nnx.merge(own, {**params, "prompt": {"weight": prompt}})


@pytest.mark.parametrize("weights", short(1, [None, Stored("int4", group=8)]))
def test_a_prompt_of_token_embeddings_is_those_tokens_before_the_row(weights):
    model, prompted = models(weights)
    whole = model.hidden(jnp.concatenate([jnp.broadcast_to(FIRST, (2, 5)), TOKENS], axis=1))
    got = prompted.hidden(TOKENS)
    np.testing.assert_allclose(got, whole[:, 5:], atol=1e-5)
    assert float(jnp.max(jnp.abs(got - model.hidden(TOKENS)))) > 1e-2


@pytest.mark.long
def test_only_the_first_document_of_a_packed_row_sees_the_prompt_also_after_padding():
    model, prompted = models()
    segments = jnp.asarray([[0] * 2 + [1] * 5 + [2] * 5] * 2)
    positions = jnp.asarray([[0, 0, *range(5), *range(5)]] * 2, jnp.int32)
    got = prompted.hidden(TOKENS, positions=positions, segment_ids=segments)
    plain = model.hidden(TOKENS, positions=positions, segment_ids=segments)
    np.testing.assert_allclose(got[:, 7:], plain[:, 7:], atol=1e-5)
    np.testing.assert_allclose(got[:, 2:7], prompted.hidden(TOKENS[:, 2:7]), atol=1e-5)


@pytest.mark.long
def test_an_engine_continues_and_scores_as_if_the_prompts_tokens_came_first():
    """Prompt tokens are scored, and several requests share the cached prompt."""
    results = []
    for model, before in zip(models(), (tuple(FIRST.tolist()), ()), strict=True):
        graphdef, params = nnx.split(model)
        engine = Engine(Cached(graphdef, nnx.to_pure_dict(params), rows=2, length=16 + len(before), budget=32))
        sampling = Sampling(temperature=0.0, max_tokens=4, repetition_penalty=1.0)
        for n in range(2):
            engine.submit(Request((*before, *TOKENS[n, :6].tolist()), sampling, n, scored=True))
        events = []
        while engine.busy:
            events += engine.step()
        scores = [[s.logprob for e in events if e.id == n for s in e.prompt] for n in range(2)]
        results.append(([[e.token for e in events if e.id == n] for n in range(2)], [s[-5:] for s in scores]))
        assert [len(s) for s in scores] == [5 + len(before)] * 2
    assert results[0][0] == results[1][0] and all(len(t) == 4 for t in results[0][0])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-5)


def test_models_and_layouts_without_a_place_for_a_prompt_are_refused():
    with raises_saying(ConfigError, "use a model with rotary positions"):
        dataclasses.replace(MODEL, positions=Learned(32), soft_prompt=3)
    with Layout("pipeline=2"), raises_saying(LayoutError, "use a mesh without pipeline"):
        dataclasses.replace(MODEL, soft_prompt=3).check_row(12)
