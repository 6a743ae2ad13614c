"""Mixtures of experts' predictions: a row's total is the log of the mean of its probabilities."""

from __future__ import annotations

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.infer import mixture_logprobs
from tests.truth.errors import raises_saying


def test_a_rows_total_is_the_log_of_the_mean_probability_and_later_tokens_change_nothing():
    logprobs = np.log(np.random.default_rng(0).uniform(0.05, 0.9, size=(3, 4, 7)))
    for prior in (None, (0.5, 0.2, 0.3)):
        mixed = np.asarray(mixture_logprobs(np.float32(logprobs), prior))
        weights = np.full(3, 1 / 3) if prior is None else np.array(prior)
        for s in range(1, 8):
            rows = np.exp(logprobs[..., :s].sum(-1))
            np.testing.assert_allclose(mixed[:, :s].sum(-1), np.log(np.tensordot(weights, rows, 1)), rtol=1e-5)


def test_an_expert_that_alone_can_predict_gets_all_weight():
    logprobs = np.full((2, 1, 5), np.log(0.9), np.float32)
    logprobs[1] = -200.0
    np.testing.assert_allclose(mixture_logprobs(logprobs)[0], [np.log(0.45), *[np.log(0.9)] * 4], rtol=1e-5)


def test_a_prior_that_does_not_fit_is_refused():
    with raises_saying(ConfigError, "2 weights for 3 experts; give 3"):
        mixture_logprobs(np.zeros((3, 1, 1), np.float32), (0.5, 0.5))
    with raises_saying(ConfigError, "add up to 1"):
        mixture_logprobs(np.zeros((2, 1, 1), np.float32), (0.5, 0.6))
