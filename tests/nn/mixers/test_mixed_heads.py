"""Heads of softmax and of linear attention in one layer, and the search for which."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Context, MixedHeads, dot_product_attention
from jaxscale.nn.mixers import harden
from jaxscale.testing import check_mixer

OPTIONS = dict(
    kernel=dot_product_attention,
    rotary=None,
    window=None,
    softcap=None,
    scale=None,
    out_scale=1.0,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
)


def made(window=None, **fields):
    return MixedHeads(**fields)(6, 3, 3, 4, rngs=nnx.Rngs(0), **OPTIONS | dict(window=window))


def in_numpy(x, q, k, v, linear, window=9):
    """Causal attention of all heads in float64, of softmax or of `elu + 1`; (S, H, D)."""
    q, k, v = (np.einsum("se,ehd->shd", np.float64(x), np.float64(m.kernel.get_value())) for m in (q, k, v))
    if linear:
        q, k = (np.where(y > 0, y + 1, np.exp(y)) for y in (q, k))
    scores = np.einsum("shd,thd->hst", q, k)
    weights = scores if linear else np.exp(scores / np.sqrt(q.shape[-1]))
    weights = np.triu(np.tril(weights), 1 - window)
    return np.einsum("hst,thd->shd", weights / weights.sum(-1, keepdims=True), v)


def test_each_head_is_its_mix_of_both_and_a_division_has_some_of_each():
    x = np.random.default_rng(0).normal(size=(1, 7, 6)).astype(np.float32)
    search, fixed = made(), made(2, softmax_heads=1)
    search.choice[...] = jnp.array([-1.0, 0.0, 2.0])
    segments = np.array([[1] * 4 + [2] * 3], np.int32)
    run = jax.jit(lambda x: [layer(x, Context(segment_ids=segments)) for layer in (search, fixed)])
    mixed, divided = run(x)
    for part in (slice(0, 4), slice(4, 7)):
        one, other = (in_numpy(x[0, part], search.q, search.k, search.v, linear) for linear in (False, True))
        share = 1 / (1 + np.exp([[1.0], [0.0], [-2.0]]))
        want = np.einsum("shd,hde->se", share * one + (1 - share) * other, search.out.kernel.get_value())
        np.testing.assert_allclose(mixed[0, part], want, atol=1e-5)
        one = in_numpy(x[0, part], fixed.q, fixed.k, fixed.v, False, 2)
        other = in_numpy(x[0, part], fixed.linear_q, fixed.linear_k, fixed.linear_v, True)
        outs = (np.asarray(m.kernel.get_value()) for m in (fixed.out, fixed.linear_out))
        want = sum(np.einsum("shd,hde->se", y, out) for y, out in zip((one, other), outs, strict=True))
        np.testing.assert_allclose(divided[0, part], want, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mixer", [MixedHeads(), MixedHeads(by="layer"), *(MixedHeads(n) for n in (0, 2, 4))], ids=str)
def test_it_decodes_and_trains_alike_on_layouts(mixer):
    check_mixer(mixer, [js.Layout("data=2,tensor=2,context=2")])


def test_a_budget_goes_to_the_largest_mixes():
    by_head = np.array([[0.1, -1.0, 0.3], [0.2, 2.0, -0.5]])
    assert harden(by_head, 3, 3) == (MixedHeads(1), MixedHeads(2))
    assert harden(np.array([[0.1], [0.2]]), 3, 3) == (MixedHeads(0), MixedHeads(3))
    with pytest.raises(ConfigError, match="budget = 4: .* 3 softmax heads at a time .* the nearest budget is 3"):
        harden(np.array([[0.1], [0.2]]), 3, 4)
    with pytest.raises(ConfigError, match="the nearest budget is 6"):
        harden(by_head, 3, 7)
    assert harden(by_head, 3, 6) == (MixedHeads(3), MixedHeads(3))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="MixedHeads.softmax_heads = 5: the layer has 4 heads; use at most 4"):
        TransformerConfig(width=16, heads=4, blocks=(BlockConfig(MixedHeads(5)),)).validate()
    with pytest.raises(ConfigError, match=r"by = 'layer' has no effect with softmax_heads = 2"):
        MixedHeads(2, by="layer")
    with pytest.raises(ConfigError, match=r"by = 'row': must be 'head' or 'layer'"):
        MixedHeads(by="row")
    with pytest.raises(ConfigError, match=r"softmax_heads = -1: must be a whole number of at least 0, or None"):
        MixedHeads(-1)
    config = TransformerConfig(width=16, heads=4, blocks=(BlockConfig(MixedHeads(3)),))
    with (
        Layout("tensor=2"),
        pytest.raises(LayoutError, match="softmax_heads = 3: .*tensor=2.* the nearest softmax_heads .* is 4"),
    ):
        config.check_row(8)
    with Layout("tensor=2"):
        dataclasses.replace(config, blocks=(BlockConfig(MixedHeads(4)),)).check_row(8)
