"""Experts placed by predicted routing: the same outputs, and by hand how many choices cross devices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.convert.placed_experts import (
    accuracy,
    counted,
    crossing,
    devices_of,
    homes_of,
    placed,
    placement,
    predicted,
    recorded,
)
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import GroupLimit, MixtureOfExperts, SoftmaxRouter
from jaxscale.step import describe_model
from jaxscale.testing.params import random_params
from tests.truth.errors import raises_saying

# ids 0 and 1 go to experts 0 and 2 of the first layer and 1 and 2 of the second, ids 2 and 3 to the others
TOKENS = np.array([0, 2, 1, 3, 0, 3])
CHOSEN = np.array([[[0, 2], [3, 1], [2, 0], [1, 3], [0, 2], [3, 1]], [[1, 2], [0, 3], [2, 1], [3, 0], [2, 1], [0, 3]]])


def test_experts_that_the_same_tokens_choose_are_on_one_device_and_nothing_crosses():
    table = counted(TOKENS, CHOSEN, 4, 4)
    assert table[0, 0].tolist() == [2, 0, 2, 0] and table.sum() == 24
    order = placement(table, 2)
    homes = homes_of(order, 2)
    assert {*order[0, :2].tolist()} in ({0, 2}, {1, 3})
    assert homes[0, 0] == homes[0, 2] == homes[1, 1] == homes[1, 2] != homes[0, 1]
    guess = predicted(table, TOKENS, 2)
    assert accuracy(guess, CHOSEN) == 1.0
    where = devices_of(guess, homes, 2)
    assert np.bincount(where).tolist() == [3, 3] and crossing(CHOSEN, homes, where) == 0.0
    assert crossing(CHOSEN, homes, 1 - where) == 1.0
    # rows of two tokens: (0, 2), (1, 3), (0, 3): each has one token of both kinds, so that half crosses wherever it is
    assert crossing(CHOSEN, homes, devices_of(guess, homes, 2, rows=2)) == 0.5


def test_choices_that_cross_fall_as_predictions_become_right():
    random = np.random.default_rng(0)
    tokens, kind = random.integers(64, size=2000), random.integers(4, size=64)
    chosen = 4 * kind[tokens][None, :, None] + random.permuted(np.tile(np.arange(4), (1, 2000, 1)), axis=2)[..., :2]
    shuffled = random.permutation(16)[chosen]  # experts of a kind are apart before they are placed
    table = counted(tokens, shuffled, 64, 16)
    homes = homes_of(placement(table, 4), 4)
    crossed = []
    for wrong in (1.0, 0.5, 0.0):
        seen = np.where(random.random(2000) < wrong, random.integers(64, size=2000), tokens)
        guess = predicted(table, seen, 2)
        crossed.append((accuracy(guess, shuffled), crossing(shuffled, homes, devices_of(guess, homes, 4))))
    rates, shares = zip(*crossed, strict=True)
    assert rates[0] < rates[1] < rates[2] and shares[0] > shares[1] > shares[2]
    assert shares[0] == pytest.approx(0.75, abs=0.08)  # as of tokens that are anywhere on 4 devices
    assert shares[2] < 0.2  # kinds are not equally frequent, and devices are


@pytest.mark.long
def test_outputs_are_the_same_wherever_experts_are():
    mlp = MixtureOfExperts(4, 2, hidden=16, router=SoftmaxRouter(balanced=True))
    model = TransformerConfig(depth=3, vocab=32, width=16, heads=2, hidden=16, mlp=mlp, dense_layers=1, bias=True)
    graphdef, infos = describe_model(model)
    params = random_params(infos)
    order = np.array([[2, 0, 3, 1], [1, 3, 0, 2]])
    tokens = jnp.asarray(np.random.default_rng(0).integers(32, size=(2, 8)))

    @jax.jit
    def logits(params):
        return nnx.merge(graphdef, params)(tokens)

    moved = placed(model, params, order)
    before, after = (recorded(model, p, tokens) for p in (params, moved))
    assert np.array_equal(np.take_along_axis(order[:, None], after, 2), before), "the same experts, by other numbers"
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True))
    want, got = (jax.tree.leaves(logits(p))[0] for p in (params, moved))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with raises_saying(ConfigError, "order has 1 layers", "2 layers of the model"):
        placed(model, params, order[:1])
    limited = dataclasses.replace(mlp, router=SoftmaxRouter(limit=GroupLimit(2, 1)))
    with raises_saying(ConfigError, "layer 1 has a GroupLimit"):
        placed(dataclasses.replace(model, mlp=limited), params, order)
    with raises_saying(ConfigError, "devices = 3 do not divide 4", "2"):
        placement(np.ones((1, 2, 4)), 3)
