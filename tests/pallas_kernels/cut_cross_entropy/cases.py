"""What the tests of the cut loss share: arrays, float64 NumPy, and the loss as anybody writes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "w_dtype": (None, "float32"),
    "w_layout": ("ve", "ev"),
    "sizes": ((32, 48), (37, 83), (6, 7)),
    "batched": (False, True),
    "softcap": (None, 2.0),
    "z_loss": (0.0, 0.1),
    "label_smoothing": (0.0, 0.2),
    "ignore_index": (None, -100, 3),
    "weights": (False, True),
}
"""Tiles are 16 tokens by 24 words in these tests."""

WIDTH = 16


def make(case: dict[str, Any], seed: int = 0) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Return (x, w, targets) and the options of one case."""
    random = np.random.default_rng(seed)
    n, v = case["sizes"]
    dtype = jnp.dtype(case["dtype"])
    x = jnp.asarray(random.normal(size=(n, WIDTH)), dtype)
    w = jnp.asarray(random.normal(size=(v, WIDTH)), case["w_dtype"] or dtype)
    targets = random.integers(0, v, n).astype(np.int32)
    options: dict[str, Any] = {name: case[name] for name in ("softcap", "z_loss", "label_smoothing", "ignore_index")}
    if options["ignore_index"] is not None:
        targets[random.random(n) < 0.3] = options["ignore_index"]
    if case["weights"]:
        options["weights"] = random.random(n).astype(np.float32)
    if case["w_layout"] == "ev":
        w = w.T
    if case["batched"] and n % 2 == 0:
        x, targets = x.reshape(2, -1, WIDTH), targets.reshape(2, -1)
        if case["weights"]:
            options["weights"] = options["weights"].reshape(2, -1)
    return (x, w, targets), options


def truth(
    arrays: tuple[Any, Any, Any], options: dict[str, Any], d: Any, dlse: Any, dentropy: Any
) -> tuple[np.ndarray, ...]:
    """Return loss, log-sum-exp, entropy and the gradients of x, w and weights, by hand, in float64.

    `d`, `dlse` and `dentropy` are the cotangents of the first three.
    """
    x, w, targets = arrays
    w = np.asarray(w.astype(x.dtype), np.float64)
    turned, shape = w.shape[0] == x.shape[-1], x.shape
    w = w.T if turned else w
    x, d, dlse, dentropy, targets = (
        np.asarray(x, np.float64).reshape(-1, shape[-1]),
        *(a.reshape(-1) for a in (d, dlse, dentropy, targets)),
    )
    n, v = len(x), len(w)
    logits, slope = x @ w.T, 1.0
    if cap := options.get("softcap"):
        slope = 1 - np.tanh(logits / cap) ** 2
        logits = cap * np.tanh(logits / cap)
    ignored = targets == options["ignore_index"] if options.get("ignore_index") is not None else np.zeros(n, bool)
    smoothing, z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    labels = np.full((n, v), smoothing / v)
    labels[np.arange(n), np.where(ignored, 0, targets)] += 1 - smoothing
    lse = np.log(np.exp(logits).sum(1))
    weights = np.where(ignored, 0, np.asarray(options.get("weights", np.ones(n)), np.float64).ravel())
    plain = lse - (labels * logits).sum(1) + z * lse**2
    share = np.exp(logits - lse[:, None])
    entropy = -(share * (logits - lse[:, None])).sum(1)
    g = (weights * d)[:, None] * (share * (1 + 2 * z * lse[:, None]) - labels) + dlse[:, None] * share
    g = g - dentropy[:, None] * share * (logits - lse[:, None] + entropy[:, None])
    g = g * slope
    dw = g.T @ x
    row = lambda a: a.reshape(shape[:-1])  # noqa: E731
    dweights = np.where(ignored, 0, plain * d)
    return row(weights * plain), row(lse), row(entropy), (g @ w).reshape(shape), dw.T if turned else dw, row(dweights)


def plain(x: Any, w: Any, weights: Any, *, targets: Any, options: dict[str, Any]) -> tuple[jax.Array, ...]:
    """Return loss, log-sum-exp and entropy of materialised logits, with products in x's dtype."""
    w = w.astype(x.dtype)
    logits = (x @ (w if w.shape[0] == x.shape[-1] else w.T)).astype(jnp.float32)
    if cap := options.get("softcap"):
        logits = cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, -1)
    smoothing = options.get("label_smoothing", 0.0)
    hit = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = lse - (1 - smoothing) * hit - smoothing * logits.mean(-1) + options.get("z_loss", 0.0) * lse**2
    ignored = targets == options["ignore_index"] if options.get("ignore_index") is not None else False
    logprobs = logits - lse[..., None]
    entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
    return jnp.where(ignored, 0, loss * weights), lse, entropy


def arrays_in(jaxpr: Any) -> list[Any]:
    """Return the abstract value of every intermediate, including those inside loops and calls."""
    avals = []
    for eqn in jaxpr.eqns:
        avals += [v.aval for v in eqn.outvars]
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                avals += arrays_in(part)
    return avals
