"""The backward pass of the loss on Hopper: cotangents of logits by a Mosaic GPU kernel, a piece at a time.

As on TPUs (`tpu_backward`), the kernel computes the logits of at most `TILE` tokens and words again and writes their
cotangents, in x's dtype, to memory; XLA multiplies them by x and by w. The loop over pieces is `xla.backward`.

The products are those of the forward kernel. Each warpgroup turns its tile into cotangents 64 words at a time and
stores them through shared memory while it computes the next.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.cut_cross_entropy import xla
from pallas_kernels.cut_cross_entropy.gpu_walk import CHUNK, LOG2E, ROWS, WARPGROUPS, Walk, swizzled
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged
from pallas_kernels.dispatch import Target

plgpu: Any = mosaic_gpu  # its names differ between versions

TILE = (8192, 4096)
"""Most tokens and words of a piece: 64 MiB of cotangents."""
STORED = 64
"""Words that a warpgroup stores at a time: 128 bytes, the widest swizzle. With a soft-cap or entropies half of it:
the 168 registers of a thread, where they do not move between warpgroups (`registers.py`), do not suffice for
more."""


def gradients(
    target: Target,
    inputs: Inputs,
    lse: jax.Array,
    slopes: Merged,
    logits: Logits,
    dw_dtype: str,
    *,
    words: int,
    slots: int,
    buffers: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangents of x and of w.

    Args:
      target: the device to compile for.
      inputs: the op's arrays.
      lse: as for `xla.backward`, like the next three.
      slopes: cotangents of the result, `folded`.
      logits: how logits are computed.
      dw_dtype: of w's cotangent.
      words: words of a tile, a multiple of 64.
      slots: chunks of both operands in flight at a time.
      buffers: from which a warpgroup stores.
    """
    of_piece = functools.partial(cotangents, target, logits=logits, words=words, slots=slots, buffers=buffers)
    return xla.backward(inputs, lse, slopes, logits, dw_dtype, most=TILE, cotangents=of_piece, order="nv")


def cotangents(
    target: Target,
    inputs: Inputs,
    lse: jax.Array,
    slopes: Merged,
    skipped: jax.Array | None,
    *,
    logits: Logits,
    words: int,
    slots: int,
    buffers: int,
) -> jax.Array:
    """Return the cotangents of x times w as (tokens, words), see `xla.Cotangents`.

    Tokens that are no multiple of 128, and words that are none of 64 (of a vocabulary that is a single piece), are
    padded with zeros.

    Args:
      target: the device to compile for.
      inputs: x (n, E), w (m, E) or (E, m) with m of at least `words`, and rows (n,) of a piece.
      lse: float32 (n,).
      slopes: float32 (n,).
      skipped: how many of the first words get 0, or `None`.
      logits: how logits are computed.
      words: words of a tile.
      slots: chunks of both operands in flight at a time.
      buffers: from which a warpgroup stores.
    """
    (n, width), axis = inputs.x.shape, logits.words_axis
    m, ve = inputs.w.shape[axis], logits.w_layout == "ve"
    more_tokens, more_words = -n % (ROWS * WARPGROUPS), -m % STORED
    x = jnp.pad(inputs.x, ((0, more_tokens), (0, 0)))
    w = jnp.pad(inputs.w, [(0, more_words * (a == axis)) for a in range(2)])
    integers = [inputs.rows] if skipped is None else [inputs.rows, jnp.full_like(inputs.rows, skipped)]
    of_tokens = [
        jnp.pad(jnp.stack(each), ((0, 0), (0, more_tokens)))
        for each in (integers, [a for a in (lse * LOG2E, *slopes) if a is not None])
    ]
    vocabulary = m + more_words
    tiles = -(-vocabulary // words)
    walk = Walk(target, n + more_tokens, vocabulary, width // CHUNK, words, slots, tiles, ve)
    stored = STORED if logits.softcap is None and not logits.entropy else STORED // 2
    shape, row_layout = (ROWS, stored), plgpu.Layout.WGMMA.reduce(1)
    load = lambda ref: plgpu.load(ref, layout=row_layout, optimized=False)  # noqa: E731
    spread = lambda v: lax.broadcast_in_dim(v, shape, (0,))  # noqa: E731

    def loss_cotangents(
        x_ref: Any, w_ref: Any, integers_ref: Any, numbers_ref: Any, out_ref: Any,
        x_s: Any, w_s: Any, out_s: Any, integers_s: Any, numbers_s: Any, full: Any, free: Any,
    ) -> None:  # fmt: skip
        pairs = (integers_ref, integers_s), (numbers_ref, numbers_s)

        def multiply(wg: Any) -> None:
            def item(i: Any, j: Any, done: Any) -> Any:
                at = pl.ds((i * WARPGROUPS + wg) * ROWS, ROWS)
                # In shared memory: registers are scarce while it multiplies, and so are those of addresses after it.
                for source, to in pairs:
                    for k in range(source.shape[0]):
                        to[wg, k] = load(source.at[k, at])
                plgpu.commit_smem()
                y = walk.multiply(done, wg, x_s, w_s, full, free)
                start = walk.start_of(j)
                for p in range(words // stored):
                    first = start + p * stored

                    def piece(first: Any = first, y: Any = y[:, p * stored : (p + 1) * stored], p: int = p) -> None:
                        values = of_piece(y, first, *([load(s.at[wg, k]) for k in range(s.shape[1])] for _, s in pairs))
                        out_s[wg, p % buffers] = values.astype(x.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out_s.at[wg, p % buffers], out_ref.at[at, pl.ds(first, stored)])

                    plgpu.wait_smem_to_gmem(buffers - 1 if p else 0, wait_read_only=True)
                    if vocabulary % words:
                        # The last tile begins inside of the one before, which writes those words.
                        pl.when(first >= j * words)(piece)
                    else:
                        piece()
                return done + walk.chunks

            walk.each(item, 0)

        def of_piece(y: Any, first: Any, integers: list[Any], numbers: list[Any]) -> Any:
            (own, *skips), (log2_total, *each) = integers, numbers
            if (cap := logits.softcap) is None:
                log2_p = y * LOG2E - spread(log2_total)
            else:
                # tanh(z) = 1 - 2r, as exact as float32, and its derivative is 4r(1 - r)
                r = 1 / (1 + jnp.exp2(y * (2 * LOG2E / cap)))
                log2_p = spread(cap * LOG2E - log2_total) - (2 * cap * LOG2E) * r
                each = [4 * d for d in each]
            d_lse, d_hit, *more = each
            of_p = spread(d_lse)
            if logits.entropy:
                of_p = of_p - spread(more.pop() * (1 / LOG2E)) * log2_p
            word = plgpu.broadcasted_iota(jnp.int32, (stored,), 0, layout=plgpu.Layout.WGMMA.reduce(0))
            word = lax.broadcast_in_dim(word, shape, (1,))
            hit, other = (spread(d_hit + more[0]), spread(more[0])) if more else (spread(d_hit), 0.0)
            slope = of_p * jnp.exp2(log2_p) + jnp.where(word == spread(own - first), hit, other)
            if cap is not None:
                slope = slope * (r - r * r)
            for skip in skips:
                slope = jnp.where(word >= spread(skip - first), slope, 0.0)
            return slope

        def bring() -> None:
            refs = x_ref, w_ref, x_s, w_s
            walk.drain(free, walk.each(lambda i, j, done: walk.bring(i, j, 1, done, refs, full, free), 0))

        walk.roles(multiply, bring)

    out = jax.ShapeDtypeStruct((walk.tokens, vocabulary), x.dtype)
    scratch = (
        swizzled(x.dtype, WARPGROUPS, buffers, ROWS, stored, width=stored),
        *(plgpu.SMEM((WARPGROUPS, len(a), ROWS), a.dtype) for a in of_tokens),
    )
    return walk.kernel(loss_cotangents, out, x.dtype, 1 if logits.softcap is None else 3, *scratch)(x, w, *of_tokens)[
        :n, :m
    ]
