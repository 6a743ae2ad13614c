"""Value losses against float64 integrals of scipy and a histogram of NumPy, and a fit that returns the values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from jaxscale.errors import ConfigError
from jaxscale.step import HLGauss, SquaredError, TwoHot
from tests.truth.errors import raises_saying

DRAW = np.random.default_rng(0)
VALUES = np.concatenate([DRAW.uniform(-2, 3, 30), [-2, 3, 0.5]])
LOSSES = (HLGauss(-2.0, 3.0, 25), HLGauss(-2.0, 3.0, 25, sigma=0.4), TwoHot(-2.0, 3.0, 11))


def expected(loss):
    """The distributions, float64: of a truncated normal by scipy, or of the value shared by hand."""
    if isinstance(loss, TwoHot):
        return np.stack([[np.interp(v, loss.centers, row) for row in np.eye(loss.bins)] for v in VALUES])
    sigma = loss.sigma or 0.75 * 5 / loss.bins
    edges = np.linspace(-2, 3, loss.bins + 1)
    a, b = (-2 - VALUES) / sigma, (3 - VALUES) / sigma
    return np.diff(stats.truncnorm.cdf(edges, a[:, None], b[:, None], loc=VALUES[:, None], scale=sigma), axis=1)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_distribution_cross_entropy_and_gradient_are_those_of_float64(loss):
    want = expected(loss)
    logits = DRAW.normal(0, 2, (len(VALUES), loss.outputs))
    np.testing.assert_allclose(loss.probabilities(jnp.asarray(VALUES)), want, atol=1e-6)
    np.testing.assert_allclose(want.sum(1), 1, rtol=1e-12)
    nats = np.sum(-want * special.log_softmax(logits, axis=1), axis=1)
    np.testing.assert_allclose(loss.loss(logits, VALUES), nats, rtol=2e-6)
    slopes = jax.grad(lambda x: jnp.sum(loss.loss(x, VALUES)))(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(slopes, special.softmax(logits, axis=1) - want, atol=2e-6)
    centers = expected_centers(loss)
    np.testing.assert_allclose(loss.mean(logits), special.softmax(logits, axis=1) @ centers, atol=3e-6)


def expected_centers(loss):
    if isinstance(loss, TwoHot):
        return -2 + 5 * np.arange(loss.bins) / (loss.bins - 1)
    return -2 + 5 * (np.arange(loss.bins) + 0.5) / loss.bins


def test_the_mean_of_the_target_is_the_value():
    inside = jnp.linspace(-1.0, 2.0, 50)
    for loss in LOSSES[:1] + LOSSES[2:]:
        np.testing.assert_allclose(loss.mean(jnp.log(loss.probabilities(inside) + 1e-30)), inside, atol=3e-3)
    np.testing.assert_array_equal(LOSSES[0].probabilities(jnp.array([9.0])), LOSSES[0].probabilities(jnp.array([3.0])))


def test_losses_take_any_dtype_and_no_gradient_flows_into_targets():
    for loss in (LOSSES[0], SquaredError()):
        logits = jnp.ones((2, 3, loss.outputs), jnp.bfloat16)
        out = loss.loss(logits, jnp.ones((2, 3), jnp.bfloat16))
        assert out.shape == loss.mean(logits).shape == (2, 3) and out.dtype == jnp.float32
        slope = jax.grad(lambda t, loss=loss: jnp.sum(loss.loss(jnp.ones((3, loss.outputs)), t)))(jnp.ones(3))
        assert not slope.any()
    assert SquaredError().loss(jnp.array([[3.0]]), jnp.array([1.0])) == 2


def test_settings_out_of_range_are_named():
    for make, words in (
        (lambda: HLGauss(1.0, 1.0), ("HLGauss.low = 1.0", "below high")),
        (lambda: TwoHot(0.0, float("inf")), ("TwoHot.low", "finite")),
        (lambda: TwoHot(0.0, 1.0, 1), ("TwoHot.bins = 1", "at least 2")),
        (lambda: HLGauss("a", 1.0), ("HLGauss.low = 'a'", "numbers")),
        (lambda: TwoHot(0.0, 1.0, 5).loss(jnp.zeros((2, 4)), jnp.zeros(2)), ("5 bins", "(2, 4)", "outputs")),
        (lambda: HLGauss(0.0, 1.0, sigma=0.0), ("HLGauss.sigma = 0.0", "above 0")),
    ):
        with raises_saying(ConfigError, *words):
            make()
