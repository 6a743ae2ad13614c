"""Products of integers by their bits are those of NumPy's integers, for every pair of widths."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.nn.formats import bit_plane_product, planes

EVERY = list(itertools.product(range(1, 9), repeat=2))


def value(codes, bits, signed):
    whole = codes.astype(np.int64)
    return whole - (whole >> (bits - 1) << bits) if signed else whole


@pytest.mark.parametrize(
    "pairs", [[(1, 1), (3, 5), (8, 8)], pytest.param(EVERY, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_they_are_exact_for_every_pair_of_widths(pairs):
    for pair in pairs:
        _check(pair)


def _check(pair):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**bits, (n, 70)).astype(np.uint8) for n, bits in zip((5, 3), pair, strict=True))
    left, right = (planes(jnp.asarray(x), bits) for x, bits in zip((a, b), pair, strict=True))
    assert left.dtype == jnp.uint32 and left.shape == (pair[0], 5, 3)
    for signed in ((True, True), (False, True), (False, False)):
        want = value(a, pair[0], signed[0]) @ value(b, pair[1], signed[1]).T
        np.testing.assert_array_equal(bit_plane_product(left, right, signed=signed), want)
