"""Re-ttention: sparse attention for diffusion models, rescaled by what an earlier denoising step saw of the softmax."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError


class SoftmaxHistory(NamedTuple):
    """What a dense step leaves for the sparse steps after it.

    Args:
      share: the part of each query's softmax that falls on the keys that sparse steps read, float32.
      residual: the dense output minus `share` times the sparse output, float32.
    """

    share: Float[Array, "b s h"]
    residual: Float[Array, "b s h dv"]


def neighbours(seq: int, window: int, sinks: int = 0) -> Int[np.ndarray, "s n"]:
    """Return the keys that each query reads: the first ones of the sequence, and a window around it.

    At both ends the window is moved so that every query reads as many keys.

    Args:
      seq: tokens of a sequence.
      window: keys of the window.
      sinks: keys at the beginning, such as those of a prompt.

    Returns:
      columns, int32 (seq, sinks + window).

    Raises:
      ConfigError: a window below 1, fewer than 0 sinks, or more of both than tokens.
    """
    if window < 1 or sinks < 0 or window + sinks > seq:
        raise ConfigError(
            f"a window of {window} and {sinks} sinks in a sequence of {seq} tokens: the window must be at least 1, and "
            "both together at most the sequence"
        )
    first = np.clip(np.arange(seq) - window // 2, sinks, seq - window)[:, None]
    every = np.broadcast_to(np.arange(sinks), (seq, sinks))
    return np.concatenate([every, first + np.arange(window)], axis=1).astype(np.int32)


def sparse_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    columns: Int[Array, "s n"],
    history: SoftmaxHistory | None = None,
) -> Float[Array, "b s h dv"]:
    """Attend to some keys, and continue from the history of a dense step (Chen et al. 2025).

    A softmax over some keys has too small a denominator, so that each of them weighs too much. The share of these keys
    in the whole softmax changes little between denoising steps; here the output is multiplied by the share of the
    dense step, and the dense step's residual is added. There is neither a causal mask nor packed documents.

    Args:
      q: queries.
      k: keys.
      v: values.
      columns: the keys that each query reads, without repeats; see `neighbours`.
      history: of `dense_attention` with the same `columns`; `None` is a plain softmax over these keys.

    Returns:
      (B, S, H, Dv) in v's dtype.
    """
    out, _ = _over(q, k, v, columns)
    if history is not None:
        out = history.share[..., None] * out + history.residual
    return out.astype(v.dtype)


def dense_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    columns: Int[Array, "s n"],
) -> tuple[Float[Array, "b s h dv"], SoftmaxHistory]:
    """Attend to all keys, and return what later sparse steps need.

    Args:
      q: queries.
      k: keys.
      v: values.
      columns: the keys that sparse steps read; see `neighbours`.

    Returns:
      (B, S, H, Dv) in v's dtype, and the history.
    """
    scores = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    out = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), v.astype(jnp.float32))
    sparse, total = _over(q, k, v, columns)
    share = jnp.exp(total - jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 1, 2))
    return out.astype(v.dtype), SoftmaxHistory(share, out - share[..., None] * sparse)


def _over(q: Array, k: Array, v: Array, columns: Array) -> tuple[Float[Array, "b s h dv"], Float[Array, "b s h"]]:
    """Attention to the columns, and the log-sum-exp of their scores, float32."""
    near_k, near_v = k[:, columns], v[:, columns].astype(jnp.float32)
    scores = jnp.einsum("bshd,bsnhd->bshn", q, near_k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    out = jnp.einsum("bshn,bsnhd->bshd", jax.nn.softmax(scores, axis=-1), near_v)
    return out, jax.nn.logsumexp(scores, axis=-1)
