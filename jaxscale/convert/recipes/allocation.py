"""Bits for each matrix in closed form, such that all lose as much for each weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


def real_bits(costs: Sequence[float], sizes: Sequence[int], mean: float) -> Float[np.ndarray, " m"]:
    """Return the bits that minimise a loss: a quarter of it is left with each further bit (BAQ, arXiv:2506.05664).

    The loss of a matrix with b bits is cost · 4^(-b). At the optimum every matrix loses as much for each of its
    weights, cost · 4^(-b) / size: b is the mean plus half the logarithm to base 2 of cost / size over its weighted
    geometric mean.

    Args:
      costs: of each matrix, above 0.
      sizes: weights of each matrix.
      mean: bits of a weight on average; results may be below 0.
    """
    n = np.asarray(sizes, np.float64)
    logs = 0.5 * np.log2(np.asarray(costs, np.float64) / n)
    return mean + logs - np.sum(n * logs) / np.sum(n)


def whole_bits(
    costs: Sequence[float], sizes: Sequence[int], mean: float, widths: Sequence[int]
) -> Int[np.ndarray, " m"]:
    """Return bits out of some widths, on average at most `mean`: the closed form rounded down, then bits by their gain.

    Of this and the widest single width for all, the one with the smaller loss is returned.

    Args:
      costs: see `real_bits`.
      sizes: see `real_bits`.
      mean: see `real_bits`; at least the smallest width.
      widths: widths to choose from.
    """
    n, cost, widths = np.asarray(sizes), np.asarray(costs, np.float64), sorted(widths)
    budget = mean * float(n.sum())
    place = np.clip(np.searchsorted(widths, real_bits(costs, sizes, mean), side="right") - 1, 0, None)

    def bits(place: np.ndarray) -> np.ndarray:
        return np.asarray(widths)[place]

    def loss(place: np.ndarray) -> np.ndarray:
        return cost * 4.0 ** -bits(place).astype(np.float64)

    while float(np.sum(n * bits(place))) > budget:  # matrices below the smallest width were raised to it
        lower = np.maximum(place - 1, 0)
        saved = n * (bits(place) - bits(lower))
        if not saved.any():
            break
        harm = np.where(saved > 0, (loss(lower) - loss(place)) / np.maximum(saved, 1), np.inf)
        place[int(np.argmin(harm))] -= 1
    while True:
        upper = np.minimum(place + 1, len(widths) - 1)
        more = n * (bits(upper) - bits(place))
        fits = (more > 0) & (np.sum(n * bits(place)) + more <= budget)
        if not fits.any():
            break
        gain = np.where(fits, (loss(place) - loss(upper)) / np.maximum(more, 1), -np.inf)
        place[int(np.argmax(gain))] += 1
    same = np.full(len(n), max(np.searchsorted(widths, mean, side="right") - 1, 0))
    return bits(place if loss(place).sum() <= loss(same).sum() else same)
