"""Axes: their values by quantile and as a list."""

from __future__ import annotations

import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.sweep import Choice, Integers, LogIntegers, LogUniform, Uniform
from jaxscale.sweep.axes import space_of, split
from tests.truth.errors import raises_saying

QUANTILES = (np.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize(
    ("axis", "want"),
    [
        (Uniform(1.0, 3.0), lambda u: 1 + 2 * u),
        (LogUniform(1e-4, 1e-1), lambda u: np.exp(np.log(1e-4) + u * np.log(1e3))),
    ],
    ids=["uniform", "log_uniform"],
)
def test_a_distribution_has_these_quantiles(axis, want):
    np.testing.assert_allclose([axis.at(u) for u in QUANTILES], want(QUANTILES), rtol=1e-12)
    assert axis.grid() is None


@pytest.mark.parametrize(
    ("axis", "weights"),
    [
        (Integers(2, 5), [1, 1, 1, 1]),
        (LogIntegers(1, 4), np.log(np.arange(2, 6) / np.arange(1, 5))),
        (Choice(("a", "b", "c")), [1, 1, 1]),
    ],
    ids=["integers", "log_integers", "choice"],
)
def test_each_value_has_its_share_of_the_quantiles(axis, weights):
    values = [axis.at(u) for u in QUANTILES]
    got = [values.count(value) / len(values) for value in axis.grid()]
    np.testing.assert_allclose(got, np.asarray(weights) / np.sum(weights), atol=1e-3)
    assert sum(got) == pytest.approx(1)  # and no other value


def test_joined_bindings_are_taken_apart():
    space = space_of({"train.lr, train.batch_size": [(1e-3, 8), (2e-3, 16)]}, None)
    assert split({key: axis.at(0.9) for key, axis in space.items()}) == {"train.lr": 2e-3, "train.batch_size": 16}


def test_seeds_are_an_axis():
    assert list(space_of({}, 3)["train.seed"].grid()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: space_of({}, None), ["sweep.axes is empty"]),
        (lambda: space_of({"train.lr": []}, None), ["sweep.axes['train.lr'] has no values"]),
        (lambda: space_of({"train.lr": 1e-3}, None), ["'train.lr'", "list of values", "0.001"]),
        (lambda: space_of({"train.lr": [1], "train.lr,train.steps": [(1, 2)]}, None), ["'train.lr' twice"]),
        (lambda: space_of({"train.seed": [1]}, 2), ["'train.seed' twice"]),
        (lambda: space_of({"a.b, a.c": [(1, 2), 3]}, None), ["has 2 bindings", "3 is not a tuple"]),
        (lambda: space_of({"train.lr": [1e-3, 2e-3, 0.001]}, None), ["'train.lr'", "0.001 twice", "sweep.seeds"]),
        (lambda: space_of({}, 0), ["sweep.seeds = 0"]),
        (lambda: Uniform(2.0, 1.0), ["uniform.low = 2.0", "below high"]),
        (lambda: LogUniform(0.0, 1.0), ["log_uniform.low = 0.0", "above 0"]),
        (lambda: Choice(()), ["choice.values is empty"]),
    ],
    ids=[
        "nothing",
        "no values",
        "no list",
        "twice",
        "seeds twice",
        "no tuple",
        "value twice",
        "no seed",
        "order",
        "log",
        "choice",
    ],
)
def test_a_wrong_axis_is_one_sentence(make, words):
    with raises_saying(ConfigError, *words):
        make()
