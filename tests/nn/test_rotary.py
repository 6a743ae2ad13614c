"""Rotary embedding against complex numbers, and its scalings against their papers, in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.nn import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    ProportionalScaling,
    Rotary,
    YarnScaling,
    rotate,
)
from tests.truth import numpy_transformer as truth
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying

SCALINGS = [
    None,
    LinearScaling(8.0),
    NTKScaling(4.0),
    ProportionalScaling(0.25),
    ProportionalScaling(0.7, 4.0),
    Llama3Scaling(),
    Llama3Scaling(32.0, 1.0, 4.0, 256),
    YarnScaling(),
    YarnScaling(40.0, 32.0, 1.0, 128),
    YarnScaling(0.5),
    YarnScaling(40.0, 32.0, 1.0, 128, mscale=0.7, mscale_all_dim=1.1),
    # of the two rows, one is longer than it was trained on
    LongRopeScaling(tuple(np.linspace(1, 3, 16)), tuple(np.linspace(2, 40, 16)), original_length=100, factor=32.0),
    LongRopeScaling((1.0,) * 16, (2.0,) * 16, original_length=100, length=101),
]


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_queries_are_rotated_by_the_published_angles(scaling, theta):
    head_dim, length = 32, 48
    x = np.random.default_rng(0).normal(size=(2, length, 3, head_dim)).astype(np.float32)
    place = np.stack([np.arange(length), np.arange(length)[::-1] * 3]).astype(np.int32)
    cos, sin = Rotary(theta, scaling).tables(jnp.asarray(place), head_dim)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == (2, length, head_dim // 2)
    got = rotate(jnp.asarray(x), cos, sin)
    want = []
    for row, p in zip(x, place, strict=True):
        frequencies, factor = truth.rotary_frequencies(head_dim, theta, scaling, int(p.max()) + 1)
        want.append(truth.rotate(row, p, frequencies) * factor)
    # an angle of a hundred radians is known in float32 to 4e-6
    assert_leaves_agree(np.asarray(got), np.stack(want))


@pytest.mark.parametrize("scaling", [NTKScaling(4.0), Llama3Scaling(), YarnScaling()], ids=str)
def test_a_scaling_stretches_the_lowest_frequency_in_full_and_the_highest_not_at_all(scaling):
    plain = 5e5 ** (-np.arange(64) / 64)
    stretched, _ = scaling(plain, 5e5)
    np.testing.assert_allclose(plain[0] / stretched[0], 1.0, rtol=1e-12)
    np.testing.assert_allclose(plain[-1] / stretched[-1], scaling.factor, rtol=1e-12)
    assert (np.diff(stretched) < 0).all()


def test_only_distances_matter():
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 16)).astype(np.float32)
    rotary = Rotary()

    def score(i, j):
        at = lambda p: rotate(jnp.asarray(x), *rotary.tables(jnp.array([[p]]), 16))  # noqa: E731
        return float(jnp.sum(at(i) * at(j)))

    np.testing.assert_allclose(score(3, 7), score(20, 24), rtol=1e-5)
    assert abs(score(3, 7) - score(3, 8)) > 1e-3


def test_bfloat16_queries_are_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 16)), jnp.bfloat16)
    cos, sin = Rotary().tables(jnp.arange(8)[None], 16)
    got = rotate(x, cos, sin)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


def test_a_fraction_of_a_head_is_rotated_and_the_rest_is_unchanged():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 2, 16)), jnp.float32)
    turned = rotate(x, *Rotary(fraction=0.5).tables(jnp.arange(4)[None], 16))
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(turned[..., :8], rotate(x[..., :8], *Rotary().tables(jnp.arange(4)[None], 8)))
    with raises_saying(ConfigError, "Rotary.fraction = 0.2", "3"):
        Rotary(fraction=0.2).tables(jnp.arange(4)[None], 16)


def test_factors_that_are_not_one_for_each_pair_are_refused():
    with raises_saying(ConfigError, "LongRopeScaling.short has 3 factors", "8 pairs"):
        Rotary(scaling=LongRopeScaling((1.0,) * 3, (1.0,) * 8)).tables(jnp.arange(4)[None], 16)


def test_an_odd_head_is_refused():
    with raises_saying(ConfigError, "even head_dim", "15", "16"):
        Rotary().tables(jnp.arange(4)[None], 15)
