"""The loss on TPUs in Mosaic: forward, a matrix product whose tiles are reduced in VMEM, not stored.

The forward kernel keeps a tile of tokens, with whole vectors, and iterates over the vocabulary: w is read once for each
tile of tokens, in its own order and dtype. Every token has 128 running maxima and sums (Milakov & Gimelshein 2018), one
for each lane, so that adding a tile of logits needs no reduction across lanes; they are reduced at the last tile of
words.

The backward pass is `tpu_backward`'s; with a filter it is XLA's, which leaves out smaller blocks (`xla.backward`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cut_cross_entropy import examples, tpu_backward
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Parts, entropy_of
from pallas_kernels.dispatch import NO_FLOAT16, Target
from pallas_kernels.flash_attention.tpu_steps import LANES
from pallas_kernels.flash_attention.tpu_walk import VMEM_LIMIT, column, product
from pallas_kernels.softmax.pairs import LOWEST, pair
from pallas_kernels.tiles import entries, lookup

TILES = 40 * 2**20
"""Bytes of VMEM for blocks and logits; Mosaic's own use is less than what is left up to `VMEM_LIMIT`."""

FEWEST = (128, 256)
"""Tokens and words of the smallest tile: with fewer words half of a matrix unit of 256 columns is idle."""


def supported(
    target: Target,
    *,
    direction: str,
    logits: Logits,
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: str,
    w_dtype: str,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot serve a case, or `None`; the arguments are those of `dispatch`."""
    if direction != "forward" and logits.filter is not None:
        return "filtered gradients are XLA's, which leaves out blocks of 256 tokens and 512 words"
    if "float16" in (dtype, w_dtype):
        return NO_FLOAT16
    if not x[0]:
        return "there are no tokens"
    if tile_bytes(*FEWEST, x[1], dtype, w_dtype) > TILES:
        most = TILES // (tile_bytes(*FEWEST, 2**10, dtype, w_dtype) // 2**10) // LANES * LANES
        return f"x of width {x[1]} leaves no VMEM for a tile of logits; the widest is about {most}"
    return None


def run(
    target: Target, inputs: Inputs, *others: Any, direction: str, logits: Logits, dw_dtype: str | None = None, **_: Any
) -> Any:
    """Return the parts of every token or, backward, the cotangents of x and of w."""
    (n, width), vocabulary = inputs.x.shape, inputs.w.shape[logits.words_axis]
    dtype = inputs.x.dtype.name
    # The backward kernel gets pieces of w in x's dtype.
    w_dtype = inputs.w.dtype.name if direction == "forward" else dtype
    tile = lookup("cut_cross_entropy", target.kind or "TPU", kernel="forward", dtype=dtype, width=width)
    tokens, words = _fit(tile["tokens"], tile["words"], width, dtype, w_dtype)
    tokens, words = (min(size, -(-length // LANES) * LANES) for size, length in ((tokens, n), (words, vocabulary)))
    if direction == "backward":
        assert dw_dtype is not None
        lse, slopes = others
        return tpu_backward.gradients(target, inputs, lse, slopes, logits, dw_dtype, tokens=tokens, words=words)
    statistics = totals(target, inputs, logits, tokens=tokens, words=words)
    top, total, hit, summed, weighted = logits.named(statistics)
    return Parts(pair(top, total), hit, summed, None if weighted is None else entropy_of(total, weighted))


def totals(target: Target, inputs: Inputs, logits: Logits, *, tokens: int, words: int) -> jax.Array:
    """Return float32 (3 to 5, N), `logits.statistics` of each token.

    Args:
      target: the device to compile for.
      inputs: the op's arrays.
      logits: how logits are computed.
      tokens: tokens of a tile.
      words: words of a tile, a multiple of 128.
    """
    x, w, rows = inputs
    (n, width), vocabulary, ve = x.shape, w.shape[logits.words_axis], logits.w_layout == "ve"
    stats, last = logits.statistics, pl.cdiv(vocabulary, words) - 1
    w_block, w_place = ((words, width), lambda i, j: (j, 0)) if ve else ((width, words), lambda i, j: (0, j))

    def kernel(x_ref: Any, w_ref: Any, rows_ref: Any, out_ref: Any, own_ref: Any, *stat_refs: Any) -> None:
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _() -> None:
            # Words beyond the vocabulary are never targets.
            mine = rows_ref[...]
            own_ref[...] = column(jnp.where(mine < vocabulary, mine, -1))
            for ref in stat_refs:
                ref[...] = jnp.full(ref.shape, -jnp.inf if ref is stat_refs[0] else 0.0, jnp.float32)

        y = product(x_ref[...], w_ref[...].astype(x.dtype), (1, 1 if ve else 0))
        if (cap := logits.softcap) is not None:
            y = cap * jnp.tanh(y * (1 / cap))
        top, total, hit, summed, weighted = logits.named([ref[...] for ref in stat_refs])
        lane, own = lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1), own_ref[...] - j * words
        pieces = {k: y[:, k : k + LANES] for k in range(0, words, LANES)}

        def filled(value: float) -> list[jax.Array]:
            """Return the pieces, with a value in the place of words beyond the vocabulary."""
            if not vocabulary % words:  # else in every tile: cheap beside a matrix product, and no branch
                return list(pieces.values())
            return [jnp.where(lane < vocabulary - j * words - k, y, value) for k, y in pieces.items()]

        seen = filled(-jnp.inf)
        higher = functools.reduce(jnp.maximum, seen, top)
        finite = _finite(higher)
        u, scale = [y - finite for y in seen], jnp.exp(top - finite)
        power = [jnp.exp(y) for y in u]
        new = [
            higher,
            sum(power, total * scale),
            sum((jnp.where(lane == own - k, y, 0.0) for k, y in pieces.items()), hit),
        ]
        if summed is not None:
            new.append(sum(filled(0.0), summed))
        if weighted is not None:
            new.append(sum(map(_weighted, u, power), scale * (weighted + (_finite(top) - finite) * total)))
        for ref, value in zip(stat_refs, new, strict=True):
            ref[...] = value

        @pl.when(j == last)
        def _() -> None:
            top, total, hit, summed, weighted = logits.named([ref[...].T for ref in stat_refs])
            highest = _finite(top.max(0, keepdims=True))
            scale = jnp.exp(top - highest)
            if weighted is not None:
                weighted = scale * (weighted + (_finite(top) - highest) * total)
            out_ref[:1] = highest
            values = [x for x in (total * scale, hit, summed, weighted) if x is not None]
            for k, value in enumerate(values, 1):
                out_ref[k : k + 1] = value.sum(0, keepdims=True)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((stats, n), jnp.float32),
        grid=(pl.cdiv(n, tokens), last + 1),
        in_specs=[
            pl.BlockSpec((tokens, width), lambda i, j: (i, 0)),
            pl.BlockSpec(w_block, w_place),
            pl.BlockSpec((1, tokens), lambda i, j: (0, i)),
        ],
        out_specs=pl.BlockSpec((stats, tokens), lambda i, j: (0, i)),
        scratch_shapes=[
            pltpu.VMEM((tokens, LANES), jnp.int32),
            *[pltpu.VMEM((tokens, LANES), jnp.float32)] * stats,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * vocabulary * width,
            transcendentals=n * vocabulary * (1 if logits.softcap is None else 2),
            bytes_accessed=x.size * x.dtype.itemsize + pl.cdiv(n, tokens) * w.size * w.dtype.itemsize,
        ),
        interpret=target.tpu(),
    )(x, w, rows[None])


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, 0.0, top)


def _weighted(u: jax.Array, power: jax.Array) -> jax.Array:
    """Return u exp(u), 0 where u is -inf."""
    return jnp.maximum(u, LOWEST) * power


def tile_bytes(tokens: int, words: int, width: int, dtype: str, w_dtype: str) -> int:
    """Return bytes of VMEM of double-buffered blocks and a tile of logits."""
    size, w_size = jnp.dtype(dtype).itemsize, jnp.dtype(w_dtype).itemsize
    parts = 6 if dtype == "float32" else 0  # an exact float32 product has three bfloat16 parts of each factor
    cast = 0 if dtype == w_dtype else size
    return width * (tokens * (2 * size + parts) + words * (2 * w_size + cast + parts)) + 12 * tokens * words


def _fit(tokens: int, words: int, width: int, dtype: str, w_dtype: str) -> tuple[int, int]:
    """Return the largest tile that fits, with as many tokens as possible: w is read once for each tile of tokens."""
    while tile_bytes(tokens, words, width, dtype, w_dtype) > TILES:
        if words > FEWEST[1]:
            words //= 2
        else:
            tokens //= 2
    return tokens, words


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) of what ships, for the gate."""
    for entry in entries("cut_cross_entropy"):
        if not entry["device"].startswith("TPU"):
            continue
        width, dtype = entry["key"]["width"], entry["key"]["dtype"]
        for name, options in examples.CASES.items():
            for direction in ("forward", "backward"):
                made = examples.case(run, Target("", "tpu"), **options, width=width, dtype=dtype, direction=direction)
                yield f"{dtype} {width} {name} {direction}", *made
