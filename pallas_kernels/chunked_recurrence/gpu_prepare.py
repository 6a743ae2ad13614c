"""The recurrence on Hopper, before its walks: what a chunk needs that does not depend on the state, for all at once.

A block of one warpgroup has one chunk of one head. So the triangular systems of the delta rule, most of its arithmetic,
use the whole device, and a walk over chunks has two products after one another for each chunk.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked_recurrence.gpu_channels import channel_scores, scale
from pallas_kernels.chunked_recurrence.gpu_tiles import (
    BETA,
    RATES,
    SHAPE,
    SIDE,
    SINCE,
    Lines,
    buffer,
    load,
    products,
    put,
    split,
    times,
)
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import plgpu

WORK = 6
"""Tiles that the delta rule works in."""


class Prepared(NamedTuple):
    """What `prepare` returns, in bfloat16. With the delta rule a chunk adds `values + takes S` beside its keys.

    Args:
      reads: queries (B, S, H, K); by channels times the decay since the chunk began.
      writes: keys (B, S, H, K); by channels times the decay until the chunk's end.
      channels: number of the first line of channels, or `None`.
      scores: decayed products of queries and keys, 0 where a row does not see a column, (B, H, chunks, 64, 64).
      values: what tokens add if the state before the chunk is 0, (B, S, H, V): v, or the delta rule's `T (beta v)`.
      takes: the delta rule's `-T (beta k decay)`, (B, S, H, K), or `None`.
      solved: `T beta` in two terms, (B, H, chunks, 2, 64, 64), or `None`: only gradients need it.
    """

    reads: jax.Array
    writes: jax.Array
    channels: int | None
    scores: jax.Array
    values: jax.Array
    takes: jax.Array | None
    solved: jax.Array | None

    def lines(self, lines_s: Any) -> Lines:
        """Return the lines of a chunk, which are in shared memory."""
        return Lines(lines_s, self.channels)


def prepare(
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lines: jax.Array,
    decays: tuple[jax.Array, ...] = (),
    *,
    delta: bool,
    save: bool = False,
) -> Prepared:
    """Return what the walks over chunks read.

    Args:
      target: the device to compile for.
      q: bfloat16 (B, S, H, K), whole chunks.
      k: the same.
      v: bfloat16 (B, S, H, V).
      lines: of `vectors`.
      decays: with decay by channels, those of `terms`, (B, S, H, K) each.
      delta: with the delta rule.
      save: return `solved` too.
    """
    (b, _, h, key), value, (chunks, count) = q.shape, v.shape[3], lines.shape[2:4]
    tiles, columns, save, channels = key // SIDE, value // SIDE, save and delta, bool(decays)
    work = WORK if delta else 1 + 2 * tiles * channels
    keyed = [q, k, *decays]

    def chunked_recurrence_prepare(*refs: Any) -> None:
        keyed_refs, refs = refs[: len(keyed)], refs[len(keyed) :]
        v_ref, (lines_ref, scores_ref), refs = refs[:delta], refs[delta : delta + 2], refs[delta + 2 :]
        scaled_refs, refs = refs[: 2 * channels], refs[2 * channels :]
        made_refs, refs = refs[: 2 * delta + save], refs[2 * delta + save :]
        keyed_s, (work_s, lines_s, *v_s, full) = refs[: len(keyed)], refs[len(keyed) :]
        q_s, k_s, *decays_s = keyed_s
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
        at_b, at_h, tokens = lax.div(head, h), lax.rem(head, h), pl.ds(chunk * SIDE, SIDE)
        cut = [pl.ds(i * SIDE, SIDE) for i in range(max(tiles, columns))]

        for ref, into in (*zip(keyed_refs, keyed_s, strict=True), *zip(v_ref, v_s, strict=True)):
            for i in range(into.shape[0]):
                plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, cut[i]], into.at[i], full)
        plgpu.copy_gmem_to_smem(lines_ref.at[at_b, at_h, chunk], lines_s, full)
        plgpu.barrier_wait(full)

        line = Lines(lines_s)
        if channels:
            # keys since the chunk began, and scores, in the places of the two terms of the decay
            from_s, scores_s = decays_s[0], decays_s[1].at[0]
            scores, *alike = channel_scores(line, q_s, k_s, decays_s, work_s, delta)
            scale(line, q_s, k_s, decays_s, work_s, delta)
            put(scores_s, jnp.where(line.sees(), scores, 0.0))
            if delta:
                solve(line, jnp.where(line.sees(), alike[0], 0.0), work_s)
        else:
            from_s, scores_s = k_s, work_s.at[work - 1]
            if delta:
                solve(line, products(*((x, x.T) for x in line.tiles(k_s))) * line.decays(), work_s)
            scores = products(*((x, y.T) for x, y in zip(line.tiles(q_s), line.tiles(k_s), strict=True)))
            put(scores_s, scores * line.decays())
        if delta:
            high_s, low_s, *taken_s = line.tiles(work_s)[:4]
            solved = (load(high_s) + load(low_s)) * line.of(RATES, 1)
            plgpu.commit_smem()  # every thread has read
            split((high_s, low_s), solved)
            split(taken_s, -solved * line.of(SINCE, 1))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scores_s, scores_ref.at[at_b, at_h, chunk])
        for ref, i in itertools.product(range(len(scaled_refs)), range(tiles)):
            plgpu.copy_smem_to_gmem(keyed_s[ref].at[i], scaled_refs[ref].at[at_b, tokens, at_h, cut[i]])
        if save:
            for i in range(2):
                plgpu.copy_smem_to_gmem(work_s.at[i], made_refs[2].at[at_b, at_h, chunk, i])
        if delta:
            for made_s, terms in ((v_s[0], (0, 1)), (from_s, (2, 3))):

                def apply(i: Any, _: None, made_s: Any = made_s, terms: Any = terms) -> None:
                    x = products(*((line.tiles(work_s)[j], made_s.at[i]) for j in terms))
                    plgpu.commit_smem()  # every thread has read
                    put(made_s.at[i], x)

                lax.fori_loop(0, made_s.shape[0], apply, None)
            plgpu.commit_smem()
            for made_s, ref in zip((v_s[0], from_s), made_refs, strict=False):
                for i in range(made_s.shape[0]):
                    plgpu.copy_smem_to_gmem(made_s.at[i], ref.at[at_b, tokens, at_h, cut[i]])
        plgpu.wait_smem_to_gmem(0)

    square = jax.ShapeDtypeStruct((b, h, chunks, *SHAPE), jnp.bfloat16)
    made = plgpu.kernel(
        chunked_recurrence_prepare,
        out_type=(
            square,
            *[jax.ShapeDtypeStruct(k.shape, jnp.bfloat16)] * (2 * channels),
            *[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (v, k)] * delta,
            *[jax.ShapeDtypeStruct((b, h, chunks, 2, *SHAPE), jnp.bfloat16)] * save,
        ),
        grid=(b * h, chunks),
        grid_names=("head", "chunk"),
        scratch_types=[
            *[buffer(tiles)] * len(keyed),
            buffer(work),
            plgpu.SMEM((count, SIDE), jnp.float32),
            *[buffer(columns)] * delta,
            plgpu.Barrier(num_arrivals=len(keyed) * tiles + columns * delta + 1),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(*keyed, *[v] * delta, lines)
    (scores, *made), first = made, RATES + 1 if delta else BETA
    (reads, writes), made = (made[:2], made[2:]) if channels else ((q, k), made)
    values, takes, solved = (*made, None)[:3] if delta else (v, None, None)
    return Prepared(reads, writes, first if channels else None, scores, values, takes, solved)


def solve(line: Lines, alike: Any, work_s: Any) -> None:
    """Write the inverse of the delta rule's triangular matrix `I + beta * alike`, below its diagonal, to two tiles.

    The inverse of a matrix of four blocks follows from those of the two on its diagonal, by two products; here for all
    blocks of a size at once, from 2 x 2 blocks on.

    Args:
      line: the chunk's lines.
      alike: decayed products of keys, 0 where a row does not see a column; the diagonal and above do not matter.
      work_s: `WORK` tiles of shared memory, whose first two the result is in.
    """

    def work() -> list[Any]:
        tiles = line.tiles(work_s)
        return list(zip(tiles[0::2], tiles[1::2], strict=True))

    row, column = line.places()
    lower = jnp.where(column < row, alike * line.of(BETA), 0.0)
    apart = row ^ column
    made_s, _, lower_s = work()
    split(lower_s, lower)
    split(made_s, jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -lower, 0.0)))
    plgpu.commit_smem()

    def double(doubling: Any, _: None) -> None:
        made_s, half_s, lower_s = work()
        split(half_s, times(made_s, lower_s))
        plgpu.commit_smem()
        below = times(half_s, made_s)
        # Blocks of 2^doubling rows right below such a block on the diagonal; they were zero.
        row, column = line.places()
        here = lax.shift_right_logical(row ^ column, doubling) == 1
        made = jnp.where(here, -below, load(made_s[0]) + load(made_s[1]))
        plgpu.commit_smem()  # every thread has read
        split(made_s, made)
        plgpu.commit_smem()

    lax.fori_loop(1, SIDE.bit_length() - 1, double, None)
