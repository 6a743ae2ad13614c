"""Attention for packed, windowed and grouped-head inputs, in memory linear (not quadratic) in the sequence length.

    from pallas_kernels.flash_attention import flash_attention
    out = flash_attention(q, k, v, causal=True, segment_ids=ids)          # (B, S, H, Dv)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)     # to merge with the outputs of other keys
    dq, dk, dv = gradients(q, k, v, out, lse, dout, causal=True)          # of these keys, after such a merge

Differentiable in q, k, v and bias, by a kernel once and in reverse mode, by XLA in any mode. Under `jax.checkpoint`, a
policy that saves the names "flash_out" and "flash_lse" keeps the backward pass from running the forward pass again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, Target, dispatch
from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention import cudnn, gpu, reference, tpu, xla
from pallas_kernels.flash_attention.inputs import Inputs, Kind, Settings, checked
from pallas_kernels.flash_attention.masks import FULL, PARTIAL, SKIP, Blocks, Mask, Tokens, tile_table, visible

__all__ = [
    "FULL",
    "IMPLEMENTATIONS",
    "NAMES",
    "PARTIAL",
    "SKIP",
    "Blocks",
    "Mask",
    "Tokens",
    "flash_attention",
    "gradients",
    "tile_table",
    "visible",
]

NAMES = ("flash_out", "flash_lse")
"""Names of the backward pass' residuals, for a `jax.checkpoint` policy."""


def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    positions: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    kind: Kind = "softmax",
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    blocks: Blocks | None = None,
    dropout: float = 0.0,
    dropout_seeds: ArrayLike | None = None,
    dropout_places: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
) -> Any:
    """Return, for each query, the sum of the values that it sees, weighted by softmax (or sigmoid) of their scores.

    A score is soft-cap(scale * q k) + bias. Scores and the sum of weights are float32; both matrix products multiply in
    q's dtype.

    Args:
      q: (B, S, H, D) in float32, bfloat16 or float16.
      k: (B, T, K, D) in q's dtype; H is a multiple of K, and query head h reads key head h // (H / K). S and T may
        differ.
      v: (B, T, K, Dv) in q's dtype.
      causal: a query sees no key after it. Without `positions`, the last query is at the last key.
      segment_ids: integers; a query sees only keys with its own id. One (B, S) array where S is T, or a pair: (B, S)
        for the queries and (B, T) for the keys. 0 is an id like any other: padding sees padding, so drop padded rows.
      positions: integers in the same form, the order of tokens for `causal` and `window`; by default their indices.
      window: a query sees only this many latest positions, its own included; without `causal`, to both sides.
      softcap: scores become `softcap * tanh(score / softcap)` before the bias (Gemma 2).
      scale: factor on the scores; 1 / sqrt(D) by default.
      bias: a number or an array that broadcasts to (B, H, S, T), added to the scores. With both S and T it is itself
        as large as the scores, and so is its gradient.
      kind: "softmax", or "sigmoid" of each score (Ramapuram et al. 2024), whose bias is -log(T) unless `bias` is set.
      return_lse: also return the float32 log-sum-exp of the visible scores, (B, S, H), -inf where there are none. It is
        differentiable.
      deterministic: return the same bits on every run; implementations may have a faster mode without.
      implementation: "mosaic_gpu", "cudnn", "mosaic_tpu", "xla" or "dense" (the S x T reference); `None` chooses the
        best here. The gradient uses a named implementation, too.
      blocks: an additional block-sparse mask, over indices.
      dropout: probability with which a weight is dropped, at least 0 and below 1; others are divided by `1 - dropout`.
        The log-sum-exp is that of all visible scores. Only for "softmax".
      dropout_seeds: uint32 (B, H, 2), new ones in every step; with the places they decide which weights are dropped
        (see `pallas_kernels.flash_attention.dropout`), the same ones in every implementation.
      dropout_places: integers (B, S), or a pair for queries and keys: each token's place in its row, which tells it
        from the others; by default its index.

    Returns:
      (B, S, H, Dv) in q's dtype, or that and the log-sum-exp. A row that sees nothing is 0, and so are its gradients.

    Raises:
      KernelError: shapes do not fit, an option is out of range, or a named implementation does not support this here.
    """
    inputs, mask, score = checked(
        q,
        k,
        v,
        causal=causal,
        segment_ids=segment_ids,
        positions=positions,
        window=window,
        softcap=softcap,
        scale=scale,
        bias=bias,
        kind=kind,
        return_lse=return_lse,
        blocks=blocks,
        dropout=dropout,
        dropout_seeds=dropout_seeds,
        dropout_places=dropout_places,
    )
    settings = Settings(mask, score, bool(return_lse), bool(deterministic), implementation)
    out, lse = _attend(inputs, settings)
    return (out, lse) if return_lse else out


def gradients(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    dlse: jax.Array | None = None,
    causal: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    positions: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
    dropout: float = 0.0,
    dropout_seeds: ArrayLike | None = None,
    dropout_places: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what some of the keys contribute to the cotangents, from the output and log-sum-exp over all keys.

    The sum over parts that share no key is the gradient of attention to all of them. A ring of devices, each with a
    part of the keys, uses this in its backward pass, without saving weights.

    Args:
      q: all queries concerned, (B, S, H, D).
      k: this part of the keys, (B, T, K, D).
      v: this part of the values, (B, T, K, Dv).
      out: output of attention to every part, (B, S, H, Dv).
      lse: log-sum-exp over every part, float32 (B, S, H).
      dout: cotangent of the output, (B, S, H, Dv).
      dlse: cotangent of `lse`; 0 by default. Only sum(out * dout) - dlse is read, so `out` may be zeros where `dlse`
        holds the negative of that sum.
      causal: as for `flash_attention`, for this part of the keys, like all that follow.
      segment_ids: integers (B, S), or (B, S) and (B, T).
      positions: integers in the same form.
      window: a number of positions.
      softcap: a positive number or `None`.
      scale: factor on the scores.
      deterministic: return the same bits on every run.
      implementation: as for `flash_attention`, but not "dense".
      dropout: as for `flash_attention`, like the next two.
      dropout_seeds: likewise.
      dropout_places: likewise.

    Returns:
      cotangents of q, k and v, in their dtypes.

    Raises:
      KernelError: as `flash_attention`, or the implementation computes its own log-sum-exp.
    """
    if implementation == "dense":
        raise KernelError(
            "flash_attention.gradients: 'dense' computes its own log-sum-exp, over these keys alone; use 'xla'"
        )
    inputs, mask, score = checked(
        q,
        k,
        v,
        causal=causal,
        segment_ids=segment_ids,
        positions=positions,
        window=window,
        softcap=softcap,
        scale=scale,
        bias=None,
        kind="softmax",
        return_lse=True,
        blocks=None,
        dropout=dropout,
        dropout_seeds=dropout_seeds,
        dropout_places=dropout_places,
    )
    settings = Settings(mask, score, True, bool(deterministic), implementation)
    dlse = jnp.zeros_like(lse) if dlse is None else dlse
    dq, dk, dv, _ = _run("backward", settings, inputs, out, lse, dout, dlse)
    return dq, dk, dv


# ---- implementations


def _run_plain(
    module: Any, target: Target, inputs: Inputs, *others: Any, direction: str, settings: Settings, **_: Any
) -> Any:
    if direction == "forward":
        return module.forward(inputs, settings.mask, settings.score)
    return module.backward(inputs, settings.mask, settings.score, *others)


def _run_dense(target: Target, inputs: Inputs, *others: Any, direction: str, **case: Any) -> Any:
    if direction == "backward":
        others = others[2:]  # it computes output and log-sum-exp again
    return _run_plain(reference, target, inputs, *others, direction=direction, **case)


def _anywhere(target: Target, **case: Any) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("cudnn", ("cuda",), cudnn.supported, cudnn.run),
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), _anywhere, functools.partial(_run_plain, xla)),
)
"""The implementations that `None` chooses from, best first, except where `cudnn.faster`."""

_CUDNN = IMPLEMENTATIONS[1]

_BY_NAME = (Implementation("dense", (), _anywhere, _run_dense),)
"""Implementations that are used only when they are named."""


_LARGE = 65_536  # tokens from which a TPU, too, says why it has no kernel: XLA visits 16,384 tiles and more, one by one


def _run(direction: str, settings: Settings, inputs: Inputs, *others: Any) -> Any:
    q, k, v, bias, tokens, _ = inputs
    case = {
        "direction": direction,
        "settings": settings,
        "q": q.shape,
        "k": k.shape,
        "v": v.shape,
        "bias": None if bias is None else bias.shape,
        "segments": tokens.q_segments is not None,
        "positions": tokens.q_positions is not None,
        "dtype": q.dtype.name,
    }
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS
    if settings.implementation is not None:
        implementations += _BY_NAME
    elif cudnn.faster(settings, q.shape, v.shape):
        implementations = (_CUDNN, *(one for one in IMPLEMENTATIONS if one is not _CUDNN))
    large = max(q.shape[1], k.shape[1]) >= _LARGE
    return dispatch("flash_attention", implementations, (inputs, *others), case, settings.implementation, large=large)


# ---- gradients, with the same tree of residuals for every implementation


@functools.partial(custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Inputs, settings: Settings) -> tuple[jax.Array, jax.Array | None]:
    return _run("forward", settings, inputs)


def _attend_forward(inputs: Inputs, settings: Settings) -> tuple[Any, tuple[Inputs, jax.Array, jax.Array | None]]:
    out, lse = _run("forward", settings, inputs)
    # XLA would run a GPU's kernel once more where a scan saves its output, to write it in its place without a copy.
    out, lse = jax.lax.optimization_barrier((out, lse))
    out = checkpoint_name(out, NAMES[0])
    lse = None if lse is None else checkpoint_name(lse, NAMES[1])
    return (out, lse), (inputs, out, lse)


def _attend_backward(
    settings: Settings, residuals: tuple[Inputs, jax.Array, jax.Array | None], cotangents: Any
) -> tuple[Inputs]:
    inputs, out, lse = residuals
    dout, dlse = cotangents
    dq, dk, dv, dbias = _run("backward", settings, inputs, out, lse, dout, dlse)
    return (Inputs(dq, dk, dv, dbias, Tokens()),)


_attend.defvjp(_attend_forward, _attend_backward)
