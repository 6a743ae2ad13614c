"""The closed forms against tables of values, on a grid and at every boundary between two codes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise import FORMATS, codec
from pallas_kernels.blockwise.codecs import MOMENT_DOWN, encode_stochastic
from pallas_kernels.dispatch import KernelError
from tests.pallas_kernels.blockwise.vectors import VECTORS

CODECS = [c for pair in FORMATS.values() for c in pair]
NAMES = [f"{c.name} {'signed' if c.signed else 'unsigned'}" for c in CODECS]
ROUNDING = 2e-6
"""Relative tolerance: near a tie, within a few float32 roundings, either code is right."""

every_codec = pytest.mark.parametrize("code", CODECS, ids=NAMES)


def _excess(code, x):
    """Return how much farther than the nearest value the chosen one is, relative to x."""
    values, x = code.values(), np.asarray(x, np.float32).astype(np.float64)
    got = np.asarray(jax.jit(code.decode)(jax.jit(code.encode)(jnp.asarray(x, jnp.float32))), np.float64)
    right = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    best = np.minimum(abs(x - values[right]), abs(x - values[right - 1]))
    return (abs(x - got) - best) / np.maximum(abs(x), 1e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_that_of_bitsandbytes(signed):
    code, want = codec("dynamic", signed), VECTORS["map_signed" if signed else "map_unsigned"]
    got = np.asarray(code.decode(jnp.arange(256, dtype=jnp.uint8)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(code.values(), want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got, code.values(), rtol=1e-6, atol=0)  # the smallest are as exact as the largest


@every_codec
def test_every_code_comes_back(code):
    places = jnp.arange(len(code.values()))
    codes = code.at(places)
    assert codes.dtype == code.dtype
    np.testing.assert_array_equal(code.order(codes), places)
    np.testing.assert_allclose(code.decode(codes), code.values(), rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(code.order(code.encode(code.decode(codes))), places)


@every_codec
def test_the_nearest_value_is_chosen_for_a_hundred_thousand_numbers_of_every_magnitude(code):
    random = np.random.default_rng(0)
    sign = random.choice([-1, 1], 100_000) if code.signed else 1
    for x in (10.0 ** random.uniform(-8, 0, 100_000) * sign, random.uniform(-1 if code.signed else 0, 1, 100_000)):
        assert _excess(code, x).max() < ROUNDING


@every_codec
def test_the_nearest_value_is_chosen_on_both_sides_of_every_decision(code):
    values = code.values()
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    middles = middles[np.abs(middles) > 1e-12]
    for nudge in (1 - 1e-5, 1 - 3e-7, 1, 1 + 3e-7, 1 + 1e-5):
        assert _excess(code, np.clip(middles * np.float32(nudge), values[0], 1)).max() < ROUNDING


@every_codec
def test_a_positive_second_moment_never_becomes_zero(code):
    x = np.concatenate([[1.2e-38], 10.0 ** np.random.default_rng(3).uniform(-37, 0, 20_000), [1.0]]).astype(np.float32)
    nearest, moments = (np.asarray(jax.jit(f)(x)) for f in (code.encode, code.encode_moment))
    if code.signed:
        np.testing.assert_array_equal(code.order(moments), code.order(nearest))
    else:
        assert np.asarray(code.order(moments)).min() == 1
    zero = code.encode_moment(jnp.zeros(3))
    np.testing.assert_array_equal(code.decode(zero), 0)


def test_a_second_moment_goes_down_by_a_tenth_at_most_and_up_to_the_next_code():
    code = codec("dynamic", False)
    random = np.random.default_rng(4)
    x = np.sort(np.concatenate([10.0 ** random.uniform(-6.4, 0, 100_000), random.uniform(0, 1, 100_000)]))
    x = x[x > code.values()[1]].astype(np.float32)
    places = np.asarray(jax.jit(code.encode_moment)(x)).astype(int)
    over = np.asarray(jax.jit(code.encode)(x)).astype(int)
    assert np.all(np.diff(places) >= 0) and np.all((places == over) | (places == over + 1))
    assert (x / code.values()[places]).max() < MOMENT_DOWN * (1 + 1e-5)
    assert np.mean(places == over) > 0.9 and np.all((places == over)[x > 0.05])


@pytest.mark.parametrize("signed", [True, False])
def test_a_table_gives_the_same_codes_but_at_ties(signed):
    code, x = codec("dynamic", signed), 10.0 ** np.random.default_rng(1).uniform(-8, 0, 100_000)
    x = x.astype(np.float32)
    middles = (code.values()[1:] + code.values()[:-1]) / 2
    off = np.asarray(jax.jit(code.encode)(x)).astype(int) - np.searchsorted(middles, x.astype(np.float64))
    assert np.count_nonzero(off) <= 5 and abs(off).max() <= 1


@pytest.mark.parametrize("power", range(-6, 1))
def test_powers_of_ten_between_two_decades_are_rounded_right(power):
    for signed in (True, False):
        assert _excess(codec("dynamic", signed), [10.0**power]).max() < ROUNDING


@every_codec
def test_random_rounding_is_right_on_average(code):
    values = code.values()
    low = values[1] if code.signed else 0.0
    x = jnp.asarray(np.random.default_rng(2).uniform(low, 1, 64), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    each = jax.jit(jax.vmap(lambda k: code.decode(encode_stochastic(code, x, k))))(keys)
    right = np.searchsorted(values, np.asarray(x, np.float64))
    gap = values[right] - values[right - 1]
    assert np.all((each >= values[right - 1] - 1e-6) & (each <= values[right] + 1e-6))  # one of the two neighbours
    assert np.all(abs(np.mean(each, 0) - x) < 5 * gap / 2 / np.sqrt(4000) + 1e-6)  # five standard errors at most


@every_codec
def test_random_rounding_keeps_values_that_have_a_code(code):
    codes = code.at(jnp.arange(len(code.values())))
    for seed in range(5):
        got = encode_stochastic(code, code.decode(codes), jax.random.key(seed))
        np.testing.assert_array_equal(code.order(got), code.order(codes))


def test_an_unknown_format_is_refused_with_the_nearest_name():
    with pytest.raises(KernelError, match="no 8-bit format 'dynamik'.*did you mean 'dynamic'"):
        codec("dynamik", True)
