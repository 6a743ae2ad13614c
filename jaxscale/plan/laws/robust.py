"""Huber regression of many problems at once: every start and every bootstrap sample is a row of one batch.

Levenberg-Marquardt on the re-weighted squares that touch Huber's loss from above, so that no accepted step raises it.
Slopes are taken by a complex step (Squire and Trapp 1998), exact to rounding: a law only has to say its prediction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Complex, Float, Int

STEP = 1e-30
"""Of the complex step: far below rounding, since nothing is subtracted."""

Residuals = Callable[[Complex[np.ndarray, "s k"], Int[np.ndarray, " s"]], Complex[np.ndarray, "s n"]]
"""Of the parameters of the rows numbered in the second argument."""


def huber(r: Float[np.ndarray, "*n"], delta: float) -> Float[np.ndarray, "*n"]:
    """Huber's loss: r² / 2 up to |r| = delta, and linear beyond (Huber 1964)."""
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
    """Descends from each start to a minimum of its own weighted Huber loss.

    Args:
      residuals: what is to be small; written with functions that take complex numbers.
      starts: a row per problem.
      weights: of each residual in each problem; a bootstrap's are counts.
      delta: where the loss turns linear, in the unit of the residuals.
      iterations: at most so many steps.
      tolerance: a problem is done when a step lowers its loss by less than this share.

    Returns:
      the parameters, and the loss of each; infinite where a start is not finite.
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
            better = after < loss[active]  # never for what is not finite
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
    """Residuals (S, N), and their slopes (S, N, K)."""
    columns = []
    for k in range(params.shape[1]):
        moved = params.astype(np.complex128)
        moved[:, k] += 1j * STEP
        out = residuals(moved, rows)
        columns.append(out.imag / STEP)
    return out.real, np.stack(columns, axis=-1)


def _solve(matrices: Float[np.ndarray, "s k k"], vectors: Float[np.ndarray, "s k"]) -> Float[np.ndarray, "s k"]:
    """One that cannot be solved is answered by NaN, which is no step down."""
    bad = ~np.isfinite(matrices).all((1, 2)) | ~np.isfinite(vectors).all(1)
    matrices = np.where(bad[:, None, None], np.eye(matrices.shape[1]), matrices)
    try:
        found = np.linalg.solve(matrices, vectors[..., None])[..., 0]
    except np.linalg.LinAlgError:
        found = np.einsum("skl,sl->sk", np.linalg.pinv(matrices, hermitian=True), vectors)
    return np.where(bad[:, None], np.nan, found)
