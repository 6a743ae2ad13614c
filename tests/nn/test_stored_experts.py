"""Experts in few bits: a grouped product unpacks one at a time, with the values and gradients of a dense copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.layout import abstract
from jaxscale.nn import ClampedSwiGLU, MixtureOfExperts
from jaxscale.nn.formats import FORMATS, kernels
from jaxscale.testing.models import random_params
from tests.truth.compare import assert_leaves_agree


def made(name, experts=4, width=64, hidden=64):
    """Return the graph definition and weights of a layer in a format."""
    layer = MixtureOfExperts(experts=experts, top_k=2, hidden=hidden, expert=ClampedSwiGLU)
    types = dict(dtype=jnp.float32, param_dtype=jnp.float32)
    graphdef, infos = abstract(lambda: nnx.eval_shape(lambda: layer(width, 64, bias=True, rngs=nnx.Rngs(0), **types)))
    params = jax.tree.map(jnp.asarray, random_params(infos))
    return graphdef, FORMATS[name][0].encoded(params, infos, None)


def run(graphdef):
    """Return a function of weights and inputs: outputs, and the gradients of the inputs and of arrays of floats."""

    def values(weights, x):
        leaves, tree = jax.tree.flatten(weights)
        floats = [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]

        def loss(floats, x):
            rest = iter(floats)
            every = [next(rest) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in leaves]
            y, _ = nnx.merge(graphdef, jax.tree.unflatten(tree, every))(x)
            return jnp.sum(y**2), y

        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(floats, x)
        return y, grads

    return values


@pytest.mark.parametrize("name", ["int8", pytest.param("mxfp4", marks=pytest.mark.long)])
def test_values_and_gradients_are_those_of_a_dense_copy_on_every_layout(name, monkeypatch):
    graphdef, weights = made(name)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 64)), jnp.float32)
    assert "while" in str(jax.make_jaxpr(run(graphdef))(weights, x))
    got = jax.jit(run(graphdef))(weights, x)
    with js.Layout("expert=2,fsdp=2,tensor=2"):
        sharded = jax.jit(run(graphdef))(weights, x)
    monkeypatch.setattr(kernels, "MOST_EXPERT_ROWS", 0)
    want = jax.jit(run(graphdef))(weights, x)
    assert_leaves_agree(got, want, what="without a layout")
    assert_leaves_agree(sharded, want, what="sharded")


def test_a_compiled_layer_holds_no_dense_copy_of_all_experts(monkeypatch):
    experts, width, hidden = 32, 128, 256
    graphdef, weights = made("mxfp4", experts, width, hidden)
    x = jnp.zeros((1, 8, width), jnp.float32)
    call = lambda weights, x: nnx.merge(graphdef, weights)(x)[0]  # noqa: E731

    def temporaries(most):
        monkeypatch.setattr(kernels, "MOST_EXPERT_ROWS", most)
        return jax.jit(lambda w, x: call(w, x)).lower(weights, x).compile().memory_analysis().temp_size_in_bytes

    one = width * hidden * 4
    assert temporaries(4096) < 8 * one < experts * one < temporaries(0)
