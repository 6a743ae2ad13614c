"""Few queries and many keys on Hopper: stretches of the keys are computed as examples of their own, and merged.

A block of the forward kernel keeps 128 queries of a head, so that 64 queries of 8 heads would leave 124 of 132
multiprocessors idle, however many keys there are. The parts merge exactly by their log-sum-exps, as in decode
(Flash-Decoding, Dao et al. 2023); each is rounded to the dtype of the output before.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.gpu_walk import ROWS, WARPGROUPS
from pallas_kernels.flash_attention.inputs import Inputs
from pallas_kernels.flash_attention.masks import Mask

LEAST = 2048
"""Keys of the shortest stretch."""

_TILE = ROWS * WARPGROUPS


def stretches(cores: int, blocks: int, keys: int) -> int:
    """Return how many stretches to cut keys into, a power of 2.

    Args:
      cores: multiprocessors of the GPU.
      blocks: tiles of queries of all heads and examples.
      keys: keys of an example.
    """
    n = 1
    while 2 * n * blocks <= cores and keys % (2 * n * _TILE) == 0 and keys >= 2 * n * LEAST:
        n *= 2
    return n


def cut(inputs: Inputs, mask: Mask, n: int) -> Inputs:
    """Return arrays with n examples in place of each, with the same queries and a stretch of the keys.

    Args:
      inputs: the arrays, without bias and dropout.
      mask: without a table of blocks.
      n: number of stretches.
    """
    q, k, v, _, tokens, _ = inputs
    (b, s), t = q.shape[:2], k.shape[1]
    if tokens.q_positions is None and (mask.causal or mask.window is not None):
        each = (jnp.arange(s, dtype=jnp.int32) + (t - s), jnp.arange(t, dtype=jnp.int32))
        of_q, of_k = (jnp.broadcast_to(x, (b, x.size)) for x in each)
        tokens = tokens._replace(q_positions=of_q, k_positions=of_k)

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, n, axis=0)

    def stretch(x: jax.Array) -> jax.Array:
        return x.reshape(b * n, t // n, *x.shape[2:])

    of_queries = {name: getattr(tokens, name) for name in ("q_segments", "q_positions")}
    of_keys = {name: getattr(tokens, name) for name in ("k_segments", "k_positions")}
    tokens = tokens._replace(
        **{name: x if x is None else repeat(x) for name, x in of_queries.items()},
        **{name: x if x is None else stretch(x) for name, x in of_keys.items()},
    )
    return Inputs(repeat(q), stretch(k), stretch(v), None, tokens)


def merge(out: jax.Array, lse: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp over all stretches.

    Args:
      out: (B * n, S, H, Dv).
      lse: float32 (B * n, S, H), -inf where a query sees no key of a stretch.
      n: number of stretches.
    """
    parts = out.reshape(-1, n, *out.shape[1:]).astype(jnp.float32)
    lse = lse.reshape(-1, n, *lse.shape[1:])
    whole = jax.nn.logsumexp(lse, axis=1)
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(whole), 0.0, whole)[:, None])
    return jnp.sum(weights[..., None] * parts, axis=1).astype(out.dtype), whole
