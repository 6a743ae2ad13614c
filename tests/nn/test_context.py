"""Dropout: the same bits on every layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.layout import Layout
from jaxscale.nn import Context, dropout
from tests.truth.layouts import in_force

SHAPE = (8, 16, 32)
LAYOUTS = [
    Layout("data=8"),
    Layout("fsdp=4,tensor=2", sequence_sharded=True),
    Layout("context=2,tensor=4", sequence_sharded=True),
]


def _drop(layout, rate=0.3, key=0):
    with in_force(layout):
        return np.asarray(jax.jit(lambda x: dropout(x, rate, jax.random.key(key)))(jnp.ones(SHAPE)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dropout_bits_are_identical_on_every_layout(layout):
    np.testing.assert_array_equal(_drop(layout), _drop(None))


def test_dropout_zeroes_its_rate_and_keeps_the_mean():
    y = _drop(None, rate=0.25)
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(np.mean(y == 0) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / y.size)


def test_no_key_or_no_rate_is_no_dropout():
    x = jnp.ones(SHAPE)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_every_layer_has_bits_of_its_own():
    context = Context(key=jax.random.key(0))
    assert len({jax.random.bits(context.at(i).key).item() for i in range(8)}) == 8
    assert Context().at(3).key is None
