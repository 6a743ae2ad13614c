"""Values and gradients against float64 and optax, over every pair of options."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels.cut_cross_entropy import linear_cross_entropy, xla
from tests.pallas_kernels.cut_cross_entropy.cases import FEATURES, make, plain, truth
from tests.pallas_kernels.flash_attention.cases import assert_as_exact_as, covering, name_of, parameters
from tests.truth.long import short

CASES = covering(FEATURES)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", (16, 24))
    monkeypatch.setattr(xla, "FILTER_TILE", (8, 8))


def check(case, **kwargs):
    (x, w, targets), options = make(case)
    random = np.random.default_rng(9)
    slopes = [random.normal(size=targets.shape).astype(np.float32) for _ in range(3)]
    weights = jnp.asarray(options.get("weights", np.ones(targets.shape, np.float32)))

    def ours(x, w, weights):
        layout = {"w_layout": case["w_layout"]}
        more = {"return_lse": True, "return_entropy": True, "weights": weights}
        return linear_cross_entropy(x, w, targets, **options | more | layout | kwargs)

    def run(f, *arrays):
        y, pull = jax.vjp(f, *arrays)
        return *y, *pull(tuple(slopes))

    theirs = functools.partial(plain, targets=targets, options=options)
    got, theirs = jax.jit(lambda *arrays: (run(ours, *arrays), run(theirs, *arrays)))(x, w, weights)
    want = truth((x, w, targets), options, *slopes)
    assert [g.dtype for g in got] == [jnp.float32, jnp.float32, jnp.float32, x.dtype, w.dtype, jnp.float32]
    # A float32 log-sum-exp is rounded at its own size, and every probability of its row with it.
    units = float(np.abs(want[1]).max())
    for name, a, b, c in zip(("loss", "lse", "entropy", "dx", "dw", "dweights"), got, theirs, want, strict=True):
        assert_as_exact_as(a, b, c, name, units=units if a.dtype == jnp.float32 else 1)


@pytest.mark.parametrize("case", short(6, parameters(CASES)))
def test_values_and_gradients_are_as_exact_as_materialised_ones(case):
    check(case)


@pytest.mark.parametrize("case", CASES[:2], ids=name_of)
def test_the_dense_reference_is_the_truth(case):
    check(case, implementation="dense")


@pytest.mark.parametrize("case", CASES[:2], ids=name_of)
def test_a_filter_of_zero_is_exact(case):
    check(case, filter=0.0)


def test_it_is_optax_on_materialised_logits():
    (x, w, targets), _ = make(CASES[0] | {"dtype": "float32", "w_dtype": None, "sizes": (37, 83), "w_layout": "ve",
                                          "ignore_index": None, "batched": False})  # fmt: skip

    def theirs(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w.T, targets).mean()

    def ours(x, w):
        return linear_cross_entropy(x, w, targets).mean()

    value = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(x, w)  # noqa: E731
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), value(ours), value(theirs))


def test_label_smoothing_is_that_of_optax():
    (x, w, targets), _ = make(dict.fromkeys(FEATURES) | {"dtype": "float32", "sizes": (37, 83), "z_loss": 0.0})
    labels = optax.smooth_labels(jax.nn.one_hot(targets, 83), 0.3)
    got = jax.jit(functools.partial(linear_cross_entropy, label_smoothing=0.3))(x, w, targets)
    np.testing.assert_allclose(got, optax.softmax_cross_entropy(x @ w.T, labels), rtol=1e-5)


def test_every_two_values_of_two_options_meet():
    for a in FEATURES:
        for b in FEATURES:
            met = {(str(c[a]), str(c[b])) for c in CASES}
            assert a == b or len(met) == len(FEATURES[a]) * len(FEATURES[b]), (a, b)
