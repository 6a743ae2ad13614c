"""The recurrence on Hopper, backwards: a walk over the states' cotangents, then every chunk's gradients by itself.

The walk is as serial as the forward one and carries the state's cotangent in registers. It writes the cotangents of
what each token adds and of each chunk's last state. With these and what `gpu_forward.walk` returns with `save`, chunks
are independent.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked_recurrence.gpu_forward import SLOTS
from pallas_kernels.chunked_recurrence.gpu_prepare import Prepared
from pallas_kernels.chunked_recurrence.gpu_tiles import (
    SIDE,
    SINCE,
    UNTIL,
    WIDE,
    Lines,
    buffer,
    load,
    products,
    put,
    together,
    wide,
)
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.gpu_walk import plgpu, zeros

_SPARE = 4096  # bytes of shared memory for vectors, barriers and Mosaic


def shared_memory(key: int, value: int, delta: bool) -> int:
    """Return bytes of a block of `gradients`.

    Args:
      key: width of a key.
      value: width of a value.
      delta: with the delta rule.
    """
    tiles, columns = key // SIDE, value // SIDE
    return 2 * SIDE**2 * (2 * (tiles + columns + tiles * columns) + 1 + delta * (columns + 1)) + _SPARE


def walk_back(
    target: Target,
    dout: jax.Array,
    prepared: Prepared,
    lines: jax.Array,
    dlast: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return cotangents: of what each token adds, of each chunk's last state, and of the first state.

    The first two are bfloat16, (B, S, H, V) and (B, H, chunks, K, V), the third float32 (B, H, K, V).

    Args:
      target: the device to compile for.
      dout: bfloat16 (B, S, H, V), the outputs' cotangent, whole chunks.
      prepared: of `prepare`.
      lines: of `vectors`.
      dlast: float32 (B, H, K, V), the last state's cotangent.
    """
    (b, s, h, key), value, (chunks, count) = prepared.reads.shape, dout.shape[3], lines.shape[2:4]
    delta, tiles = prepared.takes is not None, key // SIDE
    keyed = [prepared.reads, prepared.writes, *[prepared.takes] * delta]

    def chunked_recurrence_back(*refs: Any) -> None:
        keyed_refs, refs = refs[: len(keyed)], refs[len(keyed) :]
        dout_ref, scores_ref, lines_ref, dlast_ref, dnew_ref, dstates_ref, dfirst_ref, *scratch = refs
        keyed_s, (dout_s, scores_s, lines_s, dstate_s, pair_s, full) = scratch[: len(keyed)], scratch[len(keyed) :]
        head, mine = lax.axis_index("head"), pl.ds(lax.axis_index("columns") * SIDE, SIDE)
        at_b, at_h = lax.div(head, h), lax.rem(head, h)
        rows = [pl.ds(i * SIDE, SIDE) for i in range(tiles)]

        def bring(n: Any) -> None:
            slot, chunk = lax.rem(n, SLOTS), chunks - 1 - n
            tokens = pl.ds(chunk * SIDE, SIDE)
            for ref, into in zip(keyed_refs, keyed_s, strict=True):
                for i, at in enumerate(rows):
                    plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, at], into.at[slot, i], full.at[slot])
            plgpu.copy_gmem_to_smem(dout_ref.at[at_b, tokens, at_h, mine], dout_s.at[slot], full.at[slot])
            for ref, into in ((scores_ref, scores_s), (lines_ref, lines_s)):
                plgpu.copy_gmem_to_smem(ref.at[at_b, at_h, chunk], into.at[slot], full.at[slot])

        def step(n: Any, dstate: tuple[Any, ...]) -> tuple[Any, ...]:
            slot, chunk = lax.rem(n, SLOTS), chunks - 1 - n
            plgpu.barrier_wait(full.at[slot])
            line = prepared.lines(lines_s.at[slot])
            queries, keys, *takes = (line.tiles(x.at[slot]) for x in keyed_s)
            dstates, (dnew_s, read_s) = line.tiles(dstate_s), line.tiles(pair_s)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the chunk before has been copied
            put(read_s, load(dout_s.at[slot]) * line.of(SINCE))
            for tile_s, x in zip(dstates, dstate, strict=True):
                put(tile_s, x)
            plgpu.commit_smem()
            later, within = together([*zip(keys, dstates, strict=True)], [(scores_s.at[slot].T, dout_s.at[slot])])
            put(dnew_s, line.of(UNTIL) * later + within)
            plgpu.commit_smem()
            for at, tile_s in zip(rows, dstates, strict=True):
                plgpu.copy_smem_to_gmem(tile_s, dstates_ref.at[at_b, at_h, chunk, at, mine])
            plgpu.copy_smem_to_gmem(dnew_s, dnew_ref.at[at_b, pl.ds(chunk * SIDE, SIDE), at_h, mine])
            more = together(
                *([(q.T, read_s), *((x[i].T, dnew_s) for x in takes)] for i, q in enumerate(queries)),
            )
            dstate = tuple(wide(line.keeps(i) * x + y) for i, (x, y) in enumerate(zip(dstate, more, strict=True)))
            plgpu.commit_smem()  # every thread has read
            pl.when(n + SLOTS < chunks)(lambda: bring(n + SLOTS))
            return dstate

        for n in range(min(SLOTS, chunks)):
            bring(n)
        dstate = tuple(
            plgpu.load(dlast_ref.at[at_b, at_h, at, mine], layout=WIDE, optimized=False) for at in rows
        )  # fmt: skip
        dstate = lax.fori_loop(0, chunks, step, dstate)
        plgpu.wait_smem_to_gmem(0)
        for at, x in zip(rows, dstate, strict=True):
            dfirst_ref[at_b, at_h, at, mine] = x

    return plgpu.kernel(
        chunked_recurrence_back,
        out_type=(
            jax.ShapeDtypeStruct((b, s, h, value), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, chunks, key, value), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, key, value), jnp.float32),
        ),
        grid=(b * h, value // SIDE),
        grid_names=("head", "columns"),
        scratch_types=[
            *[buffer(SLOTS, tiles)] * len(keyed),
            *[buffer(SLOTS)] * 2,
            plgpu.SMEM((SLOTS, count, SIDE), jnp.float32),
            buffer(tiles),
            buffer(2),
            plgpu.Barrier(num_arrivals=tiles * len(keyed) + 3, num_barriers=SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(*keyed, dout, prepared.scores, lines, dlast)


def gradients(
    target: Target,
    q: jax.Array,
    k: jax.Array,
    new: jax.Array,
    dout: jax.Array,
    states: jax.Array,
    dstates: jax.Array,
    lines: jax.Array,
    *solved: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return cotangents of q, of k and of each chunk's vectors; with the delta rule also of v.

    Those of vectors are float32 (B, H, chunks, 2, 64): of the decay's logarithm, summed since the chunk began; and
    numbers whose sum is the last token's share of it that comes from the state.

    Args:
      target: the device to compile for.
      q: bfloat16 (B, S, H, K), whole chunks.
      k: the same.
      new: bfloat16 (B, S, H, V), what each token adds beside its key: v without the delta rule.
      dout: the same, the outputs' cotangent.
      states: bfloat16 (B, H, chunks, K, V), each chunk's first state.
      dstates: the same, the cotangent of each chunk's last state.
      lines: of `vectors`.
      *solved: with the delta rule, that of `prepare`, and the cotangent of `new`, bfloat16 (B, S, H, V).
    """
    (b, _, h, key), value, (chunks, count) = q.shape, new.shape[3], lines.shape[2:4]
    tiles, columns, delta = key // SIDE, value // SIDE, bool(solved)

    def chunked_recurrence_gradients(
        q_ref: Any, k_ref: Any, new_ref: Any, dout_ref: Any, states_ref: Any, dstates_ref: Any, lines_ref: Any,
        *refs: Any,
    ) -> None:  # fmt: skip
        (*solved_ref, dq_ref, dk_ref, dlines_ref), refs = refs[: 2 * delta + 3], refs[2 * delta + 3 :]
        solved_ref, dnew_ref, dv_ref, refs = solved_ref[:1], solved_ref[1:], refs[:delta], refs[delta:]
        q_s, k_s, new_s, dout_s, state_s, dstate_s, lines_s, pair_s, dlines_s, *dv_s, full = refs
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
        at_b, at_h, tokens = lax.div(head, h), lax.rem(head, h), pl.ds(chunk * SIDE, SIDE)
        cut = [pl.ds(i * SIDE, SIDE) for i in range(max(tiles, columns))]

        rows = ((q_ref, q_s), (k_ref, k_s), (new_ref, new_s), (dout_ref, dout_s), *zip(dnew_ref, dv_s, strict=True))
        for ref, into in rows:
            for i in range(into.shape[0]):
                plgpu.copy_gmem_to_smem(ref.at[at_b, tokens, at_h, cut[i]], into.at[i], full)
        for ref, into in ((states_ref, state_s), (dstates_ref, dstate_s)):
            for i, j in itertools.product(range(tiles), range(columns)):
                plgpu.copy_gmem_to_smem(ref.at[at_b, at_h, chunk, cut[i], cut[j]], into.at[i, j], full)
        plgpu.copy_gmem_to_smem(lines_ref.at[at_b, at_h, chunk], lines_s, full)
        for ref, i in itertools.product(solved_ref, range(2)):
            plgpu.copy_gmem_to_smem(ref.at[at_b, at_h, chunk, i], pair_s.at[i], full)
        plgpu.barrier_wait(full)

        line = Lines(lines_s)
        keeps = line.keeps()

        def through(i: Any, _: None) -> None:
            """Turn the cotangent of what tokens add into that of v."""
            dv = products(*((x.T, dv_s[0].at[i]) for x in line.tiles(pair_s)))
            plgpu.commit_smem()  # every thread has read
            put(dv_s[0].at[i], dv)

        if delta:
            lax.fori_loop(0, columns, through, None)
            plgpu.commit_smem()
        for i, cotangent_s in enumerate((dout_s, *dv_s)):
            scores = products(*((cotangent_s.at[j], new_s.at[j].T) for j in range(columns))) * line.decays()
            if i:  # of the delta rule's system, below the diagonal
                row, column = line.places()
                scores = jnp.where(column < row, -scores, 0.0)
            put(pair_s.at[i], scores)
        plgpu.commit_smem()

        def keyed(i: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
            total, last = sums
            q_i, k_i, states = q_s.at[i], k_s.at[i], [state_s.at[i, j].T for j in range(columns)]
            scores, *system = line.tiles(pair_s)
            dq = line.of(SINCE) * products(*zip(line.tiles(dout_s), states, strict=True)) + products((scores, k_i))
            total = total + (load(q_i) * dq).sum(1)
            away = line.of(UNTIL) * products(*((x, dstate_s.at[i, j].T) for j, x in enumerate(line.tiles(new_s))))
            last = last + (load(k_i) * away).sum(1)
            # a loop, since the compiler would load every column's tiles at once, and registers would spill
            carried = lambda j, x: x + (load(state_s.at[i, j]) * load(dstate_s.at[i, j])).sum(1) * keeps  # noqa: E731
            last = lax.fori_loop(0, columns, carried, last)
            away = away + products((scores.T, q_i), *((x.T, k_i) for x in system))
            total = total - (load(k_i) * away).sum(1)
            if delta:
                near = products((system[0], k_i))
                near = near - line.of(SINCE) * products(*zip(line.tiles(dv_s[0]), states, strict=True))
                total = total + (load(k_i) * near).sum(1)
                away = away + near
            plgpu.commit_smem()  # every thread has read
            put(q_i, dq)
            put(k_i, away)
            return total, last

        nothing = zeros((SIDE,), WIDE.reduce(1))
        total, last = lax.fori_loop(0, tiles, keyed, (nothing, nothing))
        dlines_s[0], dlines_s[1] = total, last
        plgpu.commit_smem()
        for i in range(tiles):
            plgpu.copy_smem_to_gmem(q_s.at[i], dq_ref.at[at_b, tokens, at_h, cut[i]])
            plgpu.copy_smem_to_gmem(k_s.at[i], dk_ref.at[at_b, tokens, at_h, cut[i]])
        for (ref, from_s), i in itertools.product(zip(dv_ref, dv_s, strict=True), range(columns)):
            plgpu.copy_smem_to_gmem(from_s.at[i], ref.at[at_b, tokens, at_h, cut[i]])
        plgpu.copy_smem_to_gmem(dlines_s, dlines_ref.at[at_b, at_h, chunk])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        chunked_recurrence_gradients,
        out_type=(
            *[jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)] * 2,
            jax.ShapeDtypeStruct((b, h, chunks, 2, SIDE), jnp.float32),
            *[jax.ShapeDtypeStruct(new.shape, jnp.bfloat16)] * delta,
        ),
        grid=(b * h, chunks),
        grid_names=("head", "chunk"),
        scratch_types=[
            *[buffer(tiles)] * 2,
            *[buffer(columns)] * 2,
            *[buffer(tiles, columns)] * 2,
            plgpu.SMEM((count, SIDE), jnp.float32),
            buffer(1 + delta),
            plgpu.SMEM((2, SIDE), jnp.float32),
            *[buffer(columns)] * delta,
            plgpu.Barrier(num_arrivals=2 * (tiles + columns + tiles * columns) + 1 + delta * (columns + 2)),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(q, k, new, dout, states, dstates, lines, *solved)
