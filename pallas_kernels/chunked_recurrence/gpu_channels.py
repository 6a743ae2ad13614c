"""The recurrence on Hopper with decay by channels: what a chunk's pairs of tokens need, as products of matrices.

The decay between two tokens differs by channel, so it has to be in the operands of a product, and no exponent may be
above 0. Two tokens of a chunk are in the two halves of one block of 2, 4, 8, 16, 32 or 64 tokens; the decay from the
earlier to the later one is that to the end of the first half times that since the second half began. So for a size of
blocks each token has one factor for each channel, and one product of all tokens with all has the pairs of all blocks of
that size: six sizes, six products, and no exponent pair by pair.

A factor's exponent is a sum of decays' logarithms over a span of tokens: a product of a matrix of ones with them. They
have two terms of bfloat16, so that sums are float32 but for the last 7 bits, and no sum is a difference of others. The
gradient takes the same way back: cotangents of exponents times the transposed ones.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked_recurrence.gpu_tiles import (
    BETA,
    RATES,
    SHAPE,
    SIDE,
    SINCE,
    UNTIL,
    WIDE,
    Lines,
    buffer,
    load,
    products,
    put,
    split,
    together,
    wide,
)
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import plgpu, spread, swizzled, zeros

LEVELS = SIDE.bit_length() - 1
"""Sizes of halves of blocks: 1, 2, ... 32; as a level, the chunk as one half."""
_SPARE = 8192  # bytes of shared memory for vectors, barriers and Mosaic


def channels_memory(value: int, delta: bool) -> int:
    """Return bytes of shared memory of a block of `channel_gradients`.

    Args:
      value: width of a value.
      delta: with the delta rule.
    """
    columns = value // SIDE
    return 2 * SIDE**2 * (6 + 4 * columns + 1 + 1 + delta * (columns + 1)) + _SPARE


def spans(line: Lines, level: Any, later: int | None = None) -> Any:
    """Return 1 where a column's token decays a row's factor, else 0.

    In the second half of a block those are the tokens since that half began, the row's among them; in the first half
    those after the row's until the half ends.

    Args:
      line: the chunk's lines.
      level: logarithm of the size of a half, in base 2.
      later: 1 or 0: all rows are in a second or in a first half.
    """
    row, column = line.places()
    same = lax.shift_right_logical(row ^ column, level) == 0
    half = lax.shift_right_logical(row, level) & 1 if later is None else later
    return jnp.where(same & (jnp.where(column <= row, 1, 0) == half), 1.0, 0.0)


def pairs(line: Lines, level: Any) -> Any:
    """Return where the row's token is in the second half of a block and the column's in its first half."""
    row, column = line.places()
    return (lax.shift_right_logical(row ^ column, level) == 1) & (column < row)


def factors(spans_s: Any, decays: list[Any]) -> Any:
    """Return the decays over spans of tokens: (tokens, channels) in registers.

    Args:
      spans_s: of `spans`, in shared memory.
      decays: the two terms of a tile of channels.
    """
    return jnp.exp2(products(*((spans_s, x) for x in decays)))


def channel_scores(
    line: Lines, q_s: Any, k_s: Any, decays_s: list[Any], work_s: Any, delta: bool
) -> tuple[Any, ...]:  # fmt: skip
    """Return decayed products of queries and keys, and with the delta rule of keys and keys below the diagonal.

    Restarts are left out, and numbers above the diagonal are 0.

    Args:
      line: the chunk's lines.
      q_s: the queries' tiles.
      k_s: the keys' tiles.
      decays_s: those of the decay's two terms.
      work_s: one tile and two for each of the keys' tiles.
      delta: with the delta rule.
    """
    row, column = line.places()
    same = products(*((x, y.T) for x, y in zip(line.tiles(q_s), line.tiles(k_s), strict=True)))

    def level(n: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        spans_s, *scaled = line.tiles(work_s)[: 1 + 2 * q_s.shape[0]]
        put(spans_s, spans(line, n))
        plgpu.commit_smem()
        tiles = (line.tiles(x) for x in (q_s, k_s, *decays_s))
        for i, (query, key, *decays) in enumerate(zip(*tiles, strict=True)):
            decay = factors(spans_s, decays)
            put(scaled[2 * i], load(query) * decay)
            put(scaled[2 * i + 1], load(key) * decay)
        plgpu.commit_smem()
        rows = (scaled[0::2], scaled[1::2])[: 1 + delta]
        made = together(*([(x, y.T) for x, y in zip(one, scaled[1::2], strict=True)] for one in rows))
        here = pairs(line, n)
        return tuple(wide(jnp.where(here, x, y)) for x, y in zip(made, sums, strict=True))

    start = wide(jnp.where(row == column, same, 0.0))
    return lax.fori_loop(0, LEVELS, level, (start, *[zeros(SHAPE, WIDE)] * delta))


def scale(line: Lines, q_s: Any, k_s: Any, decays_s: list[Any], work_s: Any, delta: bool) -> None:
    """Decay queries since the chunk began and keys until its end, in place.

    Args:
      line: the chunk's lines.
      q_s: the queries' tiles.
      k_s: the keys' tiles.
      decays_s: those of the decay's two terms; the delta rule replaces the first by keys decayed since the chunk began.
      work_s: two tiles.
      delta: with the delta rule.
    """
    since_s, until_s, *_ = line.tiles(work_s)
    plgpu.commit_smem()  # every thread has read
    put(since_s, spans(line, LEVELS, later=1))
    put(until_s, spans(line, LEVELS, later=0))
    plgpu.commit_smem()

    def tile(i: Any, _: None) -> None:
        decays = [x.at[i] for x in decays_s]
        since, until = map(jnp.exp2, together(*([(x, y) for y in decays] for x in (since_s, until_s))))
        plgpu.commit_smem()  # every thread has read
        put(q_s.at[i], load(q_s.at[i]) * since)
        if delta:
            put(decays[0], load(k_s.at[i]) * since)
        put(k_s.at[i], load(k_s.at[i]) * until)

    lax.fori_loop(0, q_s.shape[0], tile, None)


def channel_gradients(
    target: Target,
    q: jax.Array,
    k: jax.Array,
    new: jax.Array,
    dout: jax.Array,
    states: jax.Array,
    dstates: jax.Array,
    lines: jax.Array,
    decays: tuple[jax.Array, ...],
    *solved: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return cotangents of q, of k and, float32, of the decay's logarithm; with the delta rule also of v.

    A block has 64 channels of one chunk of one head.

    Args:
      target: the device to compile for.
      q: bfloat16 (B, S, H, K), whole chunks.
      k: the same.
      new: bfloat16 (B, S, H, V), what each token adds beside its key: v without the delta rule.
      dout: the same, the outputs' cotangent.
      states: bfloat16 (B, H, chunks, K, V), each chunk's first state.
      dstates: the same, the cotangent of each chunk's last state.
      lines: of `vectors`.
      decays: of `terms`, (B, S, H, K) each.
      *solved: with the delta rule, that of `prepare`, and the cotangent of `new`, bfloat16 (B, S, H, V).
    """
    (b, _, h, key), value, (chunks, count) = q.shape, new.shape[3], lines.shape[2:4]
    columns, delta = value // SIDE, bool(solved)
    first = RATES + 1 if delta else BETA
    keyed = [q, k, *decays]

    def chunked_recurrence_channels(*refs: Any) -> None:
        keyed_refs, (new_ref, dstates_ref, dout_ref, states_ref, lines_ref, *refs) = refs[:4], refs[4:]  # type: ignore[assignment]
        solved_ref, dnew_ref, refs = refs[:delta], refs[delta : 2 * delta], refs[2 * delta :]
        (dq_ref, dk_ref, ddecay_ref, *dv_ref), refs = refs[: 3 + delta], refs[3 + delta :]
        q_s, k_s, terms_s, work_s, lines_s, pair_s, carried_s, ddecay_s, *dv_s, full = refs
        head, chunk, tile = (lax.axis_index(x) for x in ("head", "chunk", "tile"))
        at_b, at_h, tokens = lax.div(head, h), lax.rem(head, h), pl.ds(chunk * SIDE, SIDE)
        mine, cut = pl.ds(tile * SIDE, SIDE), [pl.ds(j * SIDE, SIDE) for j in range(columns)]

        for ref, into in zip(keyed_refs, (q_s, k_s, *(terms_s.at[i] for i in range(2))), strict=True):
            plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, mine], into, full)
        for j in range(columns):
            for i, ref in enumerate((new_ref, dstates_ref, dout_ref, states_ref)):
                at = (at_b, at_h, chunk, mine) if i % 2 else (at_b, tokens, at_h)
                plgpu.copy_gmem_to_smem(ref.at[*at, cut[j]], work_s.at[i * columns + j], full)
            for ref, into in zip(dnew_ref, dv_s, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, cut[j]], into.at[j], full)
        plgpu.copy_gmem_to_smem(lines_ref.at[at_b, at_h, chunk], lines_s, full)
        for ref, i in itertools.product(solved_ref, range(2)):
            plgpu.copy_gmem_to_smem(ref.at[at_b, at_h, chunk, i], pair_s.at[i], full)
        plgpu.barrier_wait(full)

        line = Lines(lines_s, first)
        work = line.tiles(work_s)
        news, ends, douts, begins = (work[i * columns : (i + 1) * columns] for i in range(4))

        def through(j: Any, _: None) -> None:
            """Turn the cotangent of what tokens add into that of v."""
            dv = products(*((x.T, dv_s[0].at[j]) for x in line.tiles(pair_s)))
            plgpu.commit_smem()  # every thread has read
            put(dv_s[0].at[j], dv)

        if delta:
            lax.fori_loop(0, columns, through, None)
            plgpu.commit_smem()
        row, column = line.places()
        of_v = [line.tiles(x) for x in dv_s]
        for i, cotangents in enumerate((douts, *of_v)):
            dscores = products(*((x, y.T) for x, y in zip(cotangents, news, strict=True)))
            # of the delta rule's system, below the diagonal
            put(pair_s.at[i], jnp.where(line.sees() & (column < row) if i else line.sees(), (1 - 2 * i) * dscores, 0.0))

        # The share of the states before and after the chunk.
        carried = lambda j, x: x + (load(work_s.at[columns + j]) * load(work_s.at[3 * columns + j])).sum(1)  # noqa: E731
        carried_s[...] = lax.fori_loop(0, columns, carried, zeros((SIDE,), WIDE.reduce(1)))
        put(work_s.at[4 * columns], spans(line, LEVELS, later=0))
        write = products(*((x, y.T) for x, y in zip(news, ends, strict=True)))
        plgpu.commit_smem()  # and every thread has read
        share, keeps = (
            plgpu.load(x, layout=WIDE.reduce(0), optimized=False) for x in (carried_s, lines_s.at[first + tile])
        )
        ddecay_s[...] = wide(spread(share * keeps, SHAPE, 1))

        def decayed() -> Any:
            """Return the decays over spans."""
            return factors(line.tiles(work_s)[4 * columns], line.tiles(terms_s))

        def exponents(cotangent: Any) -> None:
            """Add the share of logarithms of decay in the cotangent of exponents."""
            one_s, other_s, *_, spans_s = line.tiles(work_s)
            split((one_s, other_s), cotangent)
            plgpu.commit_smem()
            made = products((spans_s.T, one_s), (spans_s.T, other_s))
            ddecay_s[...] = wide(plgpu.load(ddecay_s, layout=WIDE) + made)
            plgpu.commit_smem()  # every thread has read

        dk = decayed() * line.of(UNTIL) * write
        exponents(load(k_s) * dk)
        put(work_s.at[4 * columns], spans(line, LEVELS, later=1))
        read, *take = together(*([(x, y.T) for x, y in zip(a, begins, strict=True)] for a in (douts, *of_v)))
        plgpu.commit_smem()
        since = decayed() * line.of(SINCE)
        dq = since * read
        of_since = load(q_s) * dq
        if delta:
            removed = since * take[0]
            dk, of_since = dk - removed, of_since - load(k_s) * removed
        exponents(of_since)

        # The share of pairs: of a token with itself, and of the others by the size of their block.
        row, column = line.places()
        itself = spread(jnp.where(row == column, load(pair_s.at[0]), 0.0).sum(1), SHAPE, 0)
        dq, dk = dq + itself * load(k_s), dk + itself * load(q_s)

        def level(n: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            dq, dk = sums
            query_s, key_s, *others, spans_s = line.tiles(work_s)
            near = others[2 * columns - 2 :][: 1 + delta]
            put(spans_s, spans(line, n))
            here = pairs(line, n)
            for near_s, whole_s in zip(near, line.tiles(pair_s), strict=True):
                put(near_s, jnp.where(here, load(whole_s), 0.0))
            plgpu.commit_smem()
            decay = decayed()
            put(query_s, load(q_s) * decay)
            put(key_s, load(k_s) * decay)
            plgpu.commit_smem()
            scores_s, *system = near
            of_keys = [(scores_s.T, query_s), *((y, key_s) for x in system for y in (x, x.T))]
            # one after the other, since registers would spill
            part = products((scores_s, key_s)) * decay
            dq, exponent = dq + part, load(q_s) * part
            part = products(*of_keys) * decay
            dk, exponent = dk + part, exponent + load(k_s) * part
            plgpu.commit_smem()  # every thread has read
            exponents(exponent)
            return wide(dq), wide(dk)

        dq, dk = lax.fori_loop(0, LEVELS, level, (wide(dq), wide(dk)))
        put(q_s, dq)
        put(k_s, dk)
        plgpu.commit_smem()
        for ref, from_s in ((dq_ref, q_s), (dk_ref, k_s), (ddecay_ref, ddecay_s)):
            plgpu.copy_smem_to_gmem(from_s, ref.at[at_b, tokens, at_h, mine])
        if delta:

            @pl.when(tile == 0)
            def _() -> None:
                for j in range(columns):
                    plgpu.copy_smem_to_gmem(dv_s[0].at[j], dv_ref[0].at[at_b, tokens, at_h, cut[j]])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        chunked_recurrence_channels,
        out_type=(
            *[jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)] * 2,
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            *[jax.ShapeDtypeStruct(new.shape, jnp.bfloat16)] * delta,
        ),
        grid=(b * h, chunks, key // SIDE),
        grid_names=("head", "chunk", "tile"),
        scratch_types=[
            *[buffer()] * 2,
            buffer(2),
            buffer(4 * columns + 1),
            plgpu.SMEM((count, SIDE), jnp.float32),
            buffer(1 + delta),
            plgpu.SMEM((SIDE,), jnp.float32),
            plgpu.SMEM(SHAPE, jnp.float32, transforms=swizzled(SIDE, jnp.float32)),
            *[buffer(columns)] * delta,
            plgpu.Barrier(num_arrivals=len(keyed) + 4 * columns + 1 + delta * (columns + 2)),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(*keyed, new, dstates, dout, states, lines, *solved)
