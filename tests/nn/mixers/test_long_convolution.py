"""Hyena's long convolution: against float64 NumPy for each document, with a cache, on layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Context, LongConvolution
from jaxscale.testing import check_mixer
from tests.truth.errors import raises_saying


def causal(x, kernel):
    """Convolve (S, C) with (W, C), the first weight on the current token, in float64."""
    rows = [sum(kernel[j] * x[t - j] for j in range(min(t + 1, len(kernel)))) for t in range(len(x))]
    return np.array(rows).reshape(x.shape)


def test_each_document_of_a_packed_row_is_float64_numpys_and_padding_is_nothing():
    options = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer = LongConvolution(7, channels=6, hidden=8, features=2)(5, 1, 1, 5, **options)
    x = np.random.default_rng(0).normal(size=(1, 16, 5)).astype(np.float32)
    segments = np.array([[1] * 9 + [2] * 4 + [0] * 3], np.int32)
    got = jax.jit(lambda x, s: layer(x, Context(segment_ids=s)))(x, segments)
    value = lambda p: np.float64(p.get_value())  # noqa: E731
    t = np.arange(7)[:, None] / 7
    angles = 2 * np.pi * t * [1, 2]
    h = np.concatenate([t, np.cos(angles), -np.sin(angles)], 1)
    of = layer.kernel
    h = np.sin(np.sin(h @ value(of.first)) @ value(of.second)) @ value(of.last)
    kernel = h * np.exp(-t * np.linspace(np.log(100) / 0.3, np.log(100) / 1.5, 6)) / np.sqrt(7)
    for start, stop in ((0, 9), (9, 13)):
        row = np.float64(x[0, start:stop])
        q, k, v = (
            causal(row @ value(getattr(layer, n).kernel), value(getattr(layer, f"{n}_taps"))[::-1]) for n in "qkv"
        )
        want = (q * causal(k * v, kernel)) @ value(layer.out.kernel)
        np.testing.assert_allclose(got[0, start:stop], want, atol=1e-5)
    np.testing.assert_array_equal(got[0, 13:], 0)


def test_flops_are_those_of_the_transforms_products():
    got = LongConvolution(7, channels=6).products(TransformerConfig(width=16), 2, 10, None)
    a, b, rows = 4, 4, 3  # 10 + 6 tokens, of which the last row is zeros
    assert got["convolution"] == 2 * 6 * 2 * (4 * a * rows * b + 8 * a * b * b)


def test_a_length_below_one_is_refused():
    with raises_saying(ConfigError, "LongConvolution.length = 0", "at least 1"):
        LongConvolution(0)


@pytest.mark.long
def test_it_decodes_with_a_cache_and_trains_alike_on_layouts():
    check_mixer(LongConvolution(12, features=2, hidden=8), [Layout("data=2,tensor=2"), Layout("fsdp=2,context=2")])
