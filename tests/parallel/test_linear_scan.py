"""A recurrence over a sharded sequence."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.layout import Layout
from jaxscale.parallel import linear_scan
from jaxscale.parallel.context import zigzag

AXES = ("batch", "seq", "mlp")


def _sequential(decay, update):
    h, states = np.zeros_like(update[:, 0], np.float64), []
    for t in range(update.shape[1]):
        h = decay[:, t] * h + update[:, t]
        states.append(h)
    return np.stack(states, axis=1)


@pytest.mark.parametrize("mesh", [None, "context=4,data=2", "context=2,tensor=2"])
@pytest.mark.parametrize("in_zigzag", [False, True])
def test_parts_of_a_sequence_on_devices_go_on_from_each_other(mesh, in_zigzag):
    random = np.random.default_rng(0)
    decay, update = random.uniform(0, 1, (2, 16, 4)), random.standard_normal((2, 16, 4))
    decay[0, 5] = 0  # a restart
    want = _sequential(decay, update)
    layout = Layout("data=1") if mesh is None else Layout(mesh)
    order = np.asarray(zigzag(16, layout.sizes["context"])) if in_zigzag else np.arange(16)
    x, y = (jnp.asarray(a[:, order], jnp.float32) for a in (decay, update))
    places = jnp.asarray(order, jnp.int32) if in_zigzag else None
    with layout:
        got = jax.jit(lambda x, y: linear_scan(x, y, AXES, places))(x, y)
    np.testing.assert_allclose(got, want[:, order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_zigzag", [False, True])
def test_devices_send_one_value_for_each_power_of_two_below_their_number_and_once_more(in_zigzag):
    """In zigzag order there and back; nothing is gathered, whatever the length."""
    order = jnp.asarray(zigzag(64, 8), jnp.int32) if in_zigzag else None
    with Layout("context=8"):
        x = jnp.ones((1, 64, 4), jnp.float32)
        text = jax.jit(lambda x, y: linear_scan(x, y, AXES, order)[0]).lower(x, x).compile().as_text()
    ways, kinds = (2 if in_zigzag else 1), set(re.findall(r"(all-\w+|collective-permute|reduce-scatter)\(", text))
    assert kinds == {"collective-permute"}
    sent = [
        math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]\S* collective-permute\(", text)
    ]
    assert ways * 6 <= sum(sent) / 4 <= ways * 7  # 3 steps of a decay and an update (the last may need one), and one
