"""Arguments of attention: the arrays, the static description of a score, and the checks before tracing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import as_int32, finite
from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention.dropout import Drop, dropped_from
from pallas_kernels.flash_attention.masks import Blocks, Mask, Tokens

__all__ = ["Inputs", "Kind", "Score", "checked"]

Kind = Literal["softmax", "sigmoid"]
_DTYPES = ("float32", "bfloat16", "float16")


class Inputs(NamedTuple):
    """The arrays.

    Args:
      q: (B, S, H, D).
      k: (B, T, K, D).
      v: (B, T, K, Dv).
      bias: an array of rank 4 that broadcasts to (B, H, S, T), or `None`.
      tokens: segments and positions.
      drop: what decides which weights are dropped, or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    tokens: Tokens
    drop: Drop | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """The weight of a query and a key: soft-cap of scale * q k, plus bias and shift, then the function of `kind`.

    Args:
      kind: "softmax", or "sigmoid" of each score on its own.
      scale: factor on q k.
      softcap: scores become `softcap * tanh(score / softcap)`, or `None`.
      shift: added to the scores.
      dropout: probability that a weight is dropped, after the softmax; the others are divided by the rest.
    """

    kind: Kind
    scale: float
    softcap: float | None
    shift: float
    dropout: float = 0.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything besides shapes that is known before tracing.

    Args:
      mask: which keys a query sees.
      score: how scores become weights.
      return_lse: whether the caller gets the log-sum-exp.
      deterministic: whether runs have to agree to the bit.
      implementation: a name, or `None` for the best.
    """

    mask: Mask
    score: Score
    return_lse: bool
    deterministic: bool
    implementation: str | None


def checked(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    segment_ids: Any,
    positions: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    bias: Any,
    kind: str,
    return_lse: bool,
    blocks: Blocks | None,
    dropout: Any = 0.0,
    dropout_seeds: Any = None,
    dropout_places: Any = None,
) -> tuple[Inputs, Mask, Score]:
    """Check and convert the arguments of `flash_attention`.

    Returns:
      the arrays, the mask, and how scores become weights.

    Raises:
      KernelError: as `flash_attention`.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check_arrays(q, k, v)
    (b, s, h, d), t = q.shape, k.shape[1]
    if kind not in ("softmax", "sigmoid"):
        raise KernelError(f"flash_attention: kind has to be 'softmax' or 'sigmoid', not {kind!r}")
    if kind == "sigmoid" and return_lse:
        raise KernelError(
            "flash_attention: sigmoid attention has no log-sum-exp (its parts simply add); leave return_lse=False"
        )
    rate, drop = dropped_from(dropout, dropout_seeds, dropout_places, (b, s, h, t))
    if rate and kind == "sigmoid":
        raise KernelError("flash_attention: only softmax attention has dropout; use kind='softmax' or dropout=0")
    if window is not None and (
        isinstance(window, bool) or not hasattr(window, "__index__") or not 1 <= int(window) < 2**31
    ):
        raise KernelError(
            "flash_attention: window has to be an integer of at least 1 (the query's own position counts) and below "
            f"2**31, or None, not {window!r}"
        )
    softcap = finite("flash_attention", "softcap", softcap)
    scale = finite("flash_attention", "scale", scale, zero=True)
    shift = -math.log(t) if kind == "sigmoid" and bias is None else 0.0
    if kind == "sigmoid" and isinstance(bias, float) and math.isfinite(bias):  # needs no array and no gradient
        shift, bias = bias, None
    bias = _bias(bias, (b, h, s, t))
    if blocks is not None:
        _check_blocks(blocks, s, t)
    tokens = Tokens(*_tokens("segment_ids", segment_ids, b, s, t), *_tokens("positions", positions, b, s, t))
    return (
        Inputs(q, k, v, bias, tokens, drop),
        Mask(bool(causal), None if window is None else int(window), blocks),
        Score("sigmoid" if kind == "sigmoid" else "softmax", d**-0.5 if scale is None else scale, softcap, shift, rate),
    )


def _check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise KernelError(
                f"flash_attention: {name} has to be (batch, sequence, heads, head_dim), not of shape {x.shape}"
            )
        if x.dtype.name not in _DTYPES:
            raise KernelError(
                f"flash_attention takes float32, bfloat16 or float16, and {name} is {x.dtype.name}; "
                f"convert with {name}.astype"
            )
        if 0 in x.shape[1:]:
            raise KernelError(f"flash_attention: {name} of shape {x.shape} has nothing in it to attend with")
    if not q.dtype == k.dtype == v.dtype:
        raise KernelError(
            f"flash_attention: q, k and v have to share a dtype, not {q.dtype.name}, {k.dtype.name} and {v.dtype.name}"
        )
    if k.shape[:3] != v.shape[:3]:
        raise KernelError(f"flash_attention: k of shape {k.shape} and v of shape {v.shape} differ before the last axis")
    if q.shape[0] != k.shape[0]:
        raise KernelError(f"flash_attention: q has a batch of {q.shape[0]}, and k has one of {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise KernelError(f"flash_attention: the head_dim of q is {q.shape[3]}, and that of k is {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise KernelError(
            f"flash_attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads; the nearest "
            f"number that is, is {max(1, round(q.shape[2] / k.shape[2])) * k.shape[2]}"
        )


def _bias(bias: Any, full: tuple[int, int, int, int]) -> jax.Array | None:
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise KernelError(
            f"flash_attention: bias is added to scores and has to be floating, not {bias.dtype.name}; "
            "for a mask use causal, window, segment_ids, positions or blocks"
        )
    if bias.ndim == 0:
        bias = bias.reshape(1, 1, 1, 1)
    if bias.ndim != 4 or any(n not in (1, m) for n, m in zip(bias.shape, full, strict=False)):
        raise KernelError(
            f"flash_attention: bias of shape {bias.shape} does not broadcast to (batch, heads, queries, keys) = {full}"
        )
    return bias


def _tokens(name: str, value: Any, b: int, s: int, t: int) -> tuple[jax.Array | None, jax.Array | None]:
    """Return arrays of the queries and of the keys, from one (B, S) array for both or from a pair."""
    if value is None:
        return None, None
    if isinstance(value, tuple):
        if len(value) != 2:
            raise KernelError(
                f"flash_attention: {name} has to be one array or a pair (of queries, of keys), not {len(value)}"
            )
        pair = value
    elif s != t:
        raise KernelError(
            f"flash_attention: {s} queries and {t} keys need {name} as a pair, ({b}, {s}) and ({b}, {t}), not one array"
        )
    else:
        pair = (value, value)
    out = []
    for x, length, what in ((pair[0], s, "queries"), (pair[1], t, "keys")):
        x = as_int32("flash_attention", name, x)
        if x.shape != (b, length):
            raise KernelError(f"flash_attention: {name} of the {what} has to be of shape {(b, length)}, not {x.shape}")
        out.append(x)
    return out[0], out[1]


def _check_blocks(blocks: Blocks, s: int, t: int) -> None:
    want = (-(-s // blocks.query), -(-t // blocks.key))
    if blocks.table.shape != want:
        raise KernelError(
            f"flash_attention: {s} queries and {t} keys in blocks of {blocks.query} by {blocks.key} need a table of "
            f"shape {want}, not {blocks.table.shape}"
        )
