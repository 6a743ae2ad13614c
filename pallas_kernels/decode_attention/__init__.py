"""Attention of a few new queries per row to a long KV cache, contiguous or in pages.

    from pallas_kernels.decode_attention import decode_attention
    out, lse = decode_attention(q, k, v, lengths=lengths)                       # k (B, T, K, D): one page per row
    out, lse = decode_attention(q, k, v, positions=positions, tables=tables)    # k (P, page, K, D)

It has no gradient; train with `flash_attention`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.typing import ArrayLike

from pallas_kernels.decode_attention import gpu, reference, tpu, xla
from pallas_kernels.decode_attention.inputs import Inputs, Settings, checked
from pallas_kernels.dispatch import Implementation, Target, dispatch
from pallas_kernels.errors import KernelError

__all__ = ["IMPLEMENTATIONS", "decode_attention"]


def decode_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike | None,
    *,
    positions: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    tables: ArrayLike | None = None,
    first: ArrayLike = 0,
    stride: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    maximum: float | None = None,
    scales: tuple[ArrayLike, ArrayLike | None] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return causal attention of each row's queries to its cached keys (flash-decoding, Dao et al. 2023).

    The keys are split among program instances, and the partial results merged by their log-sum-exps, so that the split
    does not change the result. Merge the outputs of calls on different parts of the keys in the same way.

    Args:
      q: (B, Q, H, D) in float32, bfloat16 or float16. Q is small: a kernel takes H / K * Q queries in a tile of 64.
      k: (P, page, K, D) in q's dtype, or with `scales` codes in int8 or float8_e4m3fn; H is a multiple of K, and query
        head h reads key head h // (H / K). Without pages, P is B and `page` the length of a row.
      v: (P, page, K, Dv) in q's dtype, or `None` where values are the first `value_dim` widths of keys.
      positions: (B, Q) integers, each query's position in its sequence: it sees keys at positions up to its own. A
        query at -1 sees none.
      lengths: (B,) integers, in place of `positions`: the number of keys of each row. The queries are at their end.
      tables: (B, N) integers, the pages of each row in order; by default row b has page b. An entry that no query's
        positions reach may be anything, such as -1, and so may keys at unreached positions (on Hopper: anything finite,
        in pages that are reached in part).
      first: integer; see `stride`.
      stride: entry i of a table holds the positions of the sequence from (first + i * stride) * page on.
      window: each query sees only this many latest positions, its own included.
      softcap: scores become `softcap * tanh(score / softcap)`.
      scale: factor on the scores; 1 / sqrt(D) by default.
      value_dim: Dv, where `v` is `None`.
      maximum: a number near each query's largest score, known beforehand (FlashDecoding++, Hong et al. 2023), so that
        sums need no rescaling. Where it turns out too far off for float32, everything is computed again without it.
        Only "xla" uses it.
      scales: float32 factors of the codes of each key and head, and of each value and head (`None` without `v`), (P,
        page, K). Products take the codes as they are; scores and weights are multiplied by the factors. The kernels for
        TPUs and GPUs leave them to "xla".
      implementation: "mosaic_gpu", "mosaic_tpu", "xla" or "dense" (all keys at once in float32); `None` chooses the
        best here.

    Returns:
      float32 output (B, Q, H, Dv) and log-sum-exp (B, Q, H); 0 and -inf for a query that sees nothing.

    Raises:
      KernelError: shapes do not fit, an option is out of range, a named implementation does not support this here, or
        the call is differentiated.
    """
    inputs, settings = checked(
        q,
        k,
        v,
        positions=positions,
        lengths=lengths,
        tables=tables,
        first=first,
        stride=stride,
        window=window,
        softcap=softcap,
        scale=scale,
        value_dim=value_dim,
        maximum=maximum,
        scales=scales,
    )
    return _attend(inputs, settings, implementation)


# ---- implementations


def _anywhere(target: Target, **case: Any) -> str | None:
    return None


def _run_xla(target: Target, inputs: Inputs, *, settings: Settings, **_: Any) -> tuple[jax.Array, jax.Array]:
    return xla.forward(target, inputs, settings)


def _run_dense(target: Target, inputs: Inputs, *, settings: Settings, **_: Any) -> tuple[jax.Array, jax.Array]:
    return reference.forward(inputs, settings)


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), _anywhere, _run_xla),
)
"""The implementations that `None` chooses from, best first."""

_BY_NAME = (Implementation("dense", (), _anywhere, _run_dense),)
"""Implementations that are used only when they are named."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _attend(inputs: Inputs, settings: Settings, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    q, k, v, _, tables, *_ = inputs
    case = {
        "settings": settings,
        "q": q.shape,
        "k": k.shape,
        "v": None if v is None else v.shape,
        "entries": tables.shape[1],
        "dtype": q.dtype.name,
    }
    implementations = IMPLEMENTATIONS if implementation is None else (*IMPLEMENTATIONS, *_BY_NAME)
    return dispatch("decode_attention", implementations, (inputs,), case, implementation)


@_attend.defjvp
def _refuse(settings: Settings, implementation: str | None, primals: Any, tangents: Any) -> Any:
    raise KernelError("decode_attention has no gradient: a cache is for generation; train with flash_attention")
