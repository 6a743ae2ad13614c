"""Encoders: bidirectional attention and masked tokens, equal on layouts and on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.convert.exporting import export_target
from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import Bidirectional, RingAttention, dot_product_attention
from jaxscale.step import MaskedToken, TrainConfig, describe_model
from jaxscale.testing import assert_layouts_agree, check_objective, random_batch, random_params
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(vocab=32, depth=1, width=16, heads=2, attention=Bidirectional())
BATCH = random_batch(32, lengths=(9, 5))


def test_attention_sees_the_whole_document_and_nothing_else():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 1, 4)).astype(np.float32)
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2]])
    results = Bidirectional()(q, k, v, causal=True, segment_ids=segments)
    for at in (slice(0, 4), slice(4, 6)):
        scores = np.einsum("shd,thd->hst", q[0, at], k[0, at]) / 2
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(results[0, at], np.einsum("hst,thd->shd", weights, v[0, at]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layout,model",
    [
        pytest.param(js.Layout("data=2,fsdp=2,tensor=2"), MODEL, id="three axes", marks=pytest.mark.long),
        pytest.param(
            js.Layout("context=4"), dataclasses.replace(MODEL, attention=Bidirectional(RingAttention())), id="context"
        ),
    ],
)
def test_training_gives_the_same_numbers_on_every_layout(layout, model):
    assert_layouts_agree(model, [layout], batch=BATCH, objective=MaskedToken(rate=0.4), accumulate=2)


def test_the_promises_of_an_objective_are_kept():
    check_objective(TrainConfig(model=MODEL, layout=None, seq_len=16, objective=MaskedToken(), batch_size=8), BATCH)


def test_the_loss_is_of_masked_tokens_alone_and_of_what_the_model_makes_of_the_others():
    objective, (graphdef, infos) = MaskedToken(rate=0.5, mask=31), describe_model(MODEL)
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos)))
    batch = {**BATCH, "rows": np.arange(8)}
    masks = jax.random.fold_in(jax.random.key(0), 0x3A5C)
    drawn = np.stack([jax.random.bernoulli(jax.random.fold_in(masks, row), 0.5, (16,)) for row in range(8)])
    tokens = np.where(drawn, 31, BATCH["tokens"])
    logits = model(tokens, positions=BATCH["positions"], segment_ids=BATCH["segment_ids"])
    each = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), BATCH["tokens"][..., None], -1)[..., 0]
    terms = objective.terms(model, batch, key=jax.random.key(0))
    np.testing.assert_allclose(terms["nats"], (each * drawn * (BATCH["segment_ids"] > 0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(objective.weights(batch, 1)["tokens"], 0.5 * (BATCH["segment_ids"] > 0).sum())


def test_an_evaluation_masks_the_same_tokens_whatever_the_batches():
    objective, (graphdef, infos) = MaskedToken(rate=0.5), describe_model(MODEL)
    model = nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos)))
    terms = jax.jit(lambda batch: objective.terms(model, batch)["nats"])
    results = [
        sum(terms({**{k: x[at] for k, x in BATCH.items()}, "rows": np.arange(len(at))}) for at in parts)
        for parts in ([np.arange(8)], [np.array([5, 2]), np.array([7, 0, 1, 3, 4, 6])])
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


def test_what_does_not_fit_is_said():
    with raises_saying(ConfigError, "tokens attend to later tokens", "@Bidirectional()"):
        TrainConfig(model=dataclasses.replace(MODEL, attention=dot_product_attention), objective=MaskedToken())
    with raises_saying(ConfigError, "MaskedToken.mask = 32", "32 token ids"):
        TrainConfig(model=MODEL, objective=MaskedToken(mask=32))
    with raises_saying(ConfigError, "MaskedToken.rate = 1.5"):
        MaskedToken(rate=1.5)
    config = TrainConfig(model=MODEL, objective=MaskedToken(), layout=js.Layout("pipeline=2").abstract(), batch_size=8)
    with raises_saying(ConfigError, "MaskedToken", "last pipeline stage cannot compute", "mesh without pipeline"):
        js.step.check(config)


def test_a_pair_of_tokens_that_see_each_other_is_counted_twice():
    """Two tokens have three causal pairs, four without a mask."""
    causal = dataclasses.replace(MODEL, attention=dot_product_attention)
    assert MODEL.product_flops(1, 2)["scores"] * 3 == causal.product_flops(1, 2)["scores"] * 4


def test_an_encoder_is_not_exported_as_a_model_that_reads_from_left_to_right(tmp_path):
    run = js.Run(tmp_path, TrainConfig(model=MODEL, layout=None, objective=MaskedToken()))
    with raises_saying(CheckpointError, "Bidirectional", "Run.model()"):
        export_target(run, None, None)


def test_the_next_token_is_not_asked_of_a_model_that_sees_it():
    with raises_saying(ConfigError, "NextToken", "see the tokens to predict", "train.objective = @MaskedToken()"):
        TrainConfig(model=MODEL, layout=None)
