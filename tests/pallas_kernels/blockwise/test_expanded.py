"""8-bit floats with dynamic range expansion: the method in float64 NumPy, its error and its bytes."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.blockwise import dequantize_blockwise, quantize_blockwise

E4M3_RANGE = 448.0 / 2.0**-9
TILE = (1, 128)


def moments(signed, spread):
    """Return numbers whose logarithms are normal, as moments' are; the spread of rows differs."""
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(16, 256)) * spread - 12).astype(np.float32)
    return x * np.where(rng.random(x.shape) < 0.5, -1, 1).astype(np.float32) if signed else x


def expanded(x):
    """Return numbers rounded as the paper says, with its power rounded down to a sixteenth of an octave."""
    blocks = np.abs(x.astype(np.float64)).reshape(x.shape[0], -1, 128)
    largest, smallest = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    power = np.log2(E4M3_RANGE) / np.log2(largest / smallest)
    power = np.exp2(np.floor(16 * np.log2(power)) / 16)
    codes = ((blocks / largest) ** power * 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 448
    return np.sign(x) * (codes ** (1 / power) * largest).reshape(x.shape)


def error(ours, x):
    """Return the root of the mean squared relative error."""
    return np.sqrt(np.mean((np.asarray(ours, np.float64) / x - 1) ** 2))


@pytest.mark.parametrize("signed, spread", [(True, 0.5), (False, 0.5), (True, 1.2), (False, 1.2)])
def test_range_expansion_is_that_of_the_paper_and_lowers_the_error_of_8_bit_floats(signed, spread):
    x = moments(signed, spread)
    plain, ours = (
        quantize_blockwise(jnp.asarray(x), signed=signed, format=name, tile=TILE, moment=True)
        for name in ("fp8", "fp8_expanded")
    )
    got = dequantize_blockwise(ours)
    assert np.mean(np.abs(got / expanded(x) - 1) > 1e-3) < 0.01  # a tie may round the other way
    assert error(got, x) < 0.8 * error(dequantize_blockwise(plain), x)
    assert ours.nbytes == plain.nbytes == x.size + 4 * x.size / 128


def test_a_block_of_zeros_stays_zeros_one_of_equal_numbers_stays_and_a_fault_shows():
    x = np.zeros((4, 128), np.float32)
    x[1], x[2, 5], x[3, 7] = 3.0, np.nan, 2.0
    q = quantize_blockwise(jnp.asarray(x), format="fp8_expanded", tile=TILE)
    got = np.asarray(dequantize_blockwise(q))
    assert (got[0] == 0).all() and not np.isfinite(got[2]).any()
    np.testing.assert_allclose(got[[1, 3]], x[[1, 3]], rtol=1e-4)


def test_a_positive_second_moment_never_becomes_zero():
    x = np.exp2(-0.9 * np.arange(128, dtype=np.float32))[None]  # a range of 2**114
    q = quantize_blockwise(jnp.asarray(x), signed=False, format="fp8_expanded", tile=TILE, moment=True)
    assert (np.asarray(dequantize_blockwise(q)) > 0).all()
