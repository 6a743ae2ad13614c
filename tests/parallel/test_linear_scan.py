"""A recurrence over a sharded sequence."""

from __future__ import annotations

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
