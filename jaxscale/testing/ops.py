"""Comparison of a kernel with plain `jax.numpy`, with a tolerance derived from the latter's error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxscale.testing.compare import Agreement, Difference

TWICE = 2.0
"""Allowed error as a multiple of the error of a plain implementation in the same dtype."""

UNIT = 2.0**-22
"""Minimum allowed relative error: two units in the last place of float32, the error of GPUs' exp2 (PTX, ex2.approx)."""


def error_of(got: jax.Array | np.ndarray, truth: np.ndarray) -> float:
    """Return the relative error |got - truth| / |truth| in float64; the absolute error if `truth` is zero.

    Raises:
      AssertionError: the shapes differ.
    """
    got = np.asarray(got).astype(np.float64)
    assert got.shape == truth.shape, (got.shape, truth.shape)
    return float(np.linalg.norm(got - truth) / (np.linalg.norm(truth) or 1.0))


def allowed(plain: float, dtype: Any) -> float:
    """Return the allowed relative error: twice the plain one's, and at least one unit in the dtype's last place."""
    return max(TWICE * plain, float(ml_dtypes.finfo(dtype).eps), UNIT)


def compare_op(ours: Callable[..., Any], plain: Callable[..., Any], *arrays: jax.Array, seed: int = 0) -> Agreement:
    """Compare an op and its gradients with a plain implementation; errors of both are against the latter in float64.

    The op's error may be twice that of the plain implementation in the same dtype (see `allowed`).

    Args:
      ours: the op: a function from arrays to an array, differentiable in arrays of a floating dtype.
      plain: the same function in `jax.numpy`.
      *arrays: the arguments of both.
      seed: seed of the random cotangent.
    """
    shape = jax.eval_shape(plain, *arrays)
    cotangent = jnp.asarray(np.random.default_rng(seed).normal(size=shape.shape), shape.dtype)
    run = functools.partial(_forward_and_backward, cotangent=cotangent)
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) if _floats(x) else np.asarray(x) for x in arrays]
        exact = _forward_and_backward(plain, *map(jnp.asarray, wide), cotangent=jnp.asarray(cotangent, jnp.float64))
        truth = {what: np.asarray(x) for what, x in exact.items()}
    mine, simple = run(ours, *arrays), run(plain, *arrays)
    row = {}
    for what, x in mine.items():
        error, other = error_of(x, truth[what]), error_of(simple[what], truth[what])
        most = allowed(other, np.asarray(x).dtype)
        row[what] = [Difference(what, error, most, f"off by {error:.2e}, allowed {most:.2e} (plain: {other:.2e})")]
    return Agreement("against float64", {f"{shape.dtype.name} {shape.shape}": row})


def _floats(x: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _forward_and_backward(op: Callable[..., Any], *arrays: jax.Array, cotangent: jax.Array) -> dict[str, jax.Array]:
    """The op's value, and the gradient of each array of a floating dtype."""
    at = [i for i, x in enumerate(arrays) if _floats(x)]

    def of(*floats: Any) -> Any:
        by_index = dict(zip(at, floats, strict=True))
        return op(*(by_index.get(i, x) for i, x in enumerate(arrays)))

    value, pull = jax.vjp(jax.jit(of), *(arrays[i] for i in at))
    return {"value": value} | {f"gradient {i}": g for i, g in zip(at, pull(cotangent), strict=True)}
