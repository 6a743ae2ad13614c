"""Rows too long for shared memory on Hopper: a block streams its row twice, the second time backwards.

The second pass begins where the first ended, so that what the L2 cache (50 MB, shared by 132 rows in flight) still has
is not read from memory again: with 131072 bfloat16 columns it still has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.dispatch import Target
from pallas_kernels.softmax import gpu_rows
from pallas_kernels.softmax.gpu_rows import PIECE, Block, Cut, plgpu
from pallas_kernels.softmax.gpu_sweeps import SWEEPS, Scalars, Tiles


def rows_twice(target: Target, op: str, arrays: Sequence[jax.Array], *, warpgroups: int) -> jax.Array:
    """Run the sweep of an op over the rows of matrices (R, C) of one dtype, which is also the output's.

    Args:
      target: the device to compile for.
      op: a key of `SWEEPS`.
      arrays: the inputs, all of one shape and dtype; C a multiple of 128.
      warpgroups: number that share a row.
    """
    (rows, columns), dtype, inputs = arrays[0].shape, arrays[0].dtype, len(arrays)
    cut = Cut(columns, dtype.itemsize, warpgroups)
    slots = max(2, (SHARED_MEMORY - gpu_rows.RESERVED) // (PIECE * inputs * warpgroups))
    blocks = min(rows, target.cores)
    sweep = SWEEPS[op]
    shape = (rows, cut.total, cut.width)

    def kernel(*refs: Any) -> None:
        sources, out, stores = refs[:inputs], refs[inputs], refs[inputs + 1 : 2 * inputs + 1]
        _Block(rows, blocks, slots, cut, sweep, sources, out, stores, *refs[2 * inputs + 1 :]).run()

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[
            *[plgpu.SMEM((slots * warpgroups, cut.lines, cut.width), dtype)] * inputs,
            plgpu.SMEM((2, warpgroups, len(sweep.begin)), jnp.float32),
            plgpu.Barrier(num_arrivals=inputs, num_barriers=slots * warpgroups),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(*[a.reshape(shape) for a in arrays])
    return out.reshape(rows, columns)


class _Block(Block):
    """The kernel: a warpgroup walks over its pieces of each row forwards, then backwards; step u has slot u % slots."""

    def __init__(self, rows: int, blocks: int, slots: int, cut: Cut, *refs: Any):
        super().__init__(cut, rows, blocks, *refs)
        self.slots = slots

    def run(self) -> None:
        each = self.cut.each

        @pl.loop(0, self.slots)
        def _(u: Any) -> None:
            self._fetch_step(u)

        @pl.loop(0, self.mine)
        def _(i: Any) -> None:
            whole = self.merge(i, self._forwards(i))

            @pl.loop(0, each)
            def _(t: Any) -> None:
                u = (2 * i + 1) * each + t
                self._backwards(u, whole)

                @pl.when(t > 0)  # one store behind, so as not to wait for a store that has just begun
                def _() -> None:
                    plgpu.wait_smem_to_gmem(self.behind, wait_read_only=True)
                    self._fetch_step(u - 1 + self.slots)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._fetch_step(2 * (i + 1) * each - 1 + self.slots)

        plgpu.wait_smem_to_gmem(0)

    def _forwards(self, i: Any) -> Tiles:
        def step(j: Any, state: Tiles) -> Tiles:
            u = 2 * i * self.cut.each + j
            self.await_piece(j, self._slot(u))
            state = self.sweep.gather(state, self.cut.tiles(self.at(self._slot(u))))
            plgpu.commit_smem()  # all threads have read before the slot is filled again
            self._fetch_step(u + self.slots)
            return state

        return lax.fori_loop(0, self.cut.each, step, self.begin())

    def _backwards(self, u: Any, whole: Scalars) -> None:
        i, j = self._piece(u)
        self.await_piece(j, self._slot(u))
        self.write(i, j, self._slot(u), whole)

    def _fetch_step(self, u: Any) -> None:
        i, j = self._piece(u)
        slot = self._slot(u)

        @pl.when(i < self.mine)
        def _() -> None:
            self.pad(j, slot)
            self.fetch(i, j, slot)

    def _piece(self, u: Any) -> tuple[Any, Any]:
        """Return the row of the block and its piece that a step handles."""
        each = self.cut.each
        t = lax.rem(u, 2 * each)
        return lax.div(u, 2 * each), lax.min(t, 2 * each - 1 - t)

    def _slot(self, u: Any) -> Any:
        return self.wg * self.slots + lax.rem(u, self.slots)
