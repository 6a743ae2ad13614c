"""What the tests of attention to a cache share: float64 NumPy, one query at a time, and random caches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.flash_attention.cases import covering

FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "widths": ((16, 16), (24, 8)),
    "heads": ((4, 2), (3, 3), (8, 1)),
    "queries": (1, 3),
    "pages": ((4, 9), (16, 3), (50, 1), (20, 2)),
    "stride": (1, 3),
    "window": (None, 7),
    "softcap": (None, 2.0),
    "shared": (False, True),
}
"""`pages` is a page's keys and a table's entries."""
CASES = covering(FEATURES)
ROWS = 3


def make(case: dict[str, Any], seed: int = 0, pages: bool = False) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Return arrays (q, k, v or None) and options; what no query sees is NaN, or with `pages` only whole pages."""
    random = np.random.default_rng(seed)
    (h, kv), (d, dv), (page, entries), n = case["heads"], case["widths"], case["pages"], case["queries"]
    stride, count = case.get("stride", 1), ROWS * entries + 2
    normal = lambda *shape: random.normal(size=shape) * 1.5  # noqa: E731
    q, k, v = normal(ROWS, n, h, d), normal(count, page, kv, d), normal(count, page, kv, dv)
    tables = random.permutation(count)[: ROWS * entries].reshape(ROWS, entries)
    first = int(random.integers(stride))
    most = entries * page * stride
    positions = np.sort(random.integers(most // 3, most, (ROWS, n)), 1)
    positions[1] = np.arange(n) + page // 2  # a short row
    positions[2, : n // 2] = -1
    window = case.get("window")
    options = {"positions": positions, "first": first, "stride": stride, "window": window}
    options |= {"softcap": case.get("softcap"), "value_dim": dv if case.get("shared") else None}
    used = np.zeros((count, page), bool)
    for row in range(ROWS):
        last, low = positions[row].max(), positions[row][positions[row] >= 0].min() - (window or most)
        for entry in range(entries):
            place = (first + entry * stride) * page + np.arange(page)
            used[tables[row, entry]] = (place <= last) & (place > low)
            if not used[tables[row, entry]].any():
                tables[row, entry] = -1
    options["tables"] = tables.astype(np.int32)
    unseen = ~used.any(1) if pages else ~used
    k[unseen], v[unseen] = np.nan, np.nan
    arrays = tuple(jnp.asarray(x, case["dtype"]) for x in (q, k, v))
    return (arrays[0], arrays[1], None if case.get("shared") else arrays[2]), options


def truth(arrays: tuple[Any, Any, Any], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return output and log-sum-exp in float64."""
    wide = lambda x: np.asarray(x).astype(np.float64)  # noqa: E731
    q, k, dv = wide(arrays[0]), wide(arrays[1]), options.get("value_dim")
    v = k[..., :dv] if arrays[2] is None else wide(arrays[2])
    (b, n, h, d), (_, page, kv, _) = q.shape, k.shape
    out, lse = np.zeros((b, n, h, v.shape[-1])), np.full((b, n, h), -np.inf)
    scale = d**-0.5 if options.get("scale") is None else options["scale"]
    tables, first, stride = options["tables"], options.get("first", 0), options.get("stride", 1)
    for row, i, head in np.ndindex(b, n, h):
        at, key_head = options["positions"][row, i], head // (h // kv)
        scores, values = [], []
        for entry, j in np.ndindex(tables.shape[1], page):
            place = (first + entry * stride) * page + j
            if place > at or at - place >= (options.get("window") or np.inf):
                continue
            score = q[row, i, head] @ k[tables[row, entry], j, key_head] * scale
            cap = options.get("softcap")
            scores.append(score if cap is None else cap * np.tanh(score / cap))
            values.append(v[tables[row, entry], j, key_head])
        if scores:
            top = max(scores)
            weights = np.exp(np.asarray(scores) - top)
            lse[row, i, head] = top + np.log(weights.sum())
            out[row, i, head] = weights @ np.asarray(values) / weights.sum()
    return out, lse


def plain(arrays: tuple[Any, Any, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Plain attention: all pages gathered, scores in float32, weights rounded to the values' dtype."""
    q, k, v = arrays
    (b, _, h, d), (_, page, kv, _) = q.shape, k.shape
    tables = jnp.maximum(options["tables"], 0)
    take = lambda x: jnp.nan_to_num(jnp.repeat(x[tables].reshape(b, -1, kv, x.shape[-1]), h // kv, axis=2))  # noqa: E731
    keys = take(k)
    values = keys[..., : options["value_dim"]] if v is None else take(v)
    entry = options.get("first", 0) + np.arange(tables.shape[1]) * options.get("stride", 1)
    place = (entry[:, None] * page + np.arange(page)).reshape(-1)
    behind = options["positions"][:, :, None] - place
    seen = (behind >= 0) & (behind < (options.get("window") or 2**30)) & (options["positions"] >= 0)[:, :, None]
    scale = d**-0.5 if options.get("scale") is None else options["scale"]
    scores = jnp.einsum("bqhd,bthd->bhqt", q, keys, preferred_element_type=jnp.float32) * scale
    if cap := options.get("softcap"):
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    lse = jnp.where(seen.any(-1)[:, None], jnp.log(jnp.exp(scores - scores.max(-1, keepdims=True)).sum(-1)), -jnp.inf)
    lse = jnp.where(seen.any(-1)[:, None], lse + scores.max(-1), -jnp.inf)
    weights = jnp.where(seen[:, None], jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None]), 0)
    if values.dtype != jnp.float32:  # XLA's GPU compiler leaves out a plain conversion there and back
        weights = jax.lax.reduce_precision(weights, jnp.finfo(values.dtype).nexp, jnp.finfo(values.dtype).nmant)
    out = jnp.einsum("bhqt,bthd->bqhd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out, lse.swapaxes(1, 2)
