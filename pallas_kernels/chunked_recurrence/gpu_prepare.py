"""The recurrence on Hopper, before its walks: what a chunk needs that does not depend on the state, for all at once.

A block of one warpgroup has one chunk of one head. So the triangular systems of the delta rule, most of its arithmetic,
use the whole device, and a walk over chunks has two products after one another for each chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
      scores: decayed products of queries and keys, 0 where a row does not see a column, (B, H, chunks, 64, 64).
      values: what tokens add if the state before the chunk is 0, (B, S, H, V): v, or the delta rule's `T (beta v)`.
      takes: the delta rule's `-T (beta k decay)`, (B, S, H, K), or `None`.
      solved: `T beta` in two terms, (B, H, chunks, 2, 64, 64), or `None`: only gradients need it.
    """

    scores: jax.Array
    values: jax.Array
    takes: jax.Array | None
    solved: jax.Array | None


def prepare(
    target: Target, q: jax.Array, k: jax.Array, v: jax.Array, lines: jax.Array, *, delta: bool, save: bool = False
) -> Prepared:
    """Return what the walks over chunks read.

    Args:
      target: the device to compile for.
      q: bfloat16 (B, S, H, K), whole chunks.
      k: the same.
      v: bfloat16 (B, S, H, V).
      lines: of `vectors`.
      delta: with the delta rule.
      save: return `solved` too.
    """
    (b, _, h, key), value, (chunks, count) = q.shape, v.shape[3], lines.shape[2:4]
    tiles, columns, save = key // SIDE, value // SIDE, save and delta

    def chunked_recurrence_prepare(q_ref: Any, k_ref: Any, *refs: Any) -> None:
        v_ref, (lines_ref, scores_ref), refs = refs[:delta], refs[delta : delta + 2], refs[delta + 2 :]
        made_refs, refs = refs[: 2 * delta + save], refs[2 * delta + save :]
        q_s, k_s, work_s, lines_s, *v_s, full = refs
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
        at_b, at_h, tokens = lax.div(head, h), lax.rem(head, h), pl.ds(chunk * SIDE, SIDE)
        cut = [pl.ds(i * SIDE, SIDE) for i in range(max(tiles, columns))]

        for ref, into in ((q_ref, q_s), (k_ref, k_s), *zip(v_ref, v_s, strict=True)):
            for i in range(into.shape[0]):
                plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, cut[i]], into.at[i], full)
        plgpu.copy_gmem_to_smem(lines_ref.at[at_b, at_h, chunk], lines_s, full)
        plgpu.barrier_wait(full)

        line = Lines(lines_s)
        if delta:
            solve(line, line.tiles(k_s), work_s)
        scores_s = work_s.at[WORK - 1 if delta else 0]
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
        if save:
            for i in range(2):
                plgpu.copy_smem_to_gmem(work_s.at[i], made_refs[2].at[at_b, at_h, chunk, i])
        if delta:
            # in the places of v and, since scores are done, of q
            for from_s, into_s, terms in ((v_s[0], v_s[0], (0, 1)), (k_s, q_s, (2, 3))):

                def apply(i: Any, _: None, from_s: Any = from_s, into_s: Any = into_s, terms: Any = terms) -> None:
                    x = products(*((line.tiles(work_s)[j], from_s.at[i]) for j in terms))
                    put(into_s.at[i], x)

                lax.fori_loop(0, from_s.shape[0], apply, None)
            plgpu.commit_smem()
            for from_s, ref in ((v_s[0], made_refs[0]), (q_s, made_refs[1])):
                for i in range(from_s.shape[0]):
                    plgpu.copy_smem_to_gmem(from_s.at[i], ref.at[at_b, tokens, at_h, cut[i]])
        plgpu.wait_smem_to_gmem(0)

    square = jax.ShapeDtypeStruct((b, h, chunks, *SHAPE), jnp.bfloat16)
    made = plgpu.kernel(
        chunked_recurrence_prepare,
        out_type=(
            square,
            *[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (v, k)] * delta,
            *[jax.ShapeDtypeStruct((b, h, chunks, 2, *SHAPE), jnp.bfloat16)] * save,
        ),
        grid=(b * h, chunks),
        grid_names=("head", "chunk"),
        scratch_types=[
            *[buffer(tiles)] * 2,
            buffer(WORK if delta else 1),
            plgpu.SMEM((count, SIDE), jnp.float32),
            *[buffer(columns)] * delta,
            plgpu.Barrier(num_arrivals=2 * tiles + columns * delta + 1),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(q, k, *[v] * delta, lines)
    return Prepared(made[0], made[1], made[2], made[3] if save else None) if delta else Prepared(made[0], v, None, None)


def solve(line: Lines, keys: list[Any], work_s: Any) -> None:
    """Write the inverse of the delta rule's triangular matrix `I + beta * (k k^T) * decays` to the first two tiles.

    The inverse of a matrix of four blocks follows from those of the two on its diagonal, by two products; here for all
    blocks of a size at once, from 2 x 2 blocks on.

    Args:
      line: the chunk's lines.
      keys: the keys' tiles.
      work_s: `WORK` tiles of shared memory.
    """

    def work() -> list[Any]:
        tiles = line.tiles(work_s)
        return list(zip(tiles[0::2], tiles[1::2], strict=True))

    alike = products(*((k, k.T) for k in keys))
    row, column = line.places()
    lower = jnp.where(column < row, alike * line.decays() * line.of(BETA), 0.0)
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
