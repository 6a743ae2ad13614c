"""A layer of experts in NumPy, one expert after another on all tokens: the truth that implementations have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["chosen", "experts"]


def chosen(x: np.ndarray, router: np.ndarray, top_k: int, *, normalized: bool = True) -> np.ndarray:
    """Return the factor of each expert on each token, (tokens, experts), 0 where it is not chosen.

    Args:
      x: (tokens, e).
      router: (e, experts).
      top_k: experts of a token.
      normalized: divide a token's factors by their sum.
    """
    scores = x @ router
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    factors = np.zeros_like(shares)
    np.put_along_axis(factors, ids, np.take_along_axis(shares, ids, 1), 1)
    return factors / factors.sum(1, keepdims=True) if normalized else factors


def experts(
    x: np.ndarray,
    factors: np.ndarray,
    gate: np.ndarray | None,
    up: np.ndarray,
    down: np.ndarray,
    activation: Callable[..., np.ndarray],
) -> np.ndarray:
    """Return `routed_experts` in the arrays' own dtype, such as float64.

    Args:
      x: (tokens, e).
      factors: (tokens, experts), 0 for an expert that a token has not.
      gate: (experts, e, f), or `None`.
      up: (experts, e, f).
      down: (experts, f, e).
      activation: the hidden layer of the products.
    """
    y = np.zeros_like(x)
    for expert in range(len(up)):
        products = [] if gate is None else [x @ gate[expert]]
        y += factors[:, expert, None] * (activation(*products, x @ up[expert]) @ down[expert])
    return y
