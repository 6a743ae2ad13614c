"""The sums of rows of any length on Hopper, streamed through shared memory once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import Target
from pallas_kernels.softmax.gpu_rows import Cut, plgpu, take_turns
from pallas_kernels.softmax.gpu_sweeps import Tiles, fold_sum, gather_sum
from pallas_kernels.softmax.pairs import LOWEST


def row_sums(target: Target, x: jax.Array, *, warpgroups: int, slots: int, splits: int) -> tuple[jax.Array, jax.Array]:
    """Return scales and sums of (R, C), float32 (R,) each: the sum of exp(x) over a row is sum * exp(scale).

    Args:
      target: the device to compile for.
      x: (R, C), with C as `supported_sums` requires.
      warpgroups: warpgroups of a block, each of which streams pieces of its own.
      slots: pieces of a warpgroup in flight at a time.
      splits: blocks that share a row.
    """
    rows, columns = x.shape
    cut = Cut(columns, x.dtype.itemsize, warpgroups * splits)
    slots = min(slots, cut.each)

    def kernel(source: Any, scales: Any, sums: Any, store: Any, arrived: Any, reduced: Any) -> None:
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        me = lax.axis_index("split") * warpgroups + wg

        def fetch(j: Any) -> None:
            """Copy this warpgroup's piece j to its slot, with minus infinity beyond the row's end."""
            slot, piece = wg * slots + lax.rem(j, slots), j * cut.warpgroups + me

            def bring(count: int) -> None:
                into = store.at[slot] if count == cut.lines else store.at[slot, pl.ds(0, count)]
                plgpu.copy_gmem_to_smem(source.at[row, pl.ds(piece * cut.lines, count)], into, arrived.at[slot])

            def fill(start: int) -> None:
                store[slot, pl.ds(start, cut.lines - start)] = cut.splat(-jnp.inf, cut.lines - start, x.dtype)

            pl.when(piece < (cut.pieces - 1 if cut.rest else cut.pieces))(lambda: bring(cut.lines))
            if cut.rest:

                @pl.when(piece == cut.pieces - 1)
                def _() -> None:
                    bring(cut.rest)
                    fill(cut.rest)

            pl.when((piece >= cut.pieces) & (j < cut.each))(lambda: fill(0))

        @pl.loop(0, slots)
        def _(j: Any) -> None:
            fetch(j)

        def step(j: Any, state: Tiles) -> Tiles:
            slot = wg * slots + lax.rem(j, slots)

            @pl.when(j * cut.warpgroups + me < cut.pieces)
            def _() -> None:
                plgpu.barrier_wait(arrived.at[slot])

            state = gather_sum(state, cut.tiles([store.at[slot]]))
            plgpu.commit_smem()  # all threads have read before the slot is written again

            @pl.when(j + slots < cut.each)
            def _() -> None:
                fetch(j + slots)

            return state

        state = lax.fori_loop(0, cut.each, step, (cut.splat(LOWEST), cut.splat(0.0)))

        def leave() -> None:
            scale, total = fold_sum(state)
            scales[row, me] = jnp.full((128,), scale, jnp.float32)
            sums[row, me] = jnp.full((128,), total, jnp.float32)

        take_turns(wg, warpgroups, reduced, leave)

    part = jax.ShapeDtypeStruct((rows, cut.warpgroups, 128), jnp.float32)
    scales, sums = plgpu.kernel(
        kernel,
        out_type=(part, part),
        grid=(rows, splits),
        grid_names=("row", "split"),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((warpgroups * slots, cut.lines, cut.width), x.dtype),
            plgpu.Barrier(num_barriers=warpgroups * slots),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(x.reshape(rows, cut.total, cut.width))
    scales, sums = scales[..., 0], sums[..., 0]
    top = jnp.max(scales, axis=1)
    return top, jnp.sum(sums * jnp.exp(scales - top[:, None]), axis=1)
