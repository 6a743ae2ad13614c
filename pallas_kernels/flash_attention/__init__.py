"""Attention that packs, slides and shares heads, in memory that grows with the sequence and not with its square.

    from pallas_kernels.flash_attention import flash_attention
    out = flash_attention(q, k, v, causal=True, segment_ids=ids)          # (B, S, H, Dv)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)     # to be merged with other keys' outputs
    dq, dk, dv = gradients(q, k, v, out, lse, dout, causal=True)          # of these keys, after such a merge

First-order differentiable in reverse mode in q, k, v and bias. Under `jax.checkpoint`, a policy that saves the names
"flash_out" and "flash_lse" keeps the backward pass from running the forward again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
"""What the residuals of the backward pass are called, for a `jax.checkpoint` policy."""


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    segment_ids: Any = None,
    positions: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    bias: Any = None,
    kind: Kind = "softmax",
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    blocks: Blocks | None = None,
) -> Any:
    """Every query's mixture of the values whose keys it sees, weighted by softmax (or sigmoid) of their scores.

    A score is soft-cap(scale * q k) + bias. It and the weights' sum are float32; both products take q's dtype.

    Args:
      q: (B, S, H, D), float32, bfloat16 or float16.
      k, v: (B, T, K, D) and (B, T, K, Dv) of the same dtype; H is a multiple of K, and query head h reads key head
        h // (H / K). S and T may differ.
      causal: a key after its query is not seen. Without `positions`, the last query stands at the last key.
      segment_ids: integers; a query sees keys of its own id only. One (B, S) array where S is T, or a pair, (B, S) of
        the queries and (B, T) of the keys. 0 is an id like any other: padding sees padding, and whoever pads drops it.
      positions: integers in the same form, the order of tokens for `causal` and `window`; by default as they stand.
      window: see this many latest positions only, the query's own included; without `causal`, to both sides.
      softcap: scores become `softcap * tanh(score / softcap)` before the bias (Gemma 2).
      scale: factor on the scores; 1 / sqrt(D) by default.
      bias: a number or an array that broadcasts to (B, H, S, T), added to the scores. One with both S and T is itself
        as large as the scores, and so is its gradient.
      kind: "softmax", or "sigmoid" of each score (Ramapuram et al. 2024), whose bias is -log(T) unless one is given.
      return_lse: also return the float32 log-sum-exp of the seen scores, (B, S, H), -inf where there are none. Its
        cotangent is taken.
      deterministic: equal bits on every run, where an implementation offers a faster way without.
      implementation: "mosaic_gpu", "cudnn", "mosaic_tpu", "xla" or "dense" (the S x T reference); `None` is the best
        here. A named one is also the one that the gradient uses.
      blocks: a block-sparse mask besides, over indices.

    Returns:
      (B, S, H, Dv) in q's dtype, or that and the log-sum-exp. A row that sees nothing is 0, its gradients too.

    Raises:
      KernelError: shapes that do not fit, an option out of range, or a named implementation that cannot do this here.
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
    )
    how = Settings(mask, score, bool(return_lse), bool(deterministic), implementation)
    out, lse = _attend(inputs, how)
    return (out, lse) if return_lse else out


def gradients(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    segment_ids: Any = None,
    positions: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What some of the keys add to the cotangents, given the output and log-sum-exp that all keys together made.

    Summed over parts that share no key, this is the gradient of attention to all of them: how a ring of devices, each
    with a part, goes backwards without keeping a weight.

    Args:
      q, dout: all queries concerned, (B, S, H, D), and the cotangent of their output, (B, S, H, Dv).
      k, v: this part of the keys and values.
      out, lse: of attention to every part, (B, S, H, Dv) and float32 (B, S, H).
      dlse: the cotangent of `lse`; none by default. Only sum(out * dout) - dlse is read, so `out` may be zeros where
        `dlse` brings the negative of that sum.
      causal, segment_ids, positions, window, softcap, scale, deterministic, implementation: those of
        `flash_attention`, of this part.

    Returns:
      cotangents of q, k and v, in their dtype.

    Raises:
      KernelError: as `flash_attention`, or an implementation that makes a log-sum-exp of its own.
    """
    if implementation == "dense":
        raise KernelError(
            "flash_attention.gradients: 'dense' makes its own log-sum-exp, of these keys alone; use 'xla'"
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
    )
    how = Settings(mask, score, True, bool(deterministic), implementation)
    dlse = jnp.zeros_like(lse) if dlse is None else dlse
    dq, dk, dv, _ = _run("backward", how, inputs, out, lse, dout, dlse)
    return dq, dk, dv


# ---- implementations


def _run_plain(room: Any, target: Target, inputs: Inputs, *others: Any, direction: str, how: Settings, **_: Any) -> Any:
    if direction == "forward":
        return room.forward(inputs, how.mask, how.score)
    return room.backward(inputs, how.mask, how.score, *others)


def _run_dense(target: Target, inputs: Inputs, *others: Any, direction: str, **case: Any) -> Any:
    if direction == "backward":
        others = others[2:]  # it makes output and log-sum-exp again
    return _run_plain(reference, target, inputs, *others, direction=direction, **case)


def _anywhere(target: Target, **case: Any) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("cudnn", ("cuda",), cudnn.supported, cudnn.run),
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), _anywhere, functools.partial(_run_plain, xla)),
)
"""What is chosen from, best first."""

_BY_NAME = (Implementation("dense", (), _anywhere, _run_dense),)
"""What has to be asked for."""


def _run(direction: str, how: Settings, inputs: Inputs, *others: Any) -> Any:
    q, k, v, bias, tokens = inputs
    case = {
        "direction": direction,
        "how": how,
        "q": q.shape,
        "k": k.shape,
        "v": v.shape,
        "bias": None if bias is None else bias.shape,
        "segments": tokens.q_segments is not None,
        "positions": tokens.q_positions is not None,
        "dtype": q.dtype.name,
    }
    ways = IMPLEMENTATIONS if how.implementation is None else (*IMPLEMENTATIONS, *_BY_NAME)
    return dispatch("flash_attention", ways, (inputs, *others), case, how.implementation)


# ---- gradients: one tree of residuals, whatever the implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Inputs, how: Settings) -> tuple[jax.Array, jax.Array | None]:
    return _run("forward", how, inputs)


def _attend_forward(inputs: Inputs, how: Settings) -> tuple[Any, tuple[Inputs, jax.Array, jax.Array | None]]:
    out, lse = _run("forward", how, inputs)
    out = checkpoint_name(out, NAMES[0])
    lse = None if lse is None else checkpoint_name(lse, NAMES[1])
    return (out, lse), (inputs, out, lse)


def _attend_backward(how: Settings, kept: tuple[Inputs, jax.Array, jax.Array | None], given: Any) -> tuple[Inputs]:
    inputs, out, lse = kept
    dout, dlse = given
    dq, dk, dv, dbias = _run("backward", how, inputs, out, lse, dout, dlse)
    return (Inputs(dq, dk, dv, dbias, Tokens()),)


_attend.defvjp(_attend_forward, _attend_backward)
