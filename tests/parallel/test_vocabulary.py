"""Log-probabilities, entropies and divergences without stored logits: values, gradients, layouts, memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout
from jaxscale.parallel import (
    Logits,
    logprobs_at,
    token_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
    top_logprobs,
    vocabulary_sum,
    vocabulary_tiles,
)
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.long import short

B, S, E, K, V = 8, 4, 16, 5, 61  # four devices do not divide the vocabulary
CAP = 3.0
NAMES = ("logprobs", "entropy", "forward", "half way", "both")
LAYOUTS = ["data=8", "fsdp=4,tensor=2", "context=2,fsdp=2,tensor=2"]


def forward_kl(t, s):
    return jnp.exp(t) * (t - s)


def half_way(t, s):
    m = jnp.logaddexp(t, s) - jnp.log(2.0)
    return 0.5 * (jnp.exp(t) * (t - m) + jnp.exp(s) * (s - m))


def arrays():
    random = np.random.default_rng(0)
    x, y = (jnp.asarray(random.normal(size=(B, S, E)), jnp.float32) for _ in range(2))
    w = jnp.asarray(random.normal(size=(V, E)), jnp.float32)
    other = jnp.asarray(random.normal(size=(V, E // 2)), jnp.float32)  # another hidden size
    return x, w, y[..., : E // 2], other


def ids():
    return jnp.asarray(np.random.default_rng(1).integers(0, V, (B, S, K)), jnp.int32)


def slopes():
    return jnp.asarray(np.random.default_rng(2).normal(size=(B, S, K)), jnp.float32)


def per_token(x, w, y, other):
    a, b = Logits(x, w, CAP), Logits(y, other)
    return {
        "logprobs": token_logprobs(a, ids()[..., 0]),
        "entropy": token_entropy(a, temperature=0.7),
        "both": sum(token_logprobs_and_entropy(a, ids()[..., 1], temperature=0.7)),
        "forward": vocabulary_sum(forward_kl, (b, a)),
        "half way": vocabulary_sum(half_way, (b, a)),
        "at": logprobs_at(a, ids()),
    }


def total(x, w, y, other):
    results = per_token(x, w, y, other)
    weights = {name: slopes()[..., k] for k, name in enumerate(NAMES)} | {"at": slopes()}
    return {name: jnp.sum(results[name] * weights[name]) for name in results}


def all_of():
    return jax.jit(lambda *a: (per_token(*a), jax.jacrev(total, argnums=(0, 1, 2, 3))(*a)))


def by_numpy(x, w, y, other):
    """The same from stored logits."""
    x, w, y, other = (np.asarray(a, np.float64) for a in (x, w, y, other))
    logits = CAP * np.tanh(x @ w.T / CAP)
    a, t, b = (log_softmax(z, axis=-1) for z in (logits, logits / 0.7, y @ other.T))
    m = np.logaddexp(a, b) - np.log(2.0)
    at = np.take_along_axis(a, np.asarray(ids()), 2)
    return {
        "logprobs": at[..., 0],
        "entropy": -(np.exp(t) * t).sum(-1),
        "both": np.take_along_axis(t, np.asarray(ids())[..., 1:2], 2)[..., 0] - (np.exp(t) * t).sum(-1),
        "forward": (np.exp(b) * (b - a)).sum(-1),
        "half way": 0.5 * (np.exp(b) * (b - m) + np.exp(a) * (a - m)).sum(-1),
        "at": at,
    }


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Tiles of 12 tokens and 24 words: the last of each begins early, or is filled."""
    monkeypatch.setattr(vocabulary_tiles, "TILE", (12, 24))


@functools.cache
def whole():
    return all_of()(*arrays())


def test_values_are_those_of_stored_logits():
    for name, value in by_numpy(*arrays()).items():
        np.testing.assert_allclose(whole()[0][name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_gradients_are_those_of_stored_logits():
    random = np.random.default_rng(3)
    at = [np.asarray(a, np.float64) for a in arrays()]
    weights = {k: np.asarray(slopes()[..., i], np.float64) for i, k in enumerate(NAMES)} | {"at": slopes()}
    for _ in range(2):  # along random directions, by central differences in float64
        way = [random.normal(size=a.shape) for a in at]
        up, down = (by_numpy(*(a + h * d for a, d in zip(at, way, strict=True))) for h in (1e-5, -1e-5))
        for name, slope in whole()[1].items():
            along = sum(float(np.sum(np.asarray(s) * d)) for s, d in zip(slope, way, strict=True))
            want = np.sum((up[name] - down[name]) * weights[name]) / 2e-5
            np.testing.assert_allclose(along, want, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("layout", short(1, LAYOUTS))
def test_sharded_is_whole(layout):
    with Layout(layout):
        assert_leaves_agree(all_of()(*arrays()), whole(), what=f"on {layout}")


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_the_largest_are_those_of_stored_logits(layout):
    x, w, *_ = arrays()
    all_of = log_softmax(CAP * np.tanh(np.asarray(x, np.float64) @ np.asarray(w, np.float64).T / CAP), axis=-1)
    run = jax.jit(lambda x, w: top_logprobs(Logits(x, w, CAP), K))
    if layout is None:
        values, results = run(x, w)
    else:
        with Layout(layout):
            values, results = run(x, w)
    np.testing.assert_array_equal(results, np.argsort(-all_of, -1)[..., :K])
    np.testing.assert_allclose(values, -np.sort(-all_of, -1)[..., :K], rtol=1e-5)


def test_a_frozen_model_has_no_gradient_and_the_other_the_same():
    def loss(trained):
        def of(x, w, y, other):
            both = vocabulary_sum(forward_kl, (Logits(y, other), Logits(x, w, CAP)), trained=trained)
            return jnp.sum(both * slopes()[..., 2])

        return jax.jit(jax.grad(of, argnums=(0, 1, 2, 3)))(*arrays())

    dx, dw, dy, dother = loss((False, True))
    assert not dy.any() and not dother.any()
    assert_leaves_agree((dx, dw), loss((True, True))[:2])


@pytest.mark.long
def test_temporaries_are_below_five_hundredths_of_the_logits(monkeypatch):
    monkeypatch.undo()
    n, vocab, width = 8192, 256_000, 2048
    x, w = (jax.ShapeDtypeStruct(s, "float32") for s in ((4, n // 4, width), (vocab, width)))
    t = jax.ShapeDtypeStruct((4, n // 4), "int32")

    def losses(x, w, t):
        a, b = Logits(x, w), Logits(jax.lax.stop_gradient(x), jax.lax.stop_gradient(w))
        return [
            lambda: token_logprobs(a, t).sum(),
            lambda: token_entropy(a).sum(),
            lambda: vocabulary_sum(forward_kl, (b, a), trained=(False, True)).sum(),
            lambda: logprobs_at(a, jnp.broadcast_to(t[..., None], (*t.shape, 32))).sum(),
        ]

    for i in range(4):
        for f in (lambda *a, i=i: losses(*a)[i](), jax.grad(lambda *a, i=i: losses(*a)[i](), argnums=(0, 1))):
            memory = jax.jit(f).lower(x, w, t).compile().memory_analysis()
            assert 0 < memory.temp_size_in_bytes < 0.05 * n * vocab * 4, i


def test_ids_that_are_no_tokens_give_nan():
    x, w, *_ = arrays()
    wrong = ids().at[0, 0, 0].set(V).at[1, 1, 1].set(-1)
    results = np.asarray(logprobs_at(Logits(x, w), wrong))
    assert np.isnan(results).sum() == 2 and np.isnan(results[0, 0, 0]) and np.isnan(results[1, 1, 1])


def test_vocabularies_that_differ_are_refused():
    x, w, y, other = arrays()
    with raises_saying(LayoutError, "61 and 60 tokens", "must be the same"):
        vocabulary_sum(forward_kl, (Logits(x, w), Logits(y, other[:60])))
    with raises_saying(LayoutError, "top_logprobs(k=62)", "1 to 61"):
        top_logprobs(Logits(x, w), V + 1)
