"""Dropout of attention weights in float64, with the generator in NumPy, and its rows of the parity table."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import flash_attention
from tests.pallas_kernels.comparison import Program, Work, draws
from tests.pallas_kernels.flash_attention.cases import seen_at_once

RATE = 0.3
FEATURES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "D=128 grouped causal dropout": (128, 64, {"causal": True}),
    "D=64 odd causal segments dropout": (64, 53, {"causal": True, "segment_ids": True}),
}
"""A feature of the table -> width, tokens and options."""
PARTS = ("out", "lse", "dq", "dk", "dv")


def works() -> Iterator[Work]:
    """Yield the work of the table."""
    for feature in FEATURES:
        for dtype in ("float32", "bfloat16", "float16"):
            yield Work("flash_attention", feature, dtype, PARTS, functools.partial(_program, feature, dtype))


def _program(feature: str, dtype: str, seed: int | None) -> Program:
    width, s, options = FEATURES[feature]
    random = np.random.default_rng(draws(7, seed))
    b, h, kv = 2, 4, 2
    of = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)  # noqa: E731
    arrays = q, k, v, dout = of(b, s, h, width), of(b, s, kv, width), of(b, s, kv, width), of(b, s, h, width)
    dlse = jnp.asarray(random.normal(size=(b, s, h)), jnp.float32)
    seeds = random.integers(0, 2**32, (b, h, 2), np.uint32)
    if "segment_ids" in options:
        options = options | {"segment_ids": (np.sort(random.integers(0, 3, (b, s)), 1).astype(np.int32),) * 2}
    places = np.broadcast_to(np.arange(s), (b, s))
    seen, keep = np.asarray(seen_at_once(options, b, s, s)), keep_of(seeds, places, places)

    def ours(implementation: str) -> Any:
        kwargs = options | {"dropout": RATE, "dropout_seeds": seeds, "return_lse": True}
        op = functools.partial(flash_attention, implementation=implementation, **kwargs)
        return functools.partial(_both, op)

    def right() -> tuple[Any, ...]:
        results, gradients = truth(q, k, v, seen, keep, dout, dlse)
        return *results, *gradients

    plain = functools.partial(_plain, seen=jnp.asarray(seen), keep=jnp.asarray(keep))
    return Program(ours, (*arrays, dlse), tuple, lambda: jax.jit(functools.partial(_both, plain))(*arrays, dlse), right)


def _both(op: Any, q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    results, pull = jax.vjp(op, q, k, v)
    return *results, *pull((dout, dlse))


def _plain(q: Any, k: Any, v: Any, *, seen: Any, keep: Any) -> tuple[Any, Any]:
    """Plain attention in jax.numpy: products in the arrays' dtype, the weights in float32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jnp.where(keep, jax.nn.softmax(scores, -1) / (1 - RATE), 0.0)
    out = jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)
    return out, jax.nn.logsumexp(scores, -1).transpose(0, 2, 1)


# float64 ---------------------------------------------------------------------------------------------------------


def threefry(key: Any, x: np.ndarray, y: np.ndarray, rounds: int = 13) -> np.ndarray:
    """Return the first word of Threefry-2x32 in NumPy's uint32."""
    turned = lambda z, by: (z << np.uint32(by)) | (z >> np.uint32(32 - by))  # noqa: E731
    keys = [*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    with np.errstate(over="ignore"):
        x, y = x + keys[0], y + keys[1]
        for n in range(rounds):
            x = x + y
            y = turned(y, (13, 15, 26, 6, 17, 29, 16, 24)[n % 8]) ^ x
            if n % 4 == 3:
                x, y = x + keys[(n // 4 + 1) % 3], y + keys[(n // 4 + 2) % 3] + np.uint32(n // 4 + 1)
    return x


def keep_of(seeds: np.ndarray, q_places: np.ndarray, k_places: np.ndarray, rate: float = RATE) -> np.ndarray:
    """Return (B, H, S, T): which weights are used."""
    word = lambda n: seeds[:, :, n, None, None]  # noqa: E731
    of = lambda x: x.astype(np.uint32)  # noqa: E731
    bits = threefry((word(0), word(1)), of(q_places)[:, None, :, None], of(k_places)[:, None, None])
    return bits >= np.uint32(round(rate * 2**32))


def truth(
    q: Any, k: Any, v: Any, seen: Any, keep: Any, dout: Any, dlse: Any, softcap: float | None = None, rate: float = RATE
) -> Any:
    """Return output, log-sum-exp and gradients in float64; the weights' sum is that before dropout."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, 2) for x in (k, v))
    scores, slope = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1]), np.ones(())
    if softcap:
        tanh = np.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1 - tanh**2
    scores = np.where(seen[:, None], scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    factor = keep / (1 - rate)
    out = np.einsum("bhst,bthd->bshd", weights * factor, v)
    dweights = np.einsum("bshd,bthd->bhst", dout, v) * factor
    inner = (weights * dweights).sum(-1, keepdims=True) - dlse.transpose(0, 2, 1)[..., None]
    dscores = weights * (dweights - inner) * slope / np.sqrt(q.shape[-1])
    merged = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)  # noqa: E731
    return (out, lse.transpose(0, 2, 1)), (
        np.einsum("bhst,bthd->bshd", dscores, k),
        merged(np.einsum("bhst,bshd->bthd", dscores, q)),
        merged(np.einsum("bhst,bshd->bthd", weights * factor, dout)),
    )
