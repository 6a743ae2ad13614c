"""Huber regression of a batch of problems, such as all starts of a search or all bootstrap samples.

The method is Levenberg-Marquardt on reweighted least squares; an accepted step never raises the loss. Derivatives are
by the complex step (Squire and Trapp 1998), exact to rounding, so that a law only defines its prediction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Complex, Float, Int

STEP = 1e-30
"""Size of the complex step; it may be far below rounding, since nothing is subtracted."""

Residuals = Callable[[Complex[np.ndarray, "s k"], Int[np.ndarray, " s"]], Complex[np.ndarray, "s n"]]
"""Takes parameters of some problems and the numbers of these problems; returns their residuals."""


def huber(r: Float[np.ndarray, "*n"], delta: float) -> Float[np.ndarray, "*n"]:
    """Return Huber's loss: r² / 2 up to |r| = delta, and linear beyond (Huber 1964).

    Args:
      r: residuals.
      delta: where the loss becomes linear.
    """
    size = np.abs(r)
    return np.where(size <= delta, 0.5 * r * r, delta * (size - 0.5 * delta))


def minimise(
    residuals: Residuals,
    starts: Float[np.ndarray, "s k"],
    weights: Float[np.ndarray, "s n"],
    delta: float,
    *,
    iterations: int = 300,
    tolerance: float = 1e-10,
) -> tuple[Float[np.ndarray, "s k"], Float[np.ndarray, " s"]]:
    """Minimise the weighted Huber loss of each problem from its start.

    Args:
      residuals: computes residuals, with functions that accept complex numbers.
      starts: parameters to start from, a row per problem.
      weights: weight of each residual in each problem; counts, for bootstrap samples.
      delta: where the loss becomes linear, in the unit of the residuals.
      iterations: largest number of steps.
      tolerance: a problem is done when a step lowers its loss by less than this share.

    Returns:
      parameters and loss of each problem; the loss is infinite where a start is not finite.
    """
    params = np.array(starts, np.float64)
    with np.errstate(all="ignore"):
        everything = np.arange(len(params))
        loss = _loss(residuals, params, everything, weights, delta)
        damping = np.full(len(params), 1e-3)
        active = everything[np.isfinite(loss)]
        for _ in range(iterations):
            if not len(active):
                break
            p, w = params[active], weights[active]
            r, slopes = _slopes(residuals, p, active)
            pull = w * np.minimum(1.0, delta / np.maximum(np.abs(r), 1e-300))
            gradient = np.einsum("snk,sn->sk", slopes, pull * r)
            curvature = np.einsum("snk,sn,snl->skl", slopes, pull, slopes)
            diagonal = np.einsum("skk->sk", curvature)
            floor = 1e-12 * np.max(diagonal, axis=1, keepdims=True) + 1e-300
            damped = curvature + np.einsum("sk,kl->skl", damping[active, None] * (diagonal + floor), np.eye(p.shape[1]))
            trial = p - _solve(damped, gradient)
            after = _loss(residuals, trial, active, w, delta)
            better = after < loss[active]  # False for a loss that is not finite
            gain = np.where(better, (loss[active] - after) / np.maximum(loss[active], 1e-300), np.inf)
            params[active[better]], loss[active[better]] = trial[better], after[better]
            damping[active] = np.clip(np.where(better, damping[active] / 5, damping[active] * 4), 1e-14, 1e16)
            done = (better & (gain < tolerance)) | (damping[active] > 1e12) | (loss[active] < 1e-28)
            active = active[~done]
    return params, loss


def _loss(
    residuals: Residuals, params: np.ndarray, rows: np.ndarray, weights: np.ndarray, delta: float
) -> Float[np.ndarray, " s"]:
    total = np.sum(weights * huber(residuals(params.astype(np.complex128), rows).real, delta), axis=1)
    return np.where(np.isfinite(total), total, np.inf)


def _slopes(residuals: Residuals, params: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return residuals (S, N) and their derivatives by the parameters (S, N, K)."""
    columns = []
    for k in range(params.shape[1]):
        moved = params.astype(np.complex128)
        moved[:, k] += 1j * STEP
        out = residuals(moved, rows)
        columns.append(out.imag / STEP)
    return out.real, np.stack(columns, axis=-1)


def _solve(matrices: Float[np.ndarray, "s k k"], vectors: Float[np.ndarray, "s k"]) -> Float[np.ndarray, "s k"]:
    """Solve linear systems; the solution of a system that is not finite is NaN, a step that is never accepted."""
    bad = ~np.isfinite(matrices).all((1, 2)) | ~np.isfinite(vectors).all(1)
    matrices = np.where(bad[:, None, None], np.eye(matrices.shape[1]), matrices)
    try:
        solution = np.linalg.solve(matrices, vectors[..., None])[..., 0]
    except np.linalg.LinAlgError:
        solution = np.einsum("skl,sl->sk", np.linalg.pinv(matrices, hermitian=True), vectors)
    return np.where(bad[:, None], np.nan, solution)
