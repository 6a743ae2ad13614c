"""Values and gradients against float64, over every pair of features."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import Blocks, flash_attention, xla
from tests.pallas_kernels.flash_attention.cases import (
    FEATURES,
    assert_as_exact_as,
    covering,
    make,
    name_of,
    parameters,
    plain,
    seen_at_once,
    seen_by_loops,
    truth,
)
from tests.truth.long import short

CASES = covering()
PLAIN = dict.fromkeys(FEATURES) | dict(
    dtype="float32", widths=(8, 8), heads=(2, 1), lengths=(41, 41), kind="softmax", causal=True
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)


def check(case, implementation="xla", units=1.0):
    arrays, options = make(case)
    (q, _, v, bias), softmax = arrays, case["kind"] == "softmax"
    b, s, h, _ = q.shape
    random = np.random.default_rng(9)
    dout = jnp.asarray(random.normal(size=(b, s, h, v.shape[3])), q.dtype)
    dlse = jnp.asarray(random.normal(size=(b, s, h)), jnp.float32)
    out, lse, grads = truth(arrays, options, dout, dlse)
    if "blocks" in options:
        blocks = Blocks.of(options["blocks"], query=8, key=12)
    kwargs = options | ({"blocks": blocks} if "blocks" in options else {})
    diff = (0, 1, 2) if bias is None else (0, 1, 2, 3)

    @functools.partial(jax.jit, static_argnums=0)
    def both(ours, *arrays):
        def f(q, k, v, bias=None):
            if ours:
                y = flash_attention(q, k, v, bias=bias, **kwargs, return_lse=softmax, implementation=implementation)
                return y if softmax else (y, None)
            return plain(q, k, v, bias, seen=seen_at_once(options, b, s, k.shape[1]), options=options)

        y, pull = jax.vjp(f, *arrays)
        return *y, pull((dout, dlse if softmax else None))

    arrays = tuple(arrays[i] for i in diff)
    got, got_lse, got_grads = both(True, *arrays)
    theirs, _, their_grads = both(False, *arrays)
    assert got.dtype == q.dtype
    assert_as_exact_as(got, theirs, out, "output", dtype=q.dtype, units=units)
    if softmax:
        assert got_lse.dtype == jnp.float32
        np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(lse))
        np.testing.assert_allclose(got_lse, lse, rtol=1e-4 if q.dtype == jnp.float32 else 1e-3, atol=1e-4)
    for name, x, y, want in zip(("dq", "dk", "dv", "dbias"), got_grads, their_grads, grads, strict=False):
        assert_as_exact_as(x, y, want, name, dtype=q.dtype, units=units)


@pytest.mark.parametrize("case", short(9, parameters(CASES)))
def test_values_and_gradients_are_as_exact_as_plain_ones(case):
    check(case)


@pytest.mark.parametrize("change", [{}, {"segments": True, "softcap": 2.0, "bias": "hs"}, {"kind": "sigmoid"}], ids=str)
def test_the_dense_reference_is_the_truth(change):
    check(PLAIN | change, "dense")


def test_the_mask_at_once_is_the_mask_by_loops():
    for case in CASES:
        _, options = make(case)
        size = (2, *case["lengths"])
        np.testing.assert_array_equal(seen_at_once(options, *size), seen_by_loops(options, *size), name_of(case))


def test_every_two_values_of_two_features_meet():
    assert len(CASES) <= 60
    for a in FEATURES:
        for b in FEATURES:
            met = {(str(c[a]), str(c[b])) for c in CASES}
            assert a == b or len(met) == len(FEATURES[a]) * len(FEATURES[b]), (a, b)
