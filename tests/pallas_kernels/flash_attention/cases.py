"""What the tests of attention share: float64 NumPy, a plain implementation, and pairwise covering features."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "widths": ((16, 16), (8, 24)),
    "heads": ((4, 2), (3, 3), (4, 1)),
    "lengths": ((41, 41), (37, 70), (64, 64), (50, 33)),
    "causal": (True, False),
    "segments": (False, True),
    "positions": (False, True),
    "window": (None, 7),
    "softcap": (None, 2.0),
    "bias": (None, "bhst", "hs", "bt"),
    "blocks": (False, True),
    "kind": ("softmax", "sigmoid"),
}
"""Tiles are 16 wide in these tests, and lengths are whole tiles, or odd."""


def covering(features: dict[str, tuple[Any, ...]] = FEATURES) -> list[dict[str, Any]]:
    """Return cases that cover every pair of values of two features; a greedy search keeps them few."""
    names = list(features)
    uncovered = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(features[a]))
        for y in range(len(features[b]))
    }
    random, cases = np.random.default_rng(0), []
    while uncovered:
        tries = []
        for _ in range(40):
            a, x, b, y = min(uncovered)
            row = {n: int(random.integers(len(features[n]))) for n in names} | {a: x, b: y}
            for n in names:
                if n not in (a, b):
                    gain = [
                        sum(pair in uncovered for pair in _pairs(row | {n: i}, names, n))
                        for i in range(len(features[n]))
                    ]
                    row[n] = int(np.argmax(gain))
            tries.append((sum(pair in uncovered for pair in _pairs(row, names)), row))
        row = max(tries, key=lambda t: t[0])[1]
        uncovered -= set(_pairs(row, names))
        cases.append({n: features[n][i] for n, i in row.items()})
    return cases


def _pairs(row: dict[str, int], names: list[str], only: str | None = None) -> list[tuple[str, int, str, int]]:
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2) if only in (None, a, b)]


def parameters(cases: list[dict[str, Any]]) -> list[Any]:
    """A test's parameters: pairs of values are for one Python, so a case without a value of its own is `once`."""
    out: list[Any] = []
    met: set[tuple[str, Any]] = set()
    for case in cases:
        new = set(case.items()) - met
        met |= new
        out.append(pytest.param(case, marks=() if new else pytest.mark.once, id=name_of(case)))
    return out


def name_of(case: dict[str, Any]) -> str:
    """Return a case's name: the features that it has and their values."""
    return (
        " ".join(f"{v}" if k in ("dtype", "kind") else f"{k}={v}" for k, v in case.items() if v)
        .replace("(", "")
        .replace(")", "")
    )


def make(case: dict[str, Any], seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arrays (q, k, v, bias or None) and the options of one case."""
    random = np.random.default_rng(seed)
    (h, kv), (s, t), (d, dv), b = case["heads"], case["lengths"], case["widths"], 2
    dtype = jnp.dtype(case["dtype"])
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) * 1.5, dtype)  # noqa: E731
    q, k, v = normal(b, s, h, d), normal(b, t, kv, d), normal(b, t, kv, dv)
    shapes = {None: None, "bhst": (b, h, s, t), "hs": (1, h, s, 1), "bt": (b, 1, 1, t)}
    shape = shapes[case["bias"]]
    bias = None if shape is None else jnp.asarray(random.normal(size=shape), jnp.float32)
    options: dict[str, Any] = {n: case[n] for n in ("causal", "window", "softcap", "kind")}
    if case["segments"]:  # some queries find no key of their segment
        options["segment_ids"] = tuple(np.sort(random.integers(0, 4, (b, n)), 1).astype(np.int32) for n in (s, t))
    if case["positions"]:
        options["positions"] = tuple(random.integers(0, 30, (b, n)).astype(np.int32) for n in (s, t))
    if case["blocks"]:
        table = random.random((-(-s // 8), -(-t // 12))) < 0.5
        options["blocks"] = table
    return (q, k, v, bias), options


def seen_by_loops(options: dict[str, Any], b: int, s: int, t: int) -> np.ndarray:
    """Return the mask (B, S, T), computed for one pair of tokens at a time."""
    seen = np.ones((b, s, t), bool)
    segments, positions = options.get("segment_ids"), options.get("positions")
    for e, i, j in itertools.product(range(b), range(s), range(t)):
        behind = i + t - s - j if positions is None else int(positions[0][e, i]) - int(positions[1][e, j])
        if options.get("causal") and behind < 0:
            seen[e, i, j] = False
        if options.get("window") is not None and not (behind < options["window"] and -behind < options["window"]):
            seen[e, i, j] &= bool(options.get("causal")) and behind < options["window"]
        if segments is not None and segments[0][e, i] != segments[1][e, j]:
            seen[e, i, j] = False
        if options.get("blocks") is not None and not options["blocks"][i // 8, j // 12]:
            seen[e, i, j] = False
    return seen


def seen_at_once(options: dict[str, Any], b: int, s: int, t: int) -> np.ndarray:
    """Return the mask of `seen_by_loops`, fast enough for thousands of cases."""
    i, j = np.arange(s)[:, None], np.arange(t)[None]
    segments, positions = options.get("segment_ids"), options.get("positions")
    behind = (i + (t - s) - j)[None] if positions is None else positions[0][:, :, None] - positions[1][:, None]
    seen = np.ones((b, s, t), bool)
    if options.get("causal"):
        seen &= behind >= 0
    if options.get("window") is not None:
        seen &= (behind if options.get("causal") else abs(behind)) < options["window"]
    if segments is not None:
        seen &= segments[0][:, :, None] == segments[1][:, None]
    if options.get("blocks") is not None:
        seen &= options["blocks"][i // 8, j // 12]
    return seen


def truth(
    arrays: tuple[Any, ...], options: dict[str, Any], dout: Any, dlse: Any
) -> tuple[np.ndarray, np.ndarray | None, tuple[np.ndarray | None, ...]]:
    """Return output, log-sum-exp and the gradients of q, k, v and bias, by hand, in float64."""
    q, k, v, bias = (None if a is None else np.asarray(a, np.float64) for a in arrays)
    dout = np.asarray(dout, np.float64)
    (b, s, h, d), (t, kv) = q.shape, k.shape[1:3]
    seen = seen_at_once(options, b, s, t)[:, None]
    k, v = (np.repeat(a, h // kv, 2) for a in (k, v))
    scale, softcap = options.get("scale") or d**-0.5, options.get("softcap")
    scores, slope = np.einsum("bshd,bthd->bhst", q, k) * scale, 1.0
    if softcap:
        slope = 1 - np.tanh(scores / softcap) ** 2
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    lse = None
    dweights = np.einsum("bshd,bthd->bhst", dout, v)
    if options.get("kind") == "sigmoid":
        weights = seen / (1 + np.exp(-(scores if bias is not None else scores - math.log(t))))
        dscores = dweights * weights * (1 - weights)
    else:
        with np.errstate(divide="ignore"):
            lse = np.log((np.exp(scores) * seen).sum(-1))
        weights = np.exp(scores - np.where(np.isinf(lse), 0, lse)[..., None]) * seen
        total = (weights * dweights).sum(-1) - np.asarray(dlse, np.float64).transpose(0, 2, 1)
        dscores = weights * (dweights - total[..., None])
        lse = lse.transpose(0, 2, 1)
    dbias = None
    if bias is not None:
        dbias = dscores.sum(tuple(a for a, n in enumerate(bias.shape) if n == 1), keepdims=True)
    dscores = dscores * slope * scale
    grouped = lambda x: x.reshape(b, t, kv, h // kv, -1).sum(3)  # noqa: E731
    dq = np.einsum("bhst,bthd->bshd", dscores, k)
    dk = grouped(np.einsum("bhst,bshd->bthd", dscores, q))
    dv = grouped(np.einsum("bhst,bshd->bthd", weights, dout))
    return np.einsum("bhst,bthd->bshd", weights, v), lse, (dq, dk, dv, dbias)


def plain(q: Any, k: Any, v: Any, bias: Any, *, seen: Any, options: dict[str, Any]) -> tuple[jax.Array, Any]:
    """Plain attention in jax.numpy: products in the arrays' dtype, the weights' function in float32.

    Returns:
      the output, and the log-sum-exp, `None` for sigmoid.
    """
    (_, _, h, d), (t, kv) = q.shape, k.shape[1:3]
    k, v = (jnp.repeat(a, h // kv, 2) for a in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) * d**-0.5
    if options.get("softcap"):
        scores = options["softcap"] * jnp.tanh(scores / options["softcap"])
    if bias is not None:
        scores = scores + bias
    seen, lse = seen[:, None], None
    if options.get("kind") == "sigmoid":
        weights = jax.nn.sigmoid(scores if bias is not None else scores - math.log(t)) * seen
    else:
        scores = jnp.where(seen, scores, -1e30)
        weights = jax.nn.softmax(scores, -1) * seen
        lse = jnp.where(seen.any(-1), jax.nn.logsumexp(scores, -1), -jnp.inf).transpose(0, 2, 1)
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v), lse


def assert_as_exact_as(
    got: Any, theirs: Any, want: np.ndarray, what: str, *, dtype: Any = None, units: float = 1.0
) -> None:
    """Assert that our error is at most twice the plain one's, or some units in the last place of the whole norm.

    `dtype` says whose last place, where it is not the result's own: a float32 gradient of a bias is made from an output
    that was rounded to the arrays' dtype.
    """
    assert got.shape == want.shape, f"{what}: {got.shape}, should be {want.shape}"
    error, plain_error = (np.linalg.norm(np.asarray(a, np.float64) - want) for a in (got, theirs))
    floor = units * float(jnp.finfo(dtype or got.dtype).eps) * np.linalg.norm(want)
    assert error <= max(2 * plain_error, floor), f"{what}: off by {error:.2e}, plain {plain_error:.2e}, {floor:.2e}"
