"""Attention of a few new queries of each row to a long cache of keys, in pages or not.

    from pallas_kernels.decode_attention import decode_attention
    out, lse = decode_attention(q, k, v, lengths=lengths)                       # k (B, T, K, D): one page a row
    out, lse = decode_attention(q, k, v, positions=positions, tables=tables)    # k (P, page, K, D)

It has no gradient: `flash_attention` is what trains.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.decode_attention import gpu, reference, tpu, xla
from pallas_kernels.decode_attention.inputs import How, Inputs, checked
from pallas_kernels.dispatch import Implementation, Target, dispatch
from pallas_kernels.errors import KernelError

__all__ = ["IMPLEMENTATIONS", "decode_attention"]


def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    positions: Any = None,
    lengths: Any = None,
    tables: Any = None,
    first: Any = 0,
    stride: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    maximum: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of each row's queries to its kept keys (flash-decoding, Dao et al. 2023).

    The keys are split over whatever computes, and the parts merged by their log-sum-exps, which gives the same whatever
    the split; outputs of several calls to parts of the keys merge in the same way.

    Args:
      q: (B, Q, H, D), float32, bfloat16 or float16. Q is small: a kernel has H / K * Q queries in a tile of 64.
      k, v: (P, page, K, D) and (P, page, K, Dv) of the same dtype; H is a multiple of K, and query head h reads key
        head h // (H / K). Without pages, page is the length of a row. `v` is `None` where values are the first
        `value_dim` widths of keys.
      positions: integers (B, Q), a query's place in its text: it sees keys at places up to its own. One at -1 sees
        none.
      lengths: integers (B,) instead: so many keys, at whose end the queries stand.
      tables: integers (B, N), the pages of each row in order; row b is page b without. An entry that no query's places
        reach may be anything, as -1, and what stands at such places too (on Hopper: anything finite, in pages that are
        seen in part).
      first, stride: entry i of a table holds a text's places from (first + i * stride) * page.
      window: see this many latest places only, the query's own included.
      softcap: scores become `softcap * tanh(score / softcap)`.
      scale: factor on the scores; 1 / sqrt(D) by default.
      value_dim: Dv, where `v` is `None`.
      maximum: a number near each query's largest score, known beforehand (FlashDecoding++, Hong et al. 2023): sums need
        no scaling back as larger scores come. Where one proves to be too far from it for float32, all is computed anew
        without; XLA's form alone has it.
      implementation: "mosaic_gpu", "mosaic_tpu", "xla" or "dense" (all keys at once in float32); `None` is the best
        here.

    Returns:
      float32 output (B, Q, H, Dv) and log-sum-exp (B, Q, H); 0 and -inf of a query that sees nothing.

    Raises:
      KernelError: shapes that do not fit, an option out of range, a named implementation that cannot do this here, or
        differentiation.
    """
    inputs, how = checked(
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
    )
    return _attend(inputs, how, implementation)


# ---- implementations


def _anywhere(target: Target, **case: Any) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("xla", (), _anywhere, lambda target, inputs, *, how, **_: xla.forward(target, inputs, how)),
)
"""What is chosen from, best first."""

_BY_NAME = (Implementation("dense", (), _anywhere, lambda target, inputs, *, how, **_: reference.forward(inputs, how)),)
"""What has to be asked for."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _attend(inputs: Inputs, how: How, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    q, k, v, _, tables, _ = inputs
    case = {
        "how": how,
        "q": q.shape,
        "k": k.shape,
        "v": None if v is None else v.shape,
        "entries": tables.shape[1],
        "dtype": q.dtype.name,
    }
    ways = IMPLEMENTATIONS if implementation is None else (*IMPLEMENTATIONS, *_BY_NAME)
    return dispatch("decode_attention", ways, (inputs,), case, implementation)


@_attend.defjvp
def _refuse(how: How, implementation: str | None, primals: Any, tangents: Any) -> Any:
    raise KernelError("decode_attention has no gradient: a cache is for generation; train with flash_attention")
