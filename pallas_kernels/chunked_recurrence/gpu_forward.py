"""The recurrence on Hopper, forwards: a walk over chunks with the state in registers.

A block of one warpgroup has one head of one row and 64 columns of its values. TMA copies the chunk after the next
while this one is multiplied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked_recurrence.gpu_tiles import (
    BETA,
    SHAPE,
    SIDE,
    SINCE,
    UNTIL,
    WIDE,
    WORK,
    Lines,
    buffer,
    load,
    products,
    put,
    split,
    times,
    wide,
    wide_tiles,
)
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import plgpu, swizzled, zeros

SLOTS = 2
"""Chunks in flight."""


def walk(
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lines: jax.Array,
    initial: tuple[jax.Array, ...],
    *,
    delta: bool,
    dtype: Any,
    save: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the outputs (B, S, H, V) and the last state (B, H, K, V) in float32.

    With `save`, return instead what gradients need, in bfloat16: with the delta rule what each token adds beside its
    key, (B, S, H, V), and each chunk's first state (B, H, chunks, K, V).

    Args:
      target: the device to compile for.
      q: bfloat16 (B, S, H, K), whole chunks.
      k: the same.
      v: bfloat16 (B, S, H, V).
      lines: of `vectors`.
      initial: the state before the first token, if any.
      delta: with the delta rule.
      dtype: of the first output.
      save: see above.
    """
    (b, s, h, key), value, chunks, count = q.shape, v.shape[3], q.shape[1] // SIDE, lines.shape[3]
    tiles, writes = key // SIDE, delta or not save

    def chunked_recurrence(q_ref: Any, k_ref: Any, v_ref: Any, lines_ref: Any, *refs: Any) -> None:
        first, refs = refs[: len(initial)], refs[len(initial) :]
        (*out_ref, last_ref), refs = refs[: 1 + writes], refs[1 + writes :]
        q_s, k_s, v_s, lines_s, state_s, pair_s, out_s, *work, full = refs
        head, mine = lax.axis_index("head"), pl.ds(lax.axis_index("columns") * SIDE, SIDE)
        at_b, at_h = lax.div(head, h), lax.rem(head, h)
        rows = [pl.ds(i * SIDE, SIDE) for i in range(tiles)]

        def bring(n: Any) -> None:
            slot, tokens = lax.rem(n, SLOTS), pl.ds(n * SIDE, SIDE)
            for ref, into in ((q_ref, q_s), (k_ref, k_s)):
                for i, at in enumerate(rows):
                    plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, at], into.at[slot, i], full.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[at_b, tokens, at_h, mine], v_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(lines_ref.at[at_b, at_h, n], lines_s.at[slot], full.at[slot])

        def step(n: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            slot = lax.rem(n, SLOTS)
            plgpu.barrier_wait(full.at[slot])
            line, values = Lines(lines_s.at[slot]), v_s.at[slot]
            queries, keys = ([x.at[i] for i in range(tiles)] for x in (q_s.at[slot], k_s.at[slot]))
            (scores_s, write_s), states = line.tiles(pair_s), line.tiles(state_s)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the chunk before has been copied
            for i, tile_s in enumerate(states):
                put(tile_s, load(work[1].at[i]) if delta else state[i])
            plgpu.commit_smem()
            decays, keeps = line.decays(), line.keeps()
            if not save:
                scores = products(*((x, y.T) for x, y in zip(queries, keys, strict=True)))
                put(scores_s, scores * decays)
            if delta:
                line.solve(keys, decays, work[0])
                *solved, high_s, low_s, values, _ = line.tiles(work[0])
                seen = products(*zip(keys, states, strict=True))
                split((high_s, low_s), line.of(BETA) * (load(v_s.at[slot]) - line.of(SINCE) * seen))
                plgpu.commit_smem()
                new = times(solved, (high_s, low_s))
                put(values, new)
            else:
                new = load(values)
            put(write_s, new * line.of(UNTIL))
            plgpu.commit_smem()
            if save:
                for at, tile_s in zip(rows, states, strict=True):
                    plgpu.copy_smem_to_gmem(tile_s, last_ref.at[at_b, at_h, n, at, mine])
            else:
                out = line.of(SINCE) * products(*zip(queries, states, strict=True)) + products((scores_s, values))
                put(out_s, out)
                plgpu.commit_smem()
            if writes:
                made_s = values if save else out_s
                plgpu.copy_smem_to_gmem(made_s, out_ref[0].at[at_b, pl.ds(n * SIDE, SIDE), at_h, mine])
            if delta:
                for i, k in enumerate(keys):
                    put(work[1].at[i], keeps * load(work[1].at[i]) + products((k.T, write_s)))
                plgpu.commit_smem()
            else:
                state = tuple(wide(keeps * x + products((k.T, write_s))) for x, k in zip(state, keys, strict=True))
            pl.when(n + SLOTS < chunks)(lambda: bring(n + SLOTS))
            return state

        for n in range(min(SLOTS, chunks)):
            bring(n)
        state = tuple(
            plgpu.load(first[0].at[at_b, at_h, at, mine], layout=WIDE, optimized=False) if first else zeros(SHAPE, WIDE)
            for at in rows
        )
        if delta:
            for i, tile in enumerate(state):
                put(work[1].at[i], tile)
            plgpu.commit_smem()
        state = lax.fori_loop(0, chunks, step, () if delta else state)
        plgpu.wait_smem_to_gmem(0)
        if not save:
            for i, at in enumerate(rows):
                last_ref[at_b, at_h, at, mine] = load(work[1].at[i]) if delta else state[i]

    states = jax.ShapeDtypeStruct((b, h, chunks, key, value), jnp.bfloat16)
    return plgpu.kernel(
        chunked_recurrence,
        out_type=(
            *[jax.ShapeDtypeStruct((b, s, h, value), dtype)] * writes,
            states if save else jax.ShapeDtypeStruct((b, h, key, value), jnp.float32),
        ),
        grid=(b * h, value // SIDE),
        grid_names=("head", "columns"),
        scratch_types=[
            buffer(SLOTS, tiles),
            buffer(SLOTS, tiles),
            buffer(SLOTS),
            plgpu.SMEM((SLOTS, count, SIDE), jnp.float32),
            buffer(tiles),
            buffer(2),
            plgpu.SMEM(SHAPE, dtype, transforms=swizzled(SIDE, dtype)),
            *[buffer(WORK)] * delta,
            *wide_tiles(tiles, delta),
            plgpu.Barrier(num_arrivals=2 * tiles + 2, num_barriers=SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(q, k, v, lines, *initial)
