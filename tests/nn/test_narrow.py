"""Activations kept as 8-bit floats: how far gradients are, and how many bytes are kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import MemoryPolicy
from jaxscale.nn.narrow import narrowing, saved_as
from jaxscale.testing import compare_layouts
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying

KEEP, NARROW = (MemoryPolicy(**{fate: ("mlp_up",)}) for fate in ("keep", "fp8"))


def loss(params, x, policy):
    """Apply layers by a scan, as models do, each of whose products is kept."""

    def layer(x, p):
        return x + jnp.tanh(saved_as(x @ p[0], "mlp_up")) @ p[1], None

    return jnp.sum(jax.lax.scan(policy.checkpoint(layer, prevent_cse=False), x, params)[0].astype(jnp.float32) ** 2)


def arrays(dtype=np.float32, layers=4):
    rng = np.random.default_rng(0)
    shapes = (layers, 64, 512), (layers, 512, 64), (8, 128, 64)
    up, down, x = (jnp.asarray(rng.normal(size=s) / np.sqrt(s[1]), dtype) for s in shapes)
    return (up, down), x


def test_numbers_are_those_of_8_bit_floats_and_gradients_pass_through():
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    with narrowing(frozenset({"mlp_up"})):
        y, pull = jax.vjp(lambda x: saved_as(x, "mlp_up"), x)
    groups = x.reshape(4, 2, 128).astype(np.float64)
    scale = (np.abs(groups).max(-1, keepdims=True).astype(np.float32) / np.float32(448)).astype(np.float64)
    want = ((groups / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(
        x.shape
    )
    assert np.mean(np.abs(y - want) > 1e-6 * np.abs(want)) < 0.01  # a tie may round the other way
    assert 1e-3 < np.linalg.norm(y - x) / np.linalg.norm(x) < 0.05
    np.testing.assert_array_equal(pull(jnp.ones_like(x))[0], 1.0)
    np.testing.assert_array_equal(saved_as(x, "mlp_up"), x)


def test_a_compiled_step_keeps_about_half_of_the_bytes_of_bfloat16():
    params, x = arrays(jnp.bfloat16, layers=8)

    def temporaries(policy):
        step = jax.jit(lambda p, x: jax.grad(loss)(p, x, policy)).lower(params, x).compile()
        return step.memory_analysis().temp_size_in_bytes

    one = 8 * 128 * 512  # numbers of a layer
    saved = temporaries(KEEP) - temporaries(NARROW)
    assert saved > 0.8 * (2 - 1 - 4 / 128) * 8 * one


def test_gradients_are_near_the_exact_ones_and_the_same_on_a_layout():
    params, x = arrays()
    exact, ours = (jax.jit(jax.grad(loss), static_argnums=2)(params, x, p) for p in (KEEP, NARROW))
    for a, b in zip(ours, exact, strict=True):
        assert 1e-4 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.05
    with Layout("data=2,tensor=2"):
        assert_leaves_agree(jax.jit(jax.grad(loss), static_argnums=2)(params, x, NARROW), ours)


@pytest.mark.long
def test_a_model_trains_with_it_on_a_layout_as_on_one_device_and_is_planned_from_its_trace():
    model = TransformerConfig(
        depth=2,
        vocab=32,
        width=16,
        heads=2,
        hidden=24,
        memory=MemoryPolicy(fp8=("norm", "qkv", "mlp_up", "mlp_hidden")),
    )
    assert model.not_in_formulas() == "MemoryPolicy.fp8"
    compare_layouts(model, [Layout("fsdp=2,tensor=2")], tolerance=2e-2).check()


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(fp8=("residual",)), ("'residual'", "mlp_hidden")),
        (dict(fp8=("norm",), rest="keep"), ("rest = 'keep'", "'recompute'")),
        (dict(fp8=("norm",), keep=("norm",)), ("'norm'", "one of them")),
    ],
)
def test_a_policy_that_cannot_be_is_refused(settings, words):
    with raises_saying(ConfigError, *words):
        MemoryPolicy(**settings)
