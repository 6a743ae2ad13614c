"""Fewer experts: exact where nothing used those that go, and closer to the whole model merged than dropped."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.cli import main
from jaxscale.convert.fewer_experts import loads_of, most_chosen, reduced, with_experts
from jaxscale.errors import ConfigError, RunError
from jaxscale.models import TransformerConfig
from jaxscale.nn import MixtureOfExperts, NoFeedForward, SigmoidRouter
from jaxscale.step.state import describe_model
from tests.truth.errors import raises_saying

TOP_1 = MixtureOfExperts(experts=6, top_k=1, hidden=12)
MODEL = TransformerConfig(depth=2, vocab=32, width=16, heads=2, hidden=24, dense_layers=1, mlp=TOP_1)
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 24))


def random(model):
    draw = np.random.default_rng(1)
    return jax.tree.map(lambda i: draw.normal(0, 0.4, i.shape).astype(i.dtype), describe_model(model)[1])


def logits_and_loads(model, params):
    graphdef, _ = describe_model(model)

    @jax.jit
    def apply(params):
        whole = nnx.merge(graphdef, params)
        return whole(TOKENS), whole.hidden_and_stats(TOKENS)[1]

    logits, stats = apply(params)
    table = next(np.asarray(v) for k, v in stats.items() if "experts_" in k)
    rows = table.reshape(model.depth, -1)
    return np.asarray(logits), {n: row[:-2] for n, row in enumerate(rows) if row[-2] > 0}


def mixtures(params):
    return [b["mlp"] for run in params["runs"].values() for b in run["blocks"].values() if "router" in b["mlp"]]


def test_experts_that_no_token_chose_are_dropped_and_merged_exactly():
    model = dataclasses.replace(MODEL, mlp=dataclasses.replace(TOP_1, top_k=2, router=SigmoidRouter()))
    params = random(model)
    for mlp in mixtures(params):
        mlp["load_bias"][:, (1, 4)] = -9
    want, loads = logits_and_loads(model, params)
    assert all({1, 4} <= set(np.flatnonzero(load == 0)) for load in loads.values())
    smaller = with_experts(model, 4)
    one, other = (reduced(model, params, loads, 4, method) for method in ("drop", "merge"))
    got, after = logits_and_loads(smaller, one)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert all(np.array_equal(after[n], load[most_chosen(load, 4)]) for n, load in loads.items())
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_copies_of_experts_in_another_order_merge_exactly_and_dropping_them_does_not():
    params, draw = random(MODEL), np.random.default_rng(2)
    for mlp in mixtures(params):
        for copy, of in ((3, 0), (4, 1), (5, 2)):
            order = draw.permutation(12)
            mlp["router"][:, :, copy] = 1.01 * mlp["router"][:, :, of]
            for name, axis in (("gate", 2), ("up", 2), ("down", 1)):
                mlp[name][:, copy] = np.take(mlp[name][:, of], order, axis)
    want, loads = logits_and_loads(MODEL, params)
    assert all(load.sum() == TOKENS.size for load in loads.values())
    loads = {n: np.array([3.0, 3, 3, 1, 1, 1]) for n in loads}
    smaller = with_experts(MODEL, 3)
    got, _ = logits_and_loads(smaller, reduced(MODEL, params, loads, 3, "merge"))
    np.testing.assert_allclose(got, want, atol=2e-5)
    backwards = {n: np.array([3.0, 3, 1, 2, 1, 1]) for n in loads}  # 0, 1 and the copy of 0 remain
    dropped, _ = logits_and_loads(smaller, reduced(MODEL, params, backwards, 3, "drop"))
    assert np.abs(dropped - want).max() > 0.05


def test_layers_without_a_feed_forward_stay():
    model = dataclasses.replace(MODEL, dense_mlp=NoFeedForward)
    small = reduced(model, random(model), {1: np.arange(6.0)}, 4)
    want = describe_model(with_experts(model, 4))[1]
    assert jax.tree.map(np.shape, small) == jax.tree.map(lambda i: i.shape, want)


@pytest.mark.long
def test_a_run_is_pruned_by_what_it_recorded_and_trains_on(tmp_path, capsys):
    data = js.data.synthetic(documents=40, length=60, vocab_size=32)
    options = dict(data=data, layout=None, steps=4, batch_size=8, seq_len=16, eval_batches=0, quiet=True)
    run = js.fit(model=MODEL, run=tmp_path / "whole", **options)
    assert main(["prune", str(run.path), str(tmp_path / "fewer"), "--experts", "4", "--method", "merge"]) == 0
    assert "parameters of" in capsys.readouterr().out
    fewer = js.load(tmp_path / "fewer")
    assert fewer.config.model.mlp.experts == 4 and set(loads_of(run)) == {1}
    again = js.fit(model=fewer.config.model, start=js.train.FromRun(str(fewer.path)), run=tmp_path / "on", **options)
    assert len(again.generate([1, 2], max_tokens=3, temperature=0).ids) == 3
    with raises_saying(RunError, "has no experts.jsonl", "jaxscale train --from"):
        loads_of(fewer)


def test_what_cannot_be_pruned_is_one_sentence():
    with raises_saying(ConfigError, "experts = 6: must be a whole number from 1", "to 5"):
        with_experts(MODEL, 6)
    with raises_saying(ConfigError, "experts = True: must be a whole number"):
        with_experts(MODEL, True)
    with raises_saying(ConfigError, "this model's is not; jaxscale fold"):
        with_experts(dataclasses.replace(MODEL, mlp=js.nn.SwiGLU, dense_layers=0), 2)
