"""The gated recurrence of MatMul-free models against float64 NumPy, on layouts, and with ternary weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import MLGRU, Context, Rounded
from jaxscale.nn.formats import FORMATS
from jaxscale.nn.linear import project
from jaxscale.testing import compare_layouts
from tests.truth.errors import raises_saying

OPTIONS = dict(bias=False, out_scale=1.0, dtype=jnp.float32, param_dtype=jnp.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_recurrence_equals_float64_numpy_and_restarts_at_each_document():
    layer = MLGRU(channels=6, lower_bound=0.25)(5, 1, 1, 5, rngs=nnx.Rngs(0), **OPTIONS)
    x = np.random.default_rng(0).normal(size=(1, 9, 5)).astype(np.float32)
    segments = np.array([[1] * 4 + [2] * 3 + [0] * 2], np.int32)
    got = layer(x, Context(segment_ids=jnp.asarray(segments)))
    forget, candidate, gate = (
        x[0] @ np.float64(m.kernel.get_value()) for m in (layer.forget, layer.candidate, layer.gate)
    )
    keep = 0.25 + 0.75 * sigmoid(forget)
    h, want = np.zeros(6), []
    for t in range(7):
        h = h * (0 if t in (0, 4) else keep[t])
        h = h + (1 - keep[t]) * candidate[t] * sigmoid(candidate[t])
        want.append((sigmoid(gate[t]) * h) @ np.float64(layer.out.kernel.get_value()))
    np.testing.assert_allclose(got[0, :7], want, atol=1e-5)


def test_a_bound_that_keeps_everything_is_refused():
    with raises_saying(ConfigError, "MLGRU.lower_bound = 1.0", "below 1"):
        MLGRU(lower_bound=1.0)


def test_a_ternary_product_is_sums_and_differences_to_the_bit():
    random = np.random.default_rng(0)
    x, signs = random.integers(-9, 9, (3, 16)), random.choice([-1, 0, 1], (16, 4))
    for column in range(4):  # half of the weights are 0: the mean magnitude is a power of two
        signs[:, column] = random.permutation([1, -1] * 4 + [0] * 8)
    arithmetic = Rounded("ternary").arithmetic("float32")
    got = project(jnp.asarray(x, jnp.float32), jnp.asarray(signs, jnp.float32), ("embed", "mlp"), (0,), arithmetic)
    added = [[sum(row[signs[:, j] > 0]) - sum(row[signs[:, j] < 0]) for j in range(4)] for row in x]
    np.testing.assert_array_equal(got, 0.5 * np.asarray(added, np.float32))


def test_a_stored_ternary_matrix_has_four_weights_in_a_byte_and_the_values_that_were_trained():
    kernel = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    stored = FORMATS["ternary"][0].encode(jnp.asarray(kernel), (0,))
    scale = np.abs(np.float64(kernel)).mean(0)
    np.testing.assert_allclose(stored.dense(), np.clip(np.round(kernel / scale), -1, 1) * scale, rtol=1e-6)
    assert sum(a.nbytes for a in jax.tree.leaves(stored)) == kernel.size // 4 + 4 * 32  # and a scale for each output


@pytest.mark.long
def test_matmul_free_stacks_train_alike_on_every_layout():
    config = TransformerConfig(
        depth=1, vocab=32, width=16, heads=2, hidden=16, products=Rounded("ternary"), blocks=(BlockConfig(MLGRU()),)
    )
    compare_layouts(config, [js.Layout("data=2,tensor=2,context=2")]).check()
