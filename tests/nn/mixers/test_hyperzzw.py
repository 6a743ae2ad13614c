"""HyperZ·Z·W against the sum of its definition in float64, its FLOPs, its gradients; decoding and layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Context, HyperZZW
from jaxscale.nn.linear import out_of
from jaxscale.nn.mixers import hyperzzw
from jaxscale.parallel.long_convolution import self_convolution
from jaxscale.plan.flops import count
from jaxscale.testing import check_mixer
from tests.truth.errors import raises_saying

OPTIONS = dict(out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
SEGMENTS = np.array([[1] * 9 + [2] * 4 + [0] * 3, [3] * 2 + [5] * 14], np.int32)


def documents():
    """Yield the row and the columns of each document of `SEGMENTS`."""
    for row, ids in enumerate(SEGMENTS):
        for document in sorted(set(ids[ids > 0])):
            columns = np.flatnonzero(ids == document)
            yield row, slice(columns[0], columns[-1] + 1)


def self_convolved(z, kernel):
    """Return `sum over j of kernel[j] z[j] z[t - j]` for one document (S, C), term by term."""
    y = np.zeros_like(z)
    for t in range(len(z)):
        for j in range(min(t + 1, len(kernel))):
            y[t] += kernel[j] * z[j] * z[t - j]
    return y


def gradients(z, kernel, dy):
    """Return the gradients of `sum(dy * self_convolved(z, kernel))` by `z` and `kernel`, term by term."""
    dz, dkernel = np.zeros_like(z), np.zeros_like(kernel)
    for t in range(len(z)):
        for j in range(min(t + 1, len(kernel))):
            dkernel[j] += dy[t] * z[j] * z[t - j]
            dz[j] += dy[t] * kernel[j] * z[t - j]
            dz[t - j] += dy[t] * kernel[j] * z[j]
    return dz, dkernel


def test_transforms_give_the_sums_of_the_definition_and_their_gradients():
    rng = np.random.default_rng(0)
    z, kernel, dy = rng.normal(size=(2, 16, 3)), rng.normal(size=(7, 3)), rng.normal(size=(2, 16, 3))
    starts = np.pad(SEGMENTS[:, 1:] != SEGMENTS[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    @jax.jit
    def run(z, kernel, dy):
        y, pull = jax.vjp(lambda *of: self_convolution(*of, starts, SEGMENTS != 0), z, kernel)
        return y, pull(dy)

    got, (dz, dkernel) = run(*map(np.float32, (z, kernel, dy)))
    want, want_dz, want_dkernel = np.zeros_like(z), np.zeros_like(z), np.zeros_like(kernel)
    for at in documents():
        want[at] = self_convolved(z[at], kernel)
        want_dz[at], added = gradients(z[at], kernel, dy[at])
        want_dkernel += added
    for x, y in ((got, want), (dz, want_dz), (dkernel, want_dkernel)):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


def test_each_document_of_a_packed_row_is_float64_numpys_and_features_have_mean_zero(monkeypatch):
    layer = HyperZZW(7, channels=6, hidden=8, features=2)(5, 1, 1, 5, **OPTIONS)
    x = np.random.default_rng(0).normal(size=(2, 16, 5)).astype(np.float32)

    @jax.jit
    def run(x):
        features = []
        monkeypatch.setattr(hyperzzw, "out_of", lambda y, linear: features.append(y) or out_of(y, linear))
        return layer(x, Context(segment_ids=SEGMENTS)), features

    got, features = run(x)
    assert len(features) == 2
    for y in features:
        np.testing.assert_allclose(np.mean(y, -1), 0, atol=1e-6)
        assert np.median(np.var(y, -1)[SEGMENTS != 0]) == pytest.approx(1, abs=1e-2)

    def value(p):
        return np.float64(p.get_value())

    def standard(y):
        y = y - y.mean(-1, keepdims=True)
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-6)

    kernel = np.float64(layer.kernel(7))
    taps = value(layer.z_taps)
    for at in documents():
        z = np.float64(x[at]) @ value(layer.z.kernel)
        z = np.array([sum(taps[2 - j] * z[t - j] for j in range(min(t + 1, 3))) for t in range(len(z))])
        want = standard(self_convolved(z, kernel)) @ value(layer.out.kernel)
        want += standard(z) @ value(layer.local_out.kernel)
        np.testing.assert_allclose(got[at], want, atol=2e-5)


def test_traced_flops_of_a_row_with_one_document_are_those_that_the_mixer_counts():
    mixer = HyperZZW(7, channels=6, hidden=8, features=2, taps=1)
    layer = mixer(5, 1, 1, 5, **OPTIONS)
    kernel = count(lambda: layer.kernel(7)).matmul
    traced = count(lambda x: layer(x, Context()), jax.ShapeDtypeStruct((2, 10, 5), jnp.float32)).matmul
    products = mixer.products(TransformerConfig(width=5, heads=1, head_dim=2), 2, 10, None)
    assert traced - kernel == sum(products.values())


def test_a_length_below_one_is_refused():
    with raises_saying(ConfigError, "HyperZZW.length = 0", "at least 1"):
        HyperZZW(0)


@pytest.mark.long
@pytest.mark.parametrize("length", [12, 64])
def test_it_decodes_with_a_cache_and_trains_alike_on_layouts(length):
    layouts = [Layout("data=2,tensor=2"), Layout("fsdp=2,context=2")]
    check_mixer(HyperZZW(length, features=2, hidden=8), layouts if length == 12 else [])
