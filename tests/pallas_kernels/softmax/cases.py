"""What the tests of softmax share: the rule of accuracy, and the ops beside jax.nn's and NumPy's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import softmax as ours

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
OPS = {
    "softmax": (ours.softmax, jax.nn.softmax),
    "log_softmax": (ours.log_softmax, jax.nn.log_softmax),
    "logsumexp": (ours.logsumexp, lambda x, **kw: jax.nn.logsumexp(x, axis=-1, **kw)),
}


def normal(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0, scale: float = 3.0) -> jax.Array:
    """Return normal numbers."""
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def truth(op: str, x: Any) -> np.ndarray:
    """Return the op's value in float64."""
    x = np.asarray(x, np.float64)
    top = x.max(-1, keepdims=True)
    log = top + np.log(np.exp(x - top).sum(-1, keepdims=True))
    return {"softmax": np.exp(x - log), "log_softmax": x - log, "logsumexp": log[..., 0]}[op]


def gradient_truth(op: str, x: Any, g: Any) -> np.ndarray:
    """Return the gradient of sum(g * op(x)) in float64."""
    g, p = np.asarray(g, np.float64), truth("softmax", x)
    if op == "softmax":
        return p * (g - (p * g).sum(-1, keepdims=True))
    return g - p * g.sum(-1, keepdims=True) if op == "log_softmax" else g[..., None] * p


def assert_as_exact_as(got: Any, plain: Any, want: np.ndarray, what: str = "", units: float = 1.0) -> None:
    """Assert that our largest error is at most twice the plain one's, or some units in the last place."""
    error, theirs = (np.abs(np.asarray(a, np.float64) - want).max() for a in (got, plain))
    floor = float(jnp.finfo(got.dtype).eps) * np.abs(want).max() * units
    assert error <= max(2 * theirs, floor), f"{what}: off by {error:.2e}, plain {theirs:.2e}, floor {floor:.2e}"


def value_and_gradient(f: Any, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return f(x) and the gradient of sum(g * f(x)), compiled as one program."""

    @jax.jit
    def both(x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(f, x)
        return y, pull(g.astype(y.dtype))[0]

    return both(x, g)


def cotangent(op: str, x: jax.Array) -> jax.Array:
    """Return a cotangent of the op's output."""
    return normal(x.shape[:-1]) if op == "logsumexp" else normal(x.shape, x.dtype, seed=1)


def units(op: str) -> float:
    """Return the units allowed for a gradient: logsumexp's is rounded twice, as a share and by the cotangent."""
    return 2.0 if op == "logsumexp" else 1.0


def assert_same(got: Any, want: Any, what: str = "") -> None:
    """Assert equality to a few units in the last place, with infinities and NaN in the same places."""
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-30, err_msg=what)


INF, NAN = np.inf, np.nan
F32 = float(np.finfo(np.float32).max)
EDGES = {
    "+inf": [1.0, INF, 2.0],
    "two +inf": [INF, INF, 2.0],
    "-inf": [1.0, -INF, 2.0],
    "all -inf": [-INF, -INF, -INF],
    "nan": [1.0, NAN, 2.0],
    "nan and inf": [INF, NAN, 2.0],
    "huge": [1e38, -1e38, 1e38],
    "largest": [F32, -F32, F32],
    "float16's largest": [65504.0, 65503.0, -65504.0],
    "lowest": [-F32, -F32, -INF],
}
"""Rows of three."""


def edge_rows(columns: int = 3) -> jax.Array:
    """Return all `EDGES`, padded with -inf, which changes no result."""
    rows = np.full((len(EDGES), columns), -INF, np.float32)
    rows[:, :3] = list(EDGES.values())
    return jnp.asarray(rows)
