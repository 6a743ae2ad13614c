"""A mixture of experts in float64 NumPy, one token at a time, from the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxscale.nn import GELU, ExpertChoiceRouter, MixtureOfExperts, ReGLU, SigmoidRouter, SoftmaxRouter, SwiGLU

Tree = Any


def layer(
    c: MixtureOfExperts, p: Tree, x: np.ndarray, real: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the output of the layer, (B, S, E), and its statistics.

    Args:
      c: config of the layer.
      p: its parameters: router (E, X), load_bias (X), gate, up (X, E, F) and down (X, F, E), those of the shared
        expert, and shared_gate (E).
      x: activations (B, S, E).
      real: (B, S), false for padding; by default there is none.
    """
    real = np.ones(x.shape[:2], bool) if real is None else real
    scores = x @ p["router"]
    values, probabilities = _values(c, scores)
    y, load, dropped = _by_experts(c, p, x, probabilities, real) if _ec(c) else _by_tokens(c, p, x, values, real)
    if c.shared:
        matrices = [p["shared"][n]["kernel"] if n in p["shared"] else None for n in ("gate", "up", "down")]
        weight = 1 / (1 + np.exp(-(x @ p["shared_gate"])))[..., None] if c.shared_gate else 1.0
        y = y + weight * _expert(c, x, *matrices)
    by_row, load = load, load.sum(0)
    share = load / load.sum()
    parts = [(share, probabilities[real].mean(0))]
    if c.sequence_balance:
        parts = [(n / n.sum(), q[r].mean(0)) for n, q, r in zip(by_row, probabilities, real, strict=True) if r.any()]
    balance = np.mean([c.experts * sum(f * q for f, q in zip(*part, strict=True)) for part in parts])
    z = np.mean(np.log(np.exp(scores[real]).sum(-1)) ** 2)
    entropy = -sum(float(np.sum(q * np.log(q))) for q in probabilities[real])
    return y, {
        "loss": c.balance_loss * balance + c.z_loss * z,
        "layers": 1.0,
        "load_balance": balance,
        "router_z": z,
        "dropped": dropped,
        "max_load": c.experts * share.max(),
        "router_entropy": entropy / real.sum(),
        f"by_layer/experts_{c.experts}": np.array([*load, real.sum(), entropy]),
    }


def load(c: MixtureOfExperts, p: Tree, x: np.ndarray) -> np.ndarray:
    """Return the share of choices of each expert, before tokens are dropped."""
    values, probabilities = _values(c, x @ p["router"])
    real = np.ones(x.shape[:2], bool)
    count = (_by_experts(c, p, x, probabilities, real) if _ec(c) else _by_tokens(c, p, x, values, real))[1].sum(0)
    return count / count.sum()


def _ec(c: MixtureOfExperts) -> bool:
    return isinstance(c.router, ExpertChoiceRouter)


def _values(c: MixtureOfExperts, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values that experts are chosen by (before any bias), and a probability per expert."""
    if isinstance(c.router, SigmoidRouter):
        s = 1 / (1 + np.exp(-scores))
        return s, s / s.sum(-1, keepdims=True)
    e = np.exp(scores)
    return (e / e.sum(-1, keepdims=True),) * 2


def _by_tokens(
    c: MixtureOfExperts, p: Tree, x: np.ndarray, values: np.ndarray, real: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    b, s, _ = x.shape
    y, load, lost = np.zeros_like(x), np.zeros((b, c.experts)), 0
    group = s if c.capacity is None else min(c.group or s, s)
    slots = math.inf if c.capacity is None else math.ceil(c.capacity * c.top_k * group / c.experts)
    assert isinstance(c.router, SoftmaxRouter | SigmoidRouter)
    for row in range(b):
        for start in range(0, s, group):
            used = np.zeros(c.experts)
            for rank in range(c.top_k):  # the first choices of all tokens before second choices
                for at in start + np.flatnonzero(real[row, start : start + group]):
                    v = values[row, at]
                    by = _limited(c, v + p.get("load_bias", 0.0))
                    best = np.argsort(-by, kind="stable")[: c.top_k]
                    expert = best[rank]
                    load[row, expert] += 1
                    if used[expert] >= slots:
                        lost += 1
                        continue
                    used[expert] += 1
                    weight = c.router.scale * v[expert] / (v[best].sum() if c.router.normalized else 1.0)
                    y[row, at] += weight * _expert(c, x[row, at], *_matrices(p, expert))
    return y, load, lost / (real.sum() * c.top_k)


def _limited(c: MixtureOfExperts, values: np.ndarray) -> np.ndarray:
    """Return a token's values, with -inf outside the groups whose best experts have the largest sum."""
    limit = getattr(c.router, "limit", None)
    if limit is None:
        return values
    each = c.experts // limit.groups
    worth = [sum(sorted(values[g * each : (g + 1) * each])[-limit.best :]) for g in range(limit.groups)]
    chosen = sorted(range(limit.groups), key=lambda g: -worth[g])[: limit.chosen]
    return np.array([v if i // each in chosen else -np.inf for i, v in enumerate(values)])


def _by_experts(
    c: MixtureOfExperts, p: Tree, x: np.ndarray, prob: np.ndarray, real: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    b, s, _ = x.shape
    y, load = np.zeros_like(x), np.zeros((b, c.experts))
    group = min(c.group or s, s)
    assert c.capacity is not None
    slots = min(group, math.ceil(c.capacity * c.top_k * group / c.experts))
    used = np.zeros((b, s), bool)
    for row in range(b):
        for start in range(0, s, group):
            for expert in range(c.experts):
                mine = prob[row, start : start + group, expert]
                best = start + np.argsort(-mine, kind="stable")
                for at in best[real[row, best]][:slots]:
                    y[row, at] += prob[row, at, expert] * _expert(c, x[row, at], *_matrices(p, expert))
                    used[row, at] = True
                    load[row, expert] += 1
    return y, load, float(np.mean(~used[real]))


def _matrices(p: Tree, expert: int) -> list[np.ndarray | None]:
    return [p[n][expert] if n in p else None for n in ("gate", "up", "down")]


def _expert(c: MixtureOfExperts, x: np.ndarray, gate: Any, up: Any, down: Any) -> np.ndarray:
    u = x @ up
    if c.expert is SwiGLU:
        g = x @ gate
        return (g / (1 + np.exp(-g)) * u) @ down
    if c.expert is ReGLU:
        return (np.maximum(x @ gate, 0) * u) @ down
    assert c.expert is GELU
    return (0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))) @ down


def slope(fn: Any, at: np.ndarray, places: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Return derivatives by some elements of an array, by central differences: error about 1e-9 in float64."""
    out, flat = [], at.reshape(-1)
    for i in places:
        value = flat[i]
        flat[i] = value + step
        above = fn()
        flat[i] = value - step
        out.append((above - fn()) / (2 * step))
        flat[i] = value
    return np.array(out)
