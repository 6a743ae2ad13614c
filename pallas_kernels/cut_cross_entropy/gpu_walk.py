"""What the loss's two Hopper kernels share: tiles of tokens by words, and the products of their vectors by wgmma.

A persistent block has two warpgroups that multiply, each 64 tokens by `words` words, and one that copies both operands
by TMA, 64 elements of each vector at a time. Items are ordered so that blocks that run at the same time share tokens
and words in the L2 cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.dispatch import JAX_VERSION, Target

plgpu: Any = mosaic_gpu  # its names differ between versions

ROWS = 64
"""Tokens of a warpgroup: the rows of one wgmma."""
WARPGROUPS = 2
"""Warpgroups that multiply; one more copies memory."""
CHUNK = 64
"""Elements of a vector that one copy moves: 128 bytes, the widest swizzle."""
LOG2E = 1.4426950408889634
_TOGETHER = 16  # tiles of tokens side by side: they and their words fit in the L2 cache


@dataclasses.dataclass(frozen=True)
class Walk:
    """How blocks walk through tiles of tokens by groups of words.

    Args:
      target: the device to compile for.
      tokens: a multiple of `ROWS * WARPGROUPS`.
      vocabulary: number of words.
      chunks: of a vector.
      words: words of a tile.
      slots: chunks of both operands in flight at a time.
      groups: groups of words; an item is a tile of tokens and a group.
      ve: whether w is (V, E).
    """

    target: Target
    tokens: int
    vocabulary: int
    chunks: int
    words: int
    slots: int
    groups: int
    ve: bool

    @property
    def blocks(self) -> int:
        """Number of blocks, one for each multiprocessor at most."""
        return min(self.target.cores, self.tokens // (ROWS * WARPGROUPS) * self.groups)

    def each(self, body: Callable[[Any, Any, Any], Any], start: Any) -> Any:
        """Call `body(tile of tokens, group, carry)` for each of this block's items, and return the last carry."""
        tiles = self.tokens // (ROWS * WARPGROUPS)
        together = max(m for m in range(1, _TOGETHER + 1) if tiles % m == 0)
        block, items, blocks = lax.axis_index("block"), tiles * self.groups, self.blocks

        def step(k: Any, carry: Any) -> Any:
            item = block + k * blocks
            of_side, inner = lax.div(item, together * self.groups), lax.rem(item, together * self.groups)
            group = lax.div(inner, together)
            return body(of_side * together + lax.rem(inner, together), group, carry)

        return lax.fori_loop(0, lax.div(items - 1 - block, blocks) + 1, step, start)

    def start_of(self, j: Any) -> Any:
        """Return a tile's first word. The last tile begins earlier, and skips words of the tile before."""
        return lax.min(j * self.words, self.vocabulary - self.words)

    def multiply(self, done: Any, wg: Any, x_s: Any, w_s: Any, full: Any, free: Any) -> Any:
        """Return the products of a tile, float32 (ROWS, words); `done` chunks went before."""

        def run(acc: Any) -> Any:
            def chunk(c: Any, _: None) -> None:
                slot = lax.rem(done + c, self.slots)
                plgpu.barrier_wait(full.at[slot])
                side = w_s.at[slot].T if self.ve else w_s.at[slot]
                plgpu.wgmma(acc, x_s.at[slot, wg], side)
                plgpu.wgmma_wait(1)

                before = lax.rem(done + c - 1, self.slots)
                pl.when(c > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

            lax.fori_loop(0, self.chunks, chunk, None)
            result = acc[...]
            plgpu.barrier_arrive(free.at[lax.rem(done + self.chunks - 1, self.slots)])
            return result

        return pl.run_scoped(run, plgpu.ACC((ROWS, self.words), jnp.float32))

    def bring(self, i: Any, first: Any, count: Any, done: Any, refs: tuple[Any, ...], full: Any, free: Any) -> Any:
        """Copy the operands of `count` tiles of words from the tile `first` on, and return the chunks done then."""
        x_ref, w_ref, x_s, w_s = refs

        def copy(k: Any, _: None) -> None:
            j, c = lax.div(k, self.chunks), lax.rem(k, self.chunks)
            slot, piece = lax.rem(done + k, self.slots), pl.ds(c * CHUNK, CHUNK)
            these = pl.ds(self.start_of(first + j), self.words)
            pl.when(done + k >= self.slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            for half in range(WARPGROUPS):
                at = pl.ds((i * WARPGROUPS + half) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(x_ref.at[at, piece], x_s.at[slot, half], full.at[slot])
            source = w_ref.at[these, piece] if self.ve else w_ref.at[piece, these]
            plgpu.copy_gmem_to_smem(source, w_s.at[slot], full.at[slot])

        steps = count * self.chunks
        lax.fori_loop(0, steps, copy, None)
        return done + steps

    def drain(self, free: Any, done: Any) -> None:
        """Wait until both warpgroups have multiplied the last of `done` chunks."""

        def wait(k: Any, _: None) -> None:
            plgpu.barrier_wait(free.at[lax.rem(k, self.slots)])

        lax.fori_loop(lax.max(done - self.slots, 0), done, wait, None)

    def roles(self, multiply: Callable[[Any], None], bring: Callable[[], None]) -> None:
        """Run `multiply(warpgroup)` in the warpgroups that multiply, and `bring` in the one that copies memory."""
        wg = lax.axis_index("wg")

        @pl.when(wg < WARPGROUPS)
        def _() -> None:
            if not self.target.interpret:
                plgpu.set_max_registers(240, action="increase")
            multiply(wg)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == WARPGROUPS)
        def _() -> None:
            if not self.target.interpret:
                plgpu.set_max_registers(24, action="decrease")
            bring()

    def kernel(self, body: Callable[..., None], out: Any, dtype: Any, exps: int, *scratch: Any) -> Any:
        """Return the kernel, of a body whose last arguments are slots of x and w, `scratch`, and two barriers.

        Args:
          body: of the kernel.
          out: its output's shape and dtype.
          dtype: of x and w.
          exps: exponentials and reciprocals for each logit.
          *scratch: further shared memory.
        """
        return plgpu.kernel(
            body,
            out_type=out,
            grid=(self.blocks,),
            grid_names=("block",),
            num_threads=WARPGROUPS + 1,
            thread_name="wg",
            scratch_types=[
                swizzled(dtype, self.slots, WARPGROUPS, ROWS, CHUNK),
                swizzled(dtype, self.slots, *((self.words, CHUNK) if self.ve else (CHUNK, self.words))),
                *scratch,
                plgpu.Barrier(num_arrivals=1 + WARPGROUPS, num_barriers=self.slots),
                plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.slots),
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            **({"cost_estimate": self._cost(out, dtype, exps)} if JAX_VERSION >= (0, 12) else {}),  # new in 0.12
            **self.target.gpu(),
        )

    def _cost(self, out: Any, dtype: Any, exps: int) -> Any:
        pairs, width = self.tokens * self.vocabulary, self.chunks * CHUNK
        moved = (self.tokens + self.vocabulary) * width * jnp.dtype(dtype).itemsize
        return pl.CostEstimate(
            flops=2 * pairs * width,
            transcendentals=exps * pairs,
            bytes_accessed=moved + math.prod(out.shape) * out.dtype.itemsize,
        )


def swizzled(dtype: Any, *shape: int, width: int = CHUNK) -> Any:
    """Return shared memory that TMA writes or reads, and wgmma reads, without bank conflicts; 16-bit.

    Args:
      dtype: bfloat16 or float16.
      *shape: the last dimension a multiple of `width`.
      width: elements of a row of the swizzle, 64 or 32.
    """
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))
