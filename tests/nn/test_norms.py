"""Norms against float64, and the dtype of their computation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.nn import LayerNorm, RMSNorm
from tests.truth.compare import assert_leaves_agree

X = np.random.default_rng(0).normal(size=(3, 5, 64)) * 4 + 2


def _rms(x, scale, bias, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale


def _layer(x, scale, bias, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("norm, plain", [(RMSNorm, _rms), (LayerNorm, _layer)])
def test_a_norm_equals_its_formula(norm, plain, eps):
    layer = norm(64, eps=eps)
    scale, bias = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    layer.scale.set_value(jnp.asarray(scale))
    if norm is LayerNorm:
        layer.bias.set_value(jnp.asarray(bias))
    assert_leaves_agree(layer(jnp.asarray(X, jnp.float32)), plain(X, scale, bias, eps))


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_a_norm_of_bfloat16_is_computed_in_float32(norm):
    # the mean of 4096 numbers near 256 is lost in bfloat16
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4096)) + 256, jnp.bfloat16)
    got = norm(4096, dtype=jnp.bfloat16)(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, norm(4096)(x.astype(jnp.float32)).astype(jnp.bfloat16))
