"""Tables of synthetic runs, drawn from a law with known parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

CHINCHILLA = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
"""Hoffmann et al. 2022, approach 3."""

FARSEER = {
    "a1": -0.124, "alpha": 0.123, "b1": 0.424, "a2": 88.01, "beta": -0.1, "b2": -6.287,
    "a3": -0.021, "gamma": 0.169, "b3": 0.091,
}  # fmt: skip
"""Li et al. 2025, Farseer."""

STEPLAW = {"c": 1.79, "a": -0.713, "b": 0.307, "d": 0.58, "e": 0.571}
"""Li et al. 2025, Step Law."""

OOD = {"eval_loss": (20.0, 0.12), "eval_loss/near": (18.0, 0.10), "eval_loss/far": (14.0, 0.06)}
"""A and alpha of each corpus, made up for tests."""

Rows = list[dict[str, Any]]


def chinchilla_loss(n: float, d: float, p: dict[str, float] = CHINCHILLA) -> float:
    """Return L(N, D) by Chinchilla's law."""
    return p["E"] + p["A"] / n ** p["alpha"] + p["B"] / d ** p["beta"]


def farseer_loss(n: float, d: float, p: dict[str, float] = FARSEER) -> float:
    """Return L(N, D) by Farseer's law."""
    floor = np.exp(p["a3"] * n ** p["gamma"] + p["b3"])
    return float(floor + np.exp(p["a2"] * n ** p["beta"] + p["b2"]) * d ** -np.exp(p["a1"] * n ** p["alpha"] + p["b1"]))


def surface_runs(loss: Any, seed: int, noise: float = 3e-3, sizes: int = 5, budgets: int = 5, seeds: int = 1) -> Rows:
    """Return a grid of sizes and tokens, each four times the one before, with multiplicative noise in the loss."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(sizes):
        for j in range(budgets):
            n, d = 1e7 * 4**i, 2e8 * 4**j
            for _ in range(seeds):
                measured = loss(n, d) * np.exp(noise * random.normal())
                rows.append({"parameters": n, "tokens": d, "flops": 6 * n * d, "eval_loss": measured})
    return rows


def isoflop_runs(seed: int, noise: float = 3e-4) -> Rows:
    """Return seven sizes around the best of each of four budgets, by Chinchilla's law."""
    random = np.random.default_rng(seed)
    p = CHINCHILLA
    rows = []
    for c in (1e18, 1e19, 1e20, 1e21):
        share = p["alpha"] + p["beta"]
        best = (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / share) * (c / 6) ** (p["beta"] / share)
        for step in range(-3, 4):
            n = best * 1.5**step
            measured = chinchilla_loss(n, c / (6 * n)) * np.exp(noise * random.normal())
            rows.append({"parameters": n, "tokens": c / (6 * n), "flops": c, "eval_loss": measured})
    return rows


def steplaw_runs(seed: int, noise: float = 1e-3) -> Rows:
    """Return 3 sizes by 3 token budgets, each with 5 learning rates by 5 batches around the best, off centre."""
    random = np.random.default_rng(seed)
    p, rows = STEPLAW, []
    for n in (6e7, 2e8, 6e8):
        for d in (2e9, 8e9, 3e10):
            lr, batch = p["c"] * n ** p["a"] * d ** p["b"], p["d"] * d ** p["e"]
            off = random.uniform(-0.5, 0.5, 2)
            for i in range(-2, 3):
                for j in range(-2, 3):
                    x, y = (i + off[0]) * np.log(1.6), (j + off[1]) * np.log(1.8)
                    bowl = 1 + 0.02 * x**2 + 0.012 * y**2 + 0.006 * x * y
                    measured = chinchilla_loss(n, d) * bowl * np.exp(noise * random.normal())
                    rows.append(
                        {
                            "parameters": n,
                            "tokens": d,
                            "train.lr": lr * np.exp(x),
                            "batch": batch * np.exp(y),
                            "eval_loss": measured,
                        }
                    )
    return rows


def ood_runs(seed: int, noise: float = 3e-3, seeds: int = 3) -> Rows:
    """Return six sizes on one token budget; losses of one run share half of their noise."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(6):
        for _ in range(seeds):
            n, own = 1e5 * 3**i, random.normal()
            losses = {
                k: a * n**-alpha * np.exp(noise * (own + random.normal()) / np.sqrt(2)) for k, (a, alpha) in OOD.items()
            }
            rows.append({"parameters": n, "tokens": 1e8, "flops": 6e8 * n, **losses})
    return rows
