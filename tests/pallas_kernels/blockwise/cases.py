"""Parameters, gradients and states to take a step with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blockwise import quantize_blockwise, update_blockwise

SCALARS = dict(lr=1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, momentum=0.9)


def scalars_of(rule, t=3):
    """Return a rule's scalars at step t."""
    numbers = SCALARS | {"fix1": 1 - SCALARS["b1"] ** t, "fix2": 1 - SCALARS["b2"] ** t}
    return {name: numbers[name] for name in rule.scalars}


def make(rule, shape, tile, dtype="float32", grad_dtype=None, *, format="dynamic", zero=False, seed=0):
    """Return (param, grad, states), with magnitudes of four decades within a block."""
    random = np.random.default_rng(seed)
    p = jnp.asarray(random.normal(size=shape), dtype)
    g = jnp.asarray(random.normal(size=shape) * 1e-2, grad_dtype or dtype)
    states = []
    for signed in rule.states:
        x = random.normal(size=shape) * 10.0 ** random.uniform(-4, -1, shape) * (not zero)
        x = jnp.asarray(x if signed else x * x, jnp.float32)
        states.append(quantize_blockwise(x, tile=tile, signed=signed, format=format))
    return p, g, tuple(states)


def step(rule, p, g, states, **options):
    """Run one jitted step."""
    return jax.jit(lambda p, g, s: update_blockwise(rule, scalars_of(rule), p, g, s, **options))(p, g, states)
