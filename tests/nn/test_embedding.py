"""StableEmbedding against its paper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.layout import abstract
from jaxscale.models import Transformer
from jaxscale.nn import StableEmbedding


def test_what_is_looked_up_is_layer_normed():
    table = StableEmbedding(50, 32, rngs=nnx.Rngs(0))
    ids = jnp.asarray([[3, 7, 3]])
    rows = np.asarray(table.weight.get_value(), np.float64)[np.asarray(ids)]
    want = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(table(ids), want, atol=1e-5)


def test_its_initial_values_are_xavier_uniform():
    weight = np.asarray(StableEmbedding(500, 100, rngs=nnx.Rngs(0)).weight.get_value())
    bound = np.sqrt(6 / 600)
    assert np.abs(weight).max() <= bound
    np.testing.assert_allclose(weight.std(), bound / np.sqrt(3), rtol=0.02)


def test_a_transformer_takes_it():
    config = Transformer.Config(depth=1, width=32, heads=2, embedding=StableEmbedding)
    _, infos = abstract(lambda: config.make(nnx.Rngs(0)))
    assert [i.path for i in jax.tree.leaves(infos["embed"])] == [
        "embed/norm/bias", "embed/norm/scale", "embed/weight"
    ]  # fmt: skip
