"""A device's rows of a vocabulary that devices do not divide: the last ones may be zeros that stand for no word.

Kernels know no such rows. They get those that are words on every device; the few others, fewer than there are devices,
have their logits held, and masked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cut_cross_entropy import Logits, Merged, Parts, gradients, parts
from pallas_kernels.softmax.pairs import combine, partial


def parts_of_filled(
    x: Float[Array, "... e"],
    w: Float[Array, "r e"],
    rows: Int[Array, "..."],
    words: Int[Array, ""],
    spare: int,
    logits: Logits,
    implementation: str | None,
) -> Parts:
    """`pallas_kernels.cut_cross_entropy.parts` of rows some of which may be no words.

    Args:
      x, w, rows, logits, implementation: those of `parts`.
      words: how many of the rows are words, or more than there are, or less than none; differs between devices.
      spare: how many of the last rows may be none, on any device.
    """
    if not spare:
        return parts(x, w, rows, logits, implementation)
    first = w.shape[0] - spare
    few = _Few.of(x, w[first:], rows - first, words - first, logits)
    total, hit = partial(few.logits, where=few.words), jnp.where(few.hit, few.logits, 0).sum(-1)
    summed = jnp.where(few.words, few.logits, 0).sum(-1) if logits.summed else None
    if not first:
        return Parts(total, hit, summed)
    many = parts(x, w[:first], rows, logits, implementation)
    if summed is not None and many.summed is not None:
        summed = many.summed + summed
    return Parts(combine(many.total, total), many.hit + hit, summed)


def gradients_of_filled(
    x: Float[Array, "... e"],
    w: Float[Array, "r e"],
    rows: Int[Array, "..."],
    words: Int[Array, ""],
    spare: int,
    lse: Float[Array, "..."],
    slopes: Merged,
    logits: Logits,
    implementation: str | None,
    dw_dtype: Any,
) -> tuple[Array, Array]:
    """`pallas_kernels.cut_cross_entropy.gradients` of such rows; what is no word has a gradient of exactly zero.

    Args:
      lse, slopes, dw_dtype: those of `gradients`; the others as of `parts_of_filled`.
    """
    if not spare:
        return gradients(x, w, rows, lse, slopes, logits, implementation, dw_dtype=dw_dtype)
    first = w.shape[0] - spare
    few = _Few.of(x, w[first:], rows - first, words - first, logits)
    slope = slopes.lse[..., None] * jnp.exp(few.logits - lse[..., None]) + few.hit * slopes.hit[..., None]
    if slopes.summed is not None:
        slope = slope + slopes.summed[..., None]
    if few.slope is not None:
        slope = slope * few.slope
    slope = jnp.where(few.words, slope, 0).astype(x.dtype)
    dx = _product("...v,ve->...e", slope, w[first:].astype(x.dtype))
    dw = _product("...v,...e->ve", slope, x).astype(dw_dtype)
    if not first:
        return dx.astype(x.dtype), dw
    dx_many, dw_many = gradients(x, w[:first], rows, lse, slopes, logits, implementation, dw_dtype=dw_dtype)
    return (dx + dx_many).astype(x.dtype), jnp.concatenate([dw_many, dw])


class _Few(NamedTuple):
    """Logits of a few rows (..., v), float32; which are targets, which are words (v,), and a soft-cap's derivative."""

    logits: Float[Array, "... v"]
    hit: Bool[Array, "... v"]
    words: Bool[Array, " v"]
    slope: Float[Array, "... v"] | None

    @classmethod
    def of(cls, x: Array, w: Array, rows: Array, words: Array, how: Logits) -> _Few:
        index, slope = jnp.arange(w.shape[0]), None
        logits = _product("...e,ve->...v", x, w.astype(x.dtype))
        if how.softcap is not None:
            tanh = jnp.tanh(logits / how.softcap)
            logits, slope = how.softcap * tanh, 1 - tanh * tanh
        return cls(logits, rows[..., None] == index, index < words, slope)


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)
