"""The backward pass of the loss on TPUs: cotangents of logits by a kernel, a piece of the vocabulary at a time.

For a piece of `TILE` tokens and words the kernel computes the logits again and writes their cotangents, in x's dtype,
to memory. XLA multiplies them by x and by w: three products in all. With all tokens in a piece, a word's gradient is
summed inside of one product, and only a token's is accumulated in memory, once for each piece.

A kernel that also made those two products would keep the gradient of a tile of words in VMEM, which has room for about
1,024 words of width 4,096: it would read and write the float32 gradient of all tokens four times as often as pieces of
4,096 words do, and its steps would have to follow each other, on one of the two cores of a v5p.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cut_cross_entropy import xla
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.tpu_walk import VMEM_LIMIT, product

TILE = (8192, 4096)
"""Most tokens and words of a piece: 64 MiB of cotangents in 16 bits."""


def gradients(
    target: Target,
    inputs: Inputs,
    lse: jax.Array,
    slopes: Merged,
    logits: Logits,
    dw_dtype: str,
    *,
    tokens: int,
    words: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of x and of w.

    Args:
      target: the device to compile for.
      inputs: the op's arrays.
      lse: as for `xla.backward`, like the next three.
      slopes: cotangents of the result, `folded`.
      logits: how logits are computed.
      dw_dtype: of w's cotangent.
      tokens: tokens of a block, a multiple of 128.
      words: words of a block, a multiple of 128.
    """
    of_tile = functools.partial(cotangents, target, logits=logits, tokens=tokens, words=words)
    order = logits.w_layout.replace("e", "n")
    return xla.backward(inputs, lse, slopes, logits, dw_dtype, most=TILE, cotangents=of_tile, order=order)


def cotangents(
    target: Target,
    inputs: Inputs,
    lse: jax.Array,
    slopes: Merged,
    skipped: jax.Array | None,
    *,
    logits: Logits,
    tokens: int,
    words: int,
) -> jax.Array:
    """Return the cotangents of x times w: (words, tokens) for layout "ve", (tokens, words) for "ev"; `xla.Cotangents`.

    Args:
      target: the device to compile for.
      inputs: x (n, E), w (m, E) or (E, m) and rows (n,) of a piece.
      lse: float32 (n,).
      slopes: float32 (n,).
      skipped: how many of the first words get 0, or `None`.
      logits: how logits are computed.
      tokens: tokens of a block.
      words: words of a block.
    """
    x, w, rows = inputs
    (n, width), vocabulary, ve = x.shape, w.shape[logits.words_axis], logits.w_layout == "ve"
    of_tokens = [a[None] for a in (rows, lse, slopes.lse, slopes.hit, slopes.summed, slopes.entropy) if a is not None]
    scalars = [] if skipped is None else [skipped.astype(jnp.int32).reshape(1, 1)]

    def kernel(*refs: Any) -> None:
        x_ref, w_ref, *others, out_ref = refs
        own, log_total, d_lse, d_hit, *more = (
            ref[...] if ve else ref[...].reshape(-1, 1) for ref in others[: len(of_tokens)]
        )
        if ve:
            y = product(w_ref[...], x_ref[...], (1, 1))
        else:
            y = product(x_ref[...], w_ref[...], (1, 0))
        bent = None
        if (cap := logits.softcap) is not None:
            tanh = jnp.tanh(y * (1 / cap))
            y, bent = cap * tanh, 1 - tanh * tanh
        word = lax.broadcasted_iota(jnp.int32, y.shape, 0 if ve else 1)
        first = pl.program_id(1) * words
        logprob = y - log_total
        if logits.entropy:
            d_lse = d_lse - more.pop() * logprob
        slope = d_lse * jnp.exp(logprob) + jnp.where(word == own - first, d_hit, 0.0)
        for d_summed in more:
            slope = slope + d_summed
        if bent is not None:
            slope = slope * bent
        for ref in others[len(of_tokens) :]:
            slope = jnp.where(word >= ref[0, 0] - first, slope, 0.0)
        out_ref[...] = slope.astype(out_ref.dtype)

    of_words = pl.BlockSpec((words, width), lambda i, j: (j, 0))
    if not ve:
        of_words = pl.BlockSpec((width, words), lambda i, j: (0, j))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((vocabulary, n) if ve else (n, vocabulary), x.dtype),
        grid=(pl.cdiv(n, tokens), pl.cdiv(vocabulary, words)),
        in_specs=[
            pl.BlockSpec((tokens, width), lambda i, j: (i, 0)),
            of_words,
            *[pl.BlockSpec((1, tokens), lambda i, j: (0, i))] * len(of_tokens),
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
        ],
        out_specs=(
            pl.BlockSpec((words, tokens), lambda i, j: (j, i))
            if ve
            else pl.BlockSpec((tokens, words), lambda i, j: (i, j))
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM_LIMIT),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * vocabulary * width,
            transcendentals=n * vocabulary * (1 if logits.softcap is None else 2),
            bytes_accessed=(x.size + pl.cdiv(n, tokens) * w.size + n * vocabulary) * x.dtype.itemsize,
        ),
        interpret=target.tpu(),
    )(x, w, *of_tokens, *scalars)
