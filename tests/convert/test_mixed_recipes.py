"""Recipes whose activations have more bits where it matters: against float64 NumPy written from the papers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.convert.recipes import COMET, GPTQ, Cost, FlexQ, RoundToNearest
from jaxscale.convert.recipes.flexq import change_of_outputs
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.nn import project
from jaxscale.nn.formats import MixedBlocks, Stored
from jaxscale.parallel import Arithmetic
from tests.convert.test_recipes import OUT, N, drawn, inputs_of
from tests.truth.errors import raises_saying


def rounded(x, group, bits):
    """Symmetric integers along the last dimension, a scale for each group, in float64."""
    parts = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    scale = np.abs(parts).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(parts / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def with_outliers():
    w, x = drawn(1)
    x[:, [3, 17, 30]] *= 20
    return w, x


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_comet_multiplies_blocks_of_the_papers_bits(share):
    w, x = with_outliers()
    recipe = COMET(group=8, share=share)
    weight = recipe.quantize(jnp.asarray(w).reshape(4, 8, OUT), (-3, -2), inputs_of(x))
    order = np.argsort(-np.abs(x).max(0), kind="stable")
    assert np.array_equal(weight.order, order)
    cut = int(share * 4) * 8
    left = np.concatenate([rounded(x[:, order[:cut]], 8, 8), rounded(x[:, order[cut:]], 8, 4)], 1)
    dense = np.asarray(weight.dense(), np.float64).reshape(N, OUT)
    # int4 with a bfloat16 scale: half a step, which is the largest number over 7
    step = np.repeat(np.abs(w[order].reshape(4, 8, OUT)).max(1), 8, 0) / 7
    assert np.all(np.abs(dense - w)[order] <= 0.51 * step)
    got = project(
        jnp.asarray(x).reshape(-1, 4, 8), weight, ("heads", "head_dim", "embed"), (0, 1), Arithmetic.cast("float32")
    )
    np.testing.assert_allclose(got, left @ dense[order], rtol=1e-4, atol=1e-4 * np.abs(got).max())


def test_ordered_inputs_make_a_smaller_error_of_the_outputs_and_gptq_a_smaller_one_still():
    w, x = with_outliers()
    axes, want = ("embed", "mlp"), x.astype(np.float64) @ w

    def error(weight):
        got = project(jnp.asarray(x), weight, axes, (0,), Arithmetic.cast("float32"))
        return np.sum((np.asarray(got, np.float64) - want) ** 2)

    recipe = COMET(group=8, share=0.25)
    plain = error(recipe.format.encode(jnp.asarray(w), (-2,)))
    ordered = error(recipe.quantize(jnp.asarray(w), (-2,), inputs_of(x)))
    by_gptq = error(COMET(group=8, share=0.25, recipe=GPTQ()).quantize(jnp.asarray(w), (-2,), inputs_of(x)))
    assert by_gptq < ordered < 0.8 * plain


def test_the_change_of_outputs_by_rounded_activations_is_numpys():
    w, x = with_outliers()
    change = (rounded(x, 16, 6) - x) @ w
    want = np.sum(change**2) / np.sum((x.astype(np.float64) @ w) ** 2)
    assert float(change_of_outputs(jnp.asarray(w), jnp.asarray(x), 16, 6)) == pytest.approx(want, rel=1e-3)


def test_flexq_gives_8_bits_to_the_most_sensitive_matrices_within_its_share():
    costs = {"q": Cost(0.1, 40), "up": Cost(0.4, 80), "down": Cost(0.9, 80), "out": Cost(0.2, 40)}
    recipe = FlexQ(group=8, share=0.5).settled(lambda: costs)

    def bits(path):
        info = TensorInfo(path, (N, OUT), jnp.float32, ("embed", "mlp"), (-2,))
        return recipe.of(info).format.activations

    assert {path: bits(path) for path in costs} == {"down": 8, "out": 8, "up": 6, "q": 6}
    assert {f.numbers for f in recipe.format.formats} == {"int6"}
    assert FlexQ(share=0.0).settled(lambda: costs).format.formats == (FlexQ().format,)


def test_settings_that_do_not_fit_are_one_sentence():
    with raises_saying(ConfigError, "COMET.bits and COMET.group"):
        COMET(group=None)
    with raises_saying(ConfigError, "@w4a4()"):
        MixedBlocks(Stored("int4", group=8))
    with raises_saying(ConfigError, "use a multiple of 8"):
        MixedBlocks(Stored("int3", group=4, activations=4))
    with raises_saying(ConfigError, "MixedBlocks.share = 2"):
        COMET(share=2)
    with raises_saying(ConfigError, "FlexQ.share = -1"):
        FlexQ(share=-1)
    with raises_saying(ConfigError, "FlexQ.weights has no effect"):
        FlexQ(weights=Stored("int4"))
    assert RoundToNearest(weights=FlexQ().format).format.activations == 6
