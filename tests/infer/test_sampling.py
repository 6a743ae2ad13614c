"""What a next token is drawn from, against `transformers`' own rules written out in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.infer.sampling import Sampling, SamplingArrays, choose, processed

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(6, 40)) * 3
SEEN = RANDOM.random((6, 40)) < 0.2
SETTINGS = [
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.6, temperature=1.3),
    Sampling(min_p=0.1),
    Sampling(top_k=8, top_p=0.8, min_p=0.05, repetition_penalty=1.4, temperature=0.9),
    Sampling(temperature=0.0, repetition_penalty=2.0),
]


def _softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def _distribution(x, s, seen):
    """Penalty, temperature, top-k, top-p, min-p, one after the other."""
    x = np.where(seen, np.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty), x)
    if s.temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    x = x / s.temperature
    if s.top_k is not None:
        x = np.where(x < np.sort(x)[-s.top_k], -np.inf, x)
    p = _softmax(x)
    order, total = np.argsort(-p), 0.0
    for i in order:
        if total >= s.top_p:
            x[i] = -np.inf
        total += p[i]
    p = _softmax(x)
    x = np.where(p < s.min_p * p.max(), -np.inf, x)
    return _softmax(x)


def _sampled():
    sampling = SamplingArrays.of(SETTINGS, LOGITS.shape[1])
    shaped = processed(jnp.asarray(LOGITS, jnp.float32), sampling, jnp.asarray(SEEN))
    return np.asarray(jax.nn.softmax(shaped, axis=-1))


def test_top_k_alone_keeps_as_many_however_unlikely():
    logits = np.random.default_rng(0).normal(size=(1, 32000)) * 5
    sampling = SamplingArrays.of([Sampling(top_k=31999)], logits.shape[1])
    assert np.isfinite(processed(jnp.asarray(logits, jnp.float32), sampling)).sum() == 31999


@pytest.mark.parametrize("i", range(5), ids=["temperature", "top_k", "top_p", "min_p", "all"])
def test_settings_give_the_distribution_they_promise(i):
    np.testing.assert_allclose(_sampled()[i], _distribution(LOGITS[i], SETTINGS[i], SEEN[i]), atol=1e-6)


def test_temperature_0_takes_the_likeliest_after_the_penalty():
    sampling = SamplingArrays.of(SETTINGS, 40)
    tokens = choose(jnp.asarray(LOGITS, jnp.float32), sampling, jnp.arange(6), jnp.asarray(SEEN)).token
    assert tokens[5] == np.argmax(_distribution(LOGITS[5], SETTINGS[5], SEEN[5]))


def test_draws_follow_the_distribution():
    n = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[4], jnp.float32), (n, 40))
    sampling = jax.tree.map(lambda x: np.broadcast_to(x[4], n), SamplingArrays.of(SETTINGS, 40))
    seen = jnp.broadcast_to(jnp.asarray(SEEN[4]), logits.shape)
    counts = np.bincount(np.asarray(choose(logits, sampling, jnp.arange(n), seen).token), minlength=40)
    expected = _distribution(LOGITS[4], SETTINGS[4], SEEN[4])
    assert np.all(counts[expected == 0] == 0)
    deviation = np.abs(counts / n - expected) / np.sqrt(expected * (1 - expected) / n + 1e-12)
    assert deviation[expected > 0].max() < 4.5  # standard deviations


def test_a_choice_does_not_depend_on_its_company():
    logits, sampling, positions = jnp.asarray(LOGITS, jnp.float32), SamplingArrays.of(SETTINGS, 40), jnp.arange(6) + 9
    together = choose(logits, sampling, positions)
    for i in range(6):
        alone = choose(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], sampling), positions[i : i + 1])
        assert alone.token[0] == together.token[i]
        assert alone.logprob[0] == pytest.approx(float(together.logprob[i]), abs=1e-6)


def test_log_probabilities_are_the_models_own():
    chosen = choose(jnp.asarray(LOGITS, jnp.float32), SamplingArrays.of(SETTINGS, 40), jnp.arange(6), jnp.asarray(SEEN))
    for i, token in enumerate(chosen.token):
        assert chosen.logprob[i] == pytest.approx(np.log(_softmax(LOGITS[i])[token]), abs=1e-5)


@pytest.mark.parametrize(
    "wrong", [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(min_p=1.5), dict(stop=("",)), dict(seed=-1)]
)
def test_a_setting_out_of_its_range_is_named(wrong):
    with pytest.raises(ConfigError, match=f"Sampling.{next(iter(wrong))}"):
        Sampling(**wrong)
