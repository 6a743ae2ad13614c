"""Adapters on overlapped layers: the products of the same layer without overlap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.layout import Layout
from jaxscale.nn import Int8, Linear, Rounded
from jaxscale.nn.adapted import Adapted
from jaxscale.nn.linear import into, out_of
from jaxscale.nn.products.base import apply_products
from tests.truth.long import short

RANDOM = np.random.default_rng(0)


def drawn(*shape):
    return jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)


@pytest.mark.long
@pytest.mark.parametrize("products", short(1, [Int8(), Rounded(weights="ternary"), None]))
def test_an_adapter_is_not_rounded_with_the_overlapped_matrix_that_it_is_added_to(products):
    up = Linear({"embed": 16}, {"mlp": 24}, rngs=nnx.Rngs(0))
    down = Linear({"mlp": 24}, {"embed": 16}, rngs=nnx.Rngs(1))
    if products is not None:
        for layer in (up, down):
            apply_products(layer, products)
    x, factors = drawn(2, 8, 16), (drawn(16, 2), 0.1 * drawn(2, 24), drawn(24, 2), 0.1 * drawn(2, 16))
    layout = Layout("tensor=2", sequence_sharded=True)

    def run(x, factors, overlap):
        a, b, c, d = factors
        one, other = (nnx.clone(m) for m in (up, down))
        one.kernel.set_value(Adapted(up.kernel.get_value(), a, b, 1.0))
        other.kernel.set_value(Adapted(down.kernel.get_value(), c, d, 0.5))
        (h,) = into(x, one, overlap=overlap)
        return h, out_of(jnp.sin(h), other, overlap=overlap)

    def loss(overlap):
        return jax.jit(jax.grad(lambda x, f: sum(jnp.sum(jnp.cos(y)) for y in run(x, f, overlap)), (0, 1)))

    with layout:
        got = jax.jit(run, static_argnums=2)(x, factors, True), loss(True)(x, factors)
    want = jax.jit(run, static_argnums=2)(x, factors, False), loss(False)(x, factors)
    np.testing.assert_allclose(got[0][0], want[0][0], atol=2e-5)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(one - other) <= (1e-5 if products is None else 0.03) * np.linalg.norm(other)
