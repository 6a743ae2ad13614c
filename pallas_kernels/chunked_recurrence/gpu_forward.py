"""The recurrence on Hopper, forwards: a walk over chunks with the state in registers.

A block of one warpgroup has one head of one row and 64 columns of its values. TMA copies the chunk after the next
while this one is multiplied. What does not depend on the state is read from `gpu_prepare.prepare`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked_recurrence.gpu_prepare import Prepared
from pallas_kernels.chunked_recurrence.gpu_tiles import (
    SHAPE,
    SIDE,
    SINCE,
    UNTIL,
    WIDE,
    buffer,
    load,
    put,
    together,
    wide,
)
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import plgpu, swizzled, zeros

SLOTS = 2
"""Chunks in flight."""


def walk(
    target: Target,
    prepared: Prepared,
    lines: jax.Array,
    initial: tuple[jax.Array, ...],
    *,
    dtype: Any,
    save: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the outputs (B, S, H, V) and the last state (B, H, K, V) in float32.

    With `save`, return instead what gradients need, in bfloat16: with the delta rule what each token adds beside its
    key, (B, S, H, V), and each chunk's first state (B, H, chunks, K, V).

    Args:
      target: the device to compile for.
      prepared: of `prepare`.
      lines: of `vectors`.
      initial: the state before the first token, if any.
      dtype: of the first output.
      save: see above.
    """
    (b, s, h, key), value, (chunks, count) = prepared.writes.shape, prepared.values.shape[3], lines.shape[2:4]
    delta, reads = prepared.takes is not None, not save
    tiles, writes = key // SIDE, delta or reads
    keyed = [prepared.writes, *[prepared.takes] * delta, *[prepared.reads] * reads]

    def chunked_recurrence(*refs: Any) -> None:
        keyed_refs, refs = refs[: len(keyed)], refs[len(keyed) :]
        scores_ref, (values_ref, lines_ref), refs = refs[:reads], refs[reads : reads + 2], refs[reads + 2 :]
        first, refs = refs[: len(initial)], refs[len(initial) :]
        (*out_ref, last_ref), refs = refs[: 1 + writes], refs[1 + writes :]
        keyed_s, refs = refs[: len(keyed)], refs[len(keyed) :]
        scores_s, refs = refs[:reads], refs[reads:]
        values_s, lines_s, state_s, pair_s, *out_s, full = refs
        head, mine = lax.axis_index("head"), pl.ds(lax.axis_index("columns") * SIDE, SIDE)
        at_b, at_h = lax.div(head, h), lax.rem(head, h)
        rows = [pl.ds(i * SIDE, SIDE) for i in range(tiles)]

        def bring(n: Any) -> None:
            slot, tokens = lax.rem(n, SLOTS), pl.ds(n * SIDE, SIDE)
            for ref, into in zip(keyed_refs, keyed_s, strict=True):
                for i, at in enumerate(rows):
                    plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, at], into.at[slot, i], full.at[slot])
            for ref, into in ((lines_ref, lines_s), *zip(scores_ref, scores_s, strict=True)):
                plgpu.copy_gmem_to_smem(ref.at[at_b, at_h, n], into.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(values_ref.at[at_b, tokens, at_h, mine], values_s.at[slot], full.at[slot])

        def step(n: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            slot = lax.rem(n, SLOTS)
            plgpu.barrier_wait(full.at[slot])
            line, values, scores = prepared.lines(lines_s.at[slot]), values_s.at[slot], [x.at[slot] for x in scores_s]
            keys, *others = (line.tiles(x.at[slot]) for x in keyed_s)
            states, (new_s, write_s) = line.tiles(state_s), line.tiles(pair_s)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the chunk before has been copied
            for tile_s, x in zip(states, state, strict=True):
                put(tile_s, x)
            plgpu.commit_smem()
            of_state = list(together(*(tuple(zip(x, states, strict=True)) for x in others))) if others else []
            new = load(values)
            if delta:
                new, values = new + of_state.pop(0), new_s
                put(values, new)
            put(write_s, new * line.of(UNTIL))
            plgpu.commit_smem()
            more = together(*(((k.T, write_s),) for k in keys), *(((x, values),) for x in scores))
            state = tuple(wide(line.keeps(i) * x + y) for i, (x, y) in enumerate(zip(state, more, strict=False)))
            for within, since in zip(more[tiles:], of_state, strict=True):
                put(out_s[0], line.of(SINCE) * since + within)
            plgpu.commit_smem()  # and every thread has read
            for made_s, ref in zip(out_s or [values], out_ref, strict=False):
                plgpu.copy_smem_to_gmem(made_s, ref.at[at_b, pl.ds(n * SIDE, SIDE), at_h, mine])
            if save:
                for at, tile_s in zip(rows, states, strict=True):
                    plgpu.copy_smem_to_gmem(tile_s, last_ref.at[at_b, at_h, n, at, mine])
            pl.when(n + SLOTS < chunks)(lambda: bring(n + SLOTS))
            return state

        for n in range(min(SLOTS, chunks)):
            bring(n)
        state = tuple(
            plgpu.load(first[0].at[at_b, at_h, at, mine], layout=WIDE, optimized=False) if first else zeros(SHAPE, WIDE)
            for at in rows
        )
        state = lax.fori_loop(0, chunks, step, state)
        plgpu.wait_smem_to_gmem(0)
        if not save:
            for at, x in zip(rows, state, strict=True):
                last_ref[at_b, at_h, at, mine] = x

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
            *[buffer(SLOTS, tiles)] * len(keyed),
            *[buffer(SLOTS)] * reads,
            buffer(SLOTS),
            plgpu.SMEM((SLOTS, count, SIDE), jnp.float32),
            buffer(tiles),
            buffer(2),
            *[plgpu.SMEM(SHAPE, dtype, transforms=swizzled(SIDE, dtype))] * reads,
            plgpu.Barrier(num_arrivals=tiles * len(keyed) + reads + 2, num_barriers=SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(*keyed, *[prepared.scores] * reads, prepared.values, lines, *initial)
