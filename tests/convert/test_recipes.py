"""Recipes against float64 NumPy written from the papers, and the properties that define them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.convert.recipes import AWQ, GPTQ, HQQ, EoRA, Inputs, RoundToNearest, output_error
from jaxscale.convert.recipes.allocation import real_bits, whole_bits
from jaxscale.errors import ConfigError, DataError
from jaxscale.nn.formats import FloatZeros, Stored
from tests.truth.errors import raises_saying

N, OUT = 32, 24


def drawn(seed=0, tokens=200, n=N, out=OUT):
    """A matrix, and correlated inputs of it."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(tokens, n)) @ (np.eye(n) + 0.4 * draw.normal(size=(n, n))) * draw.uniform(0.2, 3, n)
    return draw.normal(size=(n, out)).astype(np.float32), x.astype(np.float32)


def inputs_of(x):
    x = x.astype(np.float64)
    return Inputs(*(jnp.asarray(v, jnp.float32) for v in (x.T @ x / len(x), np.abs(x).mean(0), np.abs(x).max(0))))


def error(weight, kernel, x):
    """The mean over tokens of the squared error of the output, in float64."""
    change = np.asarray(weight.dense(), np.float64).reshape(kernel.shape) - kernel
    return float(np.sum((x.astype(np.float64) @ change) ** 2) / len(x))


def numpy_gptq(w, x, bits, group, damping=0.01, order=None):
    """Algorithm 1 of Frantar et al. 2022 without lazy batches, with a scale and zero point for each group, in float64.

    The inverse is updated by Gaussian elimination (equation 3 of the paper), and not by a Cholesky factor.
    """
    w, x = w.astype(np.float64).copy(), x.astype(np.float64)
    h = x.T @ x / len(x)
    h += damping * np.mean(np.diag(h)) * np.eye(len(h))
    top = 2**bits - 1

    def scales(part):
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        scale = np.where(high > low, (high - low) / top, 1.0)
        return scale, np.clip(np.round(-low / scale), 0, top)

    order = np.arange(len(w)) if order is None else order
    static = [scales(w[g : g + group]) for g in range(0, len(w), group)]
    inverse, values = np.linalg.inv(h[order][:, order]), np.zeros_like(w)
    for k, i in enumerate(order):
        if k % group == 0 and np.array_equal(order, np.arange(len(w))):
            static[k // group] = scales(w[k : k + group])
        scale, zero = static[i // group]
        q = np.clip(np.round(w[i] / scale + zero), 0, top)
        values[i] = (q - zero) * scale
        step = (w[i] - values[i]) / inverse[0, 0]
        rest = order[k + 1 :]
        w[rest] -= inverse[1:, :1] * step
        inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    return values


@pytest.mark.parametrize(("bits", "group", "by_activation"), [(4, 8, False), (3, None, False), (2, 16, True)])
def test_gptq_equals_the_papers_algorithm(bits, group, by_activation):
    w, x = drawn()
    recipe = GPTQ(bits=bits, group=group, by_activation=by_activation)
    got = np.asarray(recipe.quantize(jnp.asarray(w), (-2,), inputs_of(x)).dense())
    order = np.argsort(-np.diag(np.asarray(inputs_of(x).second, np.float64)), kind="stable") if by_activation else None
    want = numpy_gptq(w, x, bits, group or N, order=order)
    # a weight in the middle between two numbers may go either way in float32, and moves those after it
    same = np.isclose(got, want, atol=1e-4).all(0)
    assert same.mean() > 0.9
    assert error_of(got, w, x) == pytest.approx(error_of(want, w, x), rel=0.02)


def error_of(values, w, x):
    return float(np.sum((x.astype(np.float64) @ (values.astype(np.float64) - w)) ** 2) / len(x))


@pytest.mark.parametrize(
    "weights",
    [None, Stored("e2m1", group=8, scale="e8m0"), pytest.param(Stored("nf4", group=8), marks=pytest.mark.long)],
)
def test_gptq_has_a_smaller_output_error_than_rounding_to_nearest(weights):
    w, x = drawn(1)
    kernel = jnp.asarray(w).reshape(4, 8, OUT)  # heads and widths of heads
    recipes = [kind(bits=3, group=8, weights=weights) for kind in (RoundToNearest, GPTQ)]
    nearest, gptq = (r.quantize(kernel, (-3, -2), inputs_of(x)) for r in recipes)
    assert gptq.shape == nearest.shape == kernel.shape
    assert error(gptq, w, x) < 0.8 * error(nearest, w, x)
    assert float(
        output_error(jnp.asarray(w - np.asarray(gptq.dense()).reshape(w.shape)), inputs_of(x))
    ) == pytest.approx(error(gptq, w, x), rel=1e-3)


def test_gptq_leaves_out_an_input_that_is_always_zero():
    w, x = drawn(2)
    x[:, 3] = 0
    got = np.asarray(GPTQ(bits=4, group=8).quantize(jnp.asarray(w), (-2,), inputs_of(x)).dense())
    assert np.all(got[3] == 0) and np.isfinite(got).all()


def test_moments_that_are_no_moments_are_one_sentence():
    w, x = drawn(3)
    inputs = inputs_of(x)
    with raises_saying(DataError, "calibrate on more tokens"):
        GPTQ(bits=4, group=8).quantize(jnp.asarray(w), (-2,), inputs._replace(second=-inputs.second))


@pytest.mark.parametrize("bits", [2, 4])
def test_hqq_has_no_larger_error_of_its_norm_than_rounding_to_nearest(bits):
    draw = np.random.default_rng(4)
    w = (draw.normal(size=(2, N, OUT)) * draw.choice([1, 4], (2, N, OUT), p=[0.95, 0.05])).astype(np.float32)
    group = 16
    got, nearest = (
        np.asarray(r.quantize(jnp.asarray(w), (-2,)).dense()) for r in (HQQ(bits, group), RoundToNearest(bits, group))
    )
    norms = [
        (np.abs(v - w).astype(np.float64) ** 0.7).reshape(2, N // group, group, OUT).sum(2) for v in (got, nearest)
    ]
    assert np.all(norms[0] <= norms[1] * (1 + 1e-5))
    assert norms[0].sum() < 0.97 * norms[1].sum()


def test_a_repair_has_the_least_output_error_of_its_rank():
    w, x = drawn(5, out=40)
    kernel, inputs = jnp.asarray(w).reshape(4, 8, 40), inputs_of(x)
    rounded = RoundToNearest(2, 8)
    recipe = EoRA(recipe=rounded, rank=6, dtype="float32")
    repaired = recipe.quantize(kernel, (-3, -2), inputs)
    plain = recipe.quantize(kernel, (-3, -2))  # the singular vectors of the error itself
    assert repaired.shape == (4, 8, 40) and repaired.a.shape == (4, 8, 6) and repaired.b.shape == (6, 40)
    errors = [error(v, w, x) for v in (rounded.quantize(kernel, (-3, -2)), plain, repaired)]
    assert errors[2] < 0.9 * errors[1] < 0.9 * errors[0]
    # a bound from linear algebra: what is left are the singular values of (moments)^(1/2) · error after the first six
    change = w - np.asarray(rounded.quantize(kernel, (-3, -2)).dense(), np.float64).reshape(w.shape)
    values = np.linalg.svd(x.astype(np.float64) @ change / np.sqrt(len(x)), compute_uv=False)
    assert errors[2] == pytest.approx(np.sum(values[6:] ** 2), rel=1e-3)


def test_bits_in_closed_form_meet_the_budget_and_lose_equally():
    draw = np.random.default_rng(6)
    sizes = draw.integers(1, 50, 9) * 64
    costs = sizes * 10 ** draw.normal(size=9)
    bits = real_bits(costs, sizes, 3.3)
    assert np.sum(bits * sizes) == pytest.approx(3.3 * sizes.sum())
    assert np.allclose(costs * 4.0**-bits / sizes, (costs * 4.0**-bits / sizes)[0])
    other = bits + draw.normal(size=9) * 0.3
    other += np.sum((bits - other) * sizes) / sizes.sum()  # any other bits of the same budget
    assert np.sum(costs * 4.0**-bits) < np.sum(costs * 4.0**-other)


@pytest.mark.parametrize("mean", [2, 2.5, 3, 4.7])
def test_whole_bits_are_within_the_budget_and_lose_no_more_than_equal_bits(mean):
    draw = np.random.default_rng(7)
    for _ in range(20):
        sizes = draw.integers(1, 50, 6) * 64
        costs = sizes * 10 ** (1.5 * draw.normal(size=6))
        bits = whole_bits(costs, sizes, mean, (2, 3, 4, 5, 6, 8))
        assert set(bits) <= {2, 3, 4, 5, 6, 8} and np.sum(bits * sizes) <= mean * sizes.sum()
        assert np.sum(costs * 4.0**-bits) <= np.sum(costs * 4.0 ** -np.floor(mean)) * (1 + 1e-12)
    assert np.all(whole_bits([1.0, 4.0**3], [64, 64], 3.5, (2, 3, 4, 5)) == [2, 5])


def test_a_recipe_with_settings_that_do_not_fit_is_one_sentence():
    with raises_saying(ConfigError, "GPTQ.bits = 9"):
        GPTQ(bits=9)
    with raises_saying(ConfigError, "FloatZeros"):
        HQQ(weights=Stored("int4"))
    with raises_saying(ConfigError, "int4"):
        GPTQ(weights=Stored("kmeans4"))
    with raises_saying(ConfigError, "FloatZeros"):
        FloatZeros(scale="e8m0")
    with raises_saying(ConfigError, "EoRA.bits has no effect", "EoRA.recipe"):
        EoRA(bits=2)
    with raises_saying(ConfigError, "each matrix by itself"):
        EoRA(recipe=AWQ())
    with raises_saying(ConfigError, "damping"):
        GPTQ(damping=0.0)
