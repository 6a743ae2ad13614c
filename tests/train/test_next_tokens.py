"""Multi-token prediction: the loss of DeepSeek-V3's paper in float64, equal on layouts and on one device."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.models import TransformerConfig
from jaxscale.nn import Bidirectional, RingAttention
from jaxscale.optim import MuP
from jaxscale.step import NextTokens, TrainConfig, describe_model
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.effects import without_effect
from jaxscale.testing import assert_layouts_agree, check_objective, random_batch, random_params
from tests.truth import numpy_transformer as truth
from tests.truth.errors import raises_saying

MODEL = TransformerConfig(vocab=32, depth=1, width=16, heads=2, multi_token=2)
BATCH = random_batch(32, lengths=(9, 5))
BATCH["weights"] *= np.random.default_rng(3).uniform(0.5, 2, BATCH["weights"].shape).astype(np.float32)


def test_the_loss_is_that_of_the_paper_in_float64():
    """One row, one document and one depth at a time, by the sums of section 2.2 and none of the model's code."""
    graphdef, infos = describe_model(MODEL)
    params = random_params(infos)
    objective, batch = NextTokens(weight=0.4), {**BATCH, "rows": np.arange(8)}
    totals = jax.jit(lambda p: objective.terms(nnx.merge(graphdef, p), batch))(params) | objective.weights(batch, 1)
    nats, counted = np.zeros(3), np.zeros(3)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for row in range(8):
        for document in (1, 2):
            at = np.flatnonzero(BATCH["segment_ids"][row] == document)
            targets, weights = BATCH["targets"][row, at], BATCH["weights"][row, at].astype(np.float64)
            x = p["embed"]["weight"][BATCH["tokens"][row, at]]
            place, same = np.arange(len(at)), np.ones(len(at), int)
            x = truth._layer(MODEL, truth.layers_of(MODEL, p)[0], x, place, same, None)
            h = truth._norm(MODEL, p["norm"], x)
            for k in range(3):  # depth 0 is the model
                if k:
                    module, n = p["multi_token"][k - 1], len(at) - k
                    e = p["embed"]["weight"][targets[k - 1 :][:n]]
                    e = truth._norm(MODEL, module["token_norm"], e) @ module["from_token"]["kernel"]
                    h = e + truth._norm(MODEL, module["hidden_norm"], h[:n]) @ module["from_hidden"]["kernel"]
                    block = truth._at(module["run"]["blocks"][0], 0)
                    h = truth._norm(MODEL, module["norm"], truth._layer(MODEL, block, h, place[:n], same[:n], None))
                losses, _ = truth.token_losses(h @ p["head"]["weight"].T, targets[k:])
                nats[k] += np.sum(losses * weights[k:])
                counted[k] += np.sum(weights[k:])
    np.testing.assert_allclose([totals["nats"], *totals["ahead"]], nats, rtol=1e-5)
    np.testing.assert_allclose(objective.value(totals), (nats[0] + 0.4 * nats[1:].mean()) / counted[0], rtol=1e-5)
    metrics = objective.metrics(totals)
    got = [metrics[name] for name in ("loss", "loss_ahead_1", "loss_ahead_2")]
    np.testing.assert_allclose(got, nats / counted, rtol=1e-5)


@pytest.mark.long
def test_a_sharded_sequence_trains_to_the_same_numbers():
    model = dataclasses.replace(MODEL, multi_token=1)
    assert_layouts_agree(model, [js.Layout("tensor=2,context=2")], batch=BATCH, objective=NextTokens(), steps=1)


@pytest.mark.long
def test_training_gives_the_same_numbers_on_every_layout():
    model = dataclasses.replace(MODEL, attention=RingAttention())  # whose columns are in another order
    layouts = [js.Layout("fsdp=2,tensor=2,context=2"), js.Layout("data=2,fsdp=2", sequence_sharded=False)]
    assert_layouts_agree(model, layouts, batch=BATCH, objective=NextTokens(), accumulate=2)


@pytest.mark.long
def test_the_promises_of_an_objective_are_kept():
    config = TrainConfig(model=MODEL, layout=None, seq_len=16, objective=NextTokens(), batch_size=8)
    check_objective(config, BATCH)


def test_a_model_without_modules_has_its_old_parameters_and_flops():
    plain = dataclasses.replace(MODEL, multi_token=0)
    (_, with_), (_, without) = describe_model(MODEL), describe_model(plain)
    assert "multi_token" not in without and {*with_} == {*without, "multi_token"}
    block = sum(i.size for i in jax.tree.leaves(without["runs"]))
    assert MODEL.param_count() - plain.param_count() == 2 * (block + 2 * 16 * 16 + 3 * 16)
    layer = plain.flops(1, 8) - dataclasses.replace(plain, vocab=32, depth=2).flops(1, 8)
    head, join = 3 * 2 * 8 * 16 * 32, 3 * 4 * 8 * 16 * 16
    assert MODEL.flops(1, 8) - plain.flops(1, 8) == 2 * (head + join - layer)
    assert MODEL.flops(1, 8, training=False) == plain.flops(1, 8, training=False)


def test_what_does_not_fit_is_said():
    plain = dataclasses.replace(MODEL, multi_token=0)
    with raises_saying(ConfigError, "NextTokens", "the model has none", "Transformer.multi_token = 1"):
        TrainConfig(model=plain, objective=NextTokens())
    with raises_saying(ConfigError, "NextTokens.weight = 0", "above 0"):
        NextTokens(weight=0)
    with raises_saying(ConfigError, "multi_token = -1", "at least 0"):
        dataclasses.replace(MODEL, multi_token=-1)
    with raises_saying(ConfigError, "in both directions", "multi_token = 0"):
        dataclasses.replace(MODEL, attention=Bidirectional())
    with raises_saying(ConfigError, "soft prompt", "multi_token = 0"):
        dataclasses.replace(MODEL, soft_prompt=2)
    with raises_saying(ConfigError, "MuP", "parametrisation = None"):
        dataclasses.replace(MODEL, parametrisation=MuP(base_width=16))
    memory = js.nn.Mamba2(), js.nn.GatedMemory()
    with raises_saying(ConfigError, "GatedMemory reads an earlier one", "end Transformer.blocks"):
        dataclasses.replace(MODEL, depth=2, blocks=tuple(js.models.BlockConfig(m) for m in memory))
    deep = dataclasses.replace(MODEL, depth=2)
    stages = TrainConfig(model=deep, layout=js.Layout("pipeline=2").abstract(), batch_size=8)
    with raises_saying(LayoutError, "multi_token", "mesh without pipeline"):
        js.step.check(stages)
    with raises_saying(ConfigError, "cannot compute NextTokens", "mesh without pipeline"):
        js.step.check(dataclasses.replace(stages, objective=NextTokens()))
    config = TrainConfig(model=MODEL, layout=None)
    assert any("NextToken trains none" in s for s in without_effect(config, blueprint_of(config)[0]))
