"""Rows that fit in the shared memory of a Hopper multiprocessor: each is read once and written once.

A row is cut into pieces of 8 KiB, distributed to the warpgroups of a block. Each warpgroup fetches, reads, overwrites
and stores its own pieces and synchronises with the others once per row, to merge. A piece's slot is refilled from a
later row of the block as soon as its result has left. Several short rows are in flight at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.dispatch import Target
from pallas_kernels.softmax.gpu_sweeps import SWEEPS, Scalars, Sweep, Tiles

plgpu: Any = mosaic_gpu  # its names differ between versions

PIECE = 8192
"""Bytes of a row that one TMA copy moves; half as many where several warpgroups would not fit otherwise."""

_VECTOR = 16  # bytes a thread reads at once
RESERVED = 11264  # bytes of shared memory for merging, barriers and what Mosaic takes for its own reductions
_PER_SM = 233472  # bytes of shared memory of a multiprocessor
_REGISTERS = 80  # per thread, rounded up from ptxas' report; limits the blocks per multiprocessor
_DEPTH = 4  # most rows of a block in flight at a time
_BARRIERS = 32  # most that Mosaic makes in a group; each slot has one


def most_columns(dtype: str, inputs: int) -> int:
    """Return the longest row of which all inputs fit in a block's shared memory."""
    pieces = (SHARED_MEMORY - RESERVED) // PIECE // inputs
    return pieces * (PIECE // jnp.dtype(dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A row of C elements as (C / width, width) lines, in pieces of `lines` lines, in tiles of `tile` lines.

    Args:
      columns: elements of the row.
      itemsize: bytes of an element.
      warpgroups: number that share the row.
      piece: bytes of a piece, at most.
    """

    columns: int
    itemsize: int
    warpgroups: int
    piece: int = PIECE

    @property
    def width(self) -> int:
        """Elements of a line."""
        return 256 if self.columns % 256 == 0 else 128

    @property
    def vector(self) -> int:
        """Elements that a thread reads at once."""
        return _VECTOR // self.itemsize

    @property
    def tile(self) -> int:
        """Lines of a tile, of which each of 128 threads has one vector."""
        return 128 * self.vector // self.width

    @property
    def lines(self) -> int:
        """Lines of a piece."""
        whole = -(-self.total // self.tile) * self.tile
        return min(self.piece // self.itemsize // self.width, whole)

    @property
    def total(self) -> int:
        """Lines of the row."""
        return self.columns // self.width

    @property
    def pieces(self) -> int:
        """Pieces of the row."""
        return -(-self.total // self.lines)

    @property
    def rest(self) -> int:
        """Lines of the last piece when it is not whole, else 0."""
        return self.total % self.lines

    @property
    def each(self) -> int:
        """Pieces of a warpgroup, some of which may be beyond the row."""
        return -(-self.pieces // self.warpgroups)

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that a row of one input takes."""
        return self.each * self.warpgroups * self.lines * self.width * self.itemsize

    def layout(self, lines: int) -> Any:
        """Layout of registers that hold so many lines."""
        return plgpu.Layout.WG_STRIDED((lines, self.width), vec_size=self.vector)

    def tiles(self, slots: Sequence[Any]) -> list[Tiles]:
        """Read a piece of every input as a batch of float32 tiles."""
        return [self.read(slots, line, self.tile) for line in range(0, self.lines, self.tile)]

    def read(self, slots: Sequence[Any], line: int, lines: int) -> Tiles:
        """Read lines of every input into registers, as float32."""
        at, layout = pl.ds(line, lines), self.layout(lines)
        return tuple(plgpu.load(s.at[at], layout=layout).astype(jnp.float32) for s in slots)

    def splat(self, value: float, lines: int | None = None, dtype: Any = jnp.float32) -> Any:
        """Return registers for a tile, or so many lines, that all hold one number."""
        lines = self.tile if lines is None else lines
        vector = math.gcd(self.vector, lines * self.width // 128)  # jax 0.11.2 would choose one that does not divide
        layout = plgpu.Layout.WG_STRIDED((lines, self.width), vec_size=vector)
        return plgpu.layout_cast(jnp.full((lines, self.width), value, dtype), layout)


def cut_for(columns: int, dtype: Any, inputs: int, warpgroups: int) -> Cut:
    """Return how to cut a row, among at most `warpgroups`: as many as fit without leaving many slots empty."""
    size = jnp.dtype(dtype).itemsize
    cuts = [Cut(columns, size, n, piece) for n in range(warpgroups, 0, -1) for piece in (PIECE, PIECE // 2)]
    fits = [c for c in cuts if c.bytes * inputs <= SHARED_MEMORY - RESERVED and c.each * c.warpgroups <= _BARRIERS]
    return min(fits, key=lambda c: (c.each * c.warpgroups > c.pieces + c.pieces // 4, -c.warpgroups, -c.piece))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are distributed over the GPU.

    Args:
      rows: number of rows.
      cut: how a row is cut.
      inputs: number of arrays that a row is read from.
      cores: the GPU's multiprocessors.
    """

    rows: int
    cut: Cut
    inputs: int
    cores: int

    @property
    def row_bytes(self) -> int:
        """Bytes of shared memory that a row takes."""
        return self.cut.bytes * self.inputs

    @property
    def resident(self) -> int:
        """Blocks that fit on a multiprocessor at a time."""
        registers = _REGISTERS if self.cut.lines > self.cut.tile else _REGISTERS * 3 // 4
        return max(1, min(_PER_SM // (self.row_bytes + RESERVED), 65536 // (registers * 128 * self.cut.warpgroups)))

    @property
    def blocks(self) -> int:
        """Blocks of the grid; block i takes rows i, i + blocks, ..."""
        return min(self.rows, self.cores * self.resident)

    @property
    def depth(self) -> int:
        """Rows of a block in shared memory at a time."""
        capacity = min(SHARED_MEMORY, _PER_SM // self.resident) - RESERVED
        most = min(_DEPTH, capacity // self.row_bytes, _BARRIERS // self.per_row)
        return max(1, min(most, -(-self.rows // self.blocks)))

    @property
    def per_row(self) -> int:
        """Slots for a row's pieces."""
        return self.cut.each * self.cut.warpgroups


def take_turns(wg: Any, warpgroups: int, barrier: Any, reduce: Callable[[], None]) -> None:
    """Let one warpgroup after the other call `reduce`, which may reduce tiles to scalars, and wait for all.

    Mosaic GPU reduces to a scalar through shared memory, in the same bytes for all warpgroups of a block (jax 0.11 and
    0.12): at the same time they would read each other's parts, as measured on an H200.

    Args:
      wg: index of the warpgroup.
      warpgroups: of the block.
      barrier: a barrier of so many arrivals.
      reduce: its writes to shared memory are visible to all warpgroups afterwards.
    """
    for w in range(warpgroups):

        @pl.when(wg == w)
        def _() -> None:
            reduce()
            plgpu.commit_smem()  # one thread arrives for all of a warpgroup

        if warpgroups > 1:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)


def rows_once(target: Target, op: str, arrays: Sequence[jax.Array], *, warpgroups: int) -> jax.Array:
    """Run the sweep of an op over the rows of matrices (R, C) of one dtype, which is also the output's.

    Args:
      target: the device to compile for.
      op: a key of `SWEEPS`.
      arrays: the inputs, all of one shape and dtype; C a multiple of 128, at most `most_columns`.
      warpgroups: most warpgroups that share a row.
    """
    (rows, columns), dtype, inputs = arrays[0].shape, arrays[0].dtype, len(arrays)
    cut = cut_for(columns, dtype, inputs, warpgroups)
    plan = Plan(rows, cut, inputs, target.cores)
    slots = plan.depth * plan.per_row
    sweep = SWEEPS[op]
    shape = (rows, cut.total, cut.width)

    def kernel(*refs: Any) -> None:
        sources, out, stores = refs[:inputs], refs[inputs], refs[inputs + 1 : 2 * inputs + 1]
        _Once(plan, sweep, sources, out, stores, *refs[2 * inputs + 1 :]).run()

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=cut.warpgroups,
        thread_name="wg",
        scratch_types=[
            *[plgpu.SMEM((slots, cut.lines, cut.width), dtype)] * inputs,
            plgpu.SMEM((2, cut.warpgroups, len(sweep.begin)), jnp.float32),
            plgpu.Barrier(num_arrivals=inputs, num_barriers=slots),
            plgpu.Barrier(num_arrivals=cut.warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **target.gpu(),
    )(*[a.reshape(shape) for a in arrays])
    return out.reshape(rows, columns)


class Block:
    """Operations of a warpgroup on its pieces of the block's rows; the i-th of these is row block + i * blocks.

    Args:
      cut: how a row is cut.
      rows: rows of the array.
      blocks: blocks of the grid.
      sweep: the op's two passes.
      sources: the inputs, in lines, in global memory.
      out: the output, in lines, in global memory.
      stores: slots for pieces in shared memory, for each input.
      exchange: shared memory where warpgroups leave their scalars.
      arrived: a barrier for each slot.
      merged: the barrier where warpgroups synchronise.
    """

    def __init__(
        self,
        cut: Cut,
        rows: int,
        blocks: int,
        sweep: Sweep,
        sources: Sequence[Any],
        out: Any,
        stores: Sequence[Any],
        exchange: Any,
        arrived: Any,
        merged: Any,
    ):
        self.cut, self.rows, self.blocks, self.sweep = cut, rows, blocks, sweep
        self.sources, self.out, self.stores = sources, out, stores
        self.exchange, self.arrived, self.merged = exchange, arrived, merged
        self.first, self.wg = lax.axis_index("block"), lax.axis_index("wg")
        # A warpgroup that may lack a piece cannot count its stores, and waits for all.
        self.behind = 0 if cut.pieces % cut.warpgroups else 1
        self.mine = lax.div(rows - self.first + blocks - 1, blocks)

    def begin(self) -> Tiles:
        """Return the initial state of the first pass."""
        return tuple(self.cut.splat(b) for b in self.sweep.begin)

    def merge(self, i: Any, state: Tiles) -> Scalars:
        """Return the row's scalars, from the states of all warpgroups."""
        n, count = self.cut.warpgroups, len(self.sweep.begin)
        if n == 1:
            return self.sweep.merge([self.sweep.fold(state)])
        half = lax.rem(i, 2)  # a warpgroup may be one row ahead of another, never two

        def leave() -> None:
            for k, value in enumerate(self.sweep.fold(state)):
                self.exchange[half, self.wg, k] = value

        take_turns(self.wg, n, self.merged, leave)
        return self.sweep.merge([tuple(self.exchange[half, w, k] for k in range(count)) for w in range(n)])

    def write(self, i: Any, j: Any, slot: Any, whole: Scalars) -> None:
        """Replace a piece by its result, in place, and store it to global memory."""
        row, slots = self.first + i * self.blocks, self.at(slot)
        # In one write: Mosaic puts a barrier before and after each.
        slots[0][...] = self.sweep.result(whole, self.cut.read(slots, 0, self.cut.lines)).astype(slots[0].dtype)
        plgpu.commit_smem()

        def store(line: Any, count: int) -> None:
            plgpu.copy_smem_to_gmem(slots[0].at[pl.ds(0, count)], self.out.at[row, pl.ds(line, count)])

        self.if_any(j, store)

    def fetch(self, i: Any, j: Any, slot: Any) -> None:
        """Start copying piece j of the i-th row to a slot."""
        row = self.first + i * self.blocks

        def bring(line: Any, count: int) -> None:
            for source, store in zip(self.sources, self.stores, strict=True):
                lines = source.at[row, pl.ds(line, count)]
                plgpu.copy_gmem_to_smem(lines, store.at[slot, pl.ds(0, count)], self.arrived.at[slot])

        self.if_any(j, bring)

    def await_piece(self, j: Any, slot: Any) -> None:
        """Wait until piece j has arrived in its slot."""
        self.if_any(j, lambda line, count: plgpu.barrier_wait(self.arrived.at[slot]))

    def pad(self, j: Any, slot: Any) -> None:
        """Fill a slot beyond the row's end with the neutral elements of the first pass."""
        piece, cut = j * self.cut.warpgroups + self.wg, self.cut

        def fill(start: int) -> None:
            for store, value in zip(self.at(slot), self.sweep.pads, strict=True):
                store[pl.ds(start, cut.lines - start)] = cut.splat(value, cut.lines - start, store.dtype)

        if cut.rest:
            pl.when(piece == cut.pieces - 1)(lambda: fill(cut.rest))
        if cut.pieces % cut.warpgroups:
            pl.when(piece >= cut.pieces)(lambda: fill(0))

    def if_any(self, j: Any, do: Callable[[Any, int], None]) -> None:
        """Call `do(first line, number of lines)` for this warpgroup's piece j, if it exists."""
        piece, cut = j * self.cut.warpgroups + self.wg, self.cut
        pl.when(piece < cut.pieces - bool(cut.rest))(lambda: do(piece * cut.lines, cut.lines))
        if cut.rest:
            pl.when(piece == cut.pieces - 1)(lambda: do(piece * cut.lines, cut.rest))

    def at(self, slot: Any) -> list[Any]:
        """Return a slot of every input."""
        return [store.at[slot] for store in self.stores]


class _Once(Block):
    """The kernel; all pieces of row i are in the slots of i % depth."""

    def __init__(self, plan: Plan, *refs: Any):
        super().__init__(plan.cut, plan.rows, plan.blocks, *refs)
        self.plan = plan

    def run(self) -> None:
        each = self.cut.each

        @pl.loop(0, self.plan.depth)
        def _(i: Any) -> None:
            @pl.loop(0, each)
            def _(j: Any) -> None:
                self._fill(i, j)

        @pl.loop(0, self.mine)
        def _(i: Any) -> None:
            whole = self.merge(i, self._first_pass(i))

            @pl.loop(0, each)
            def _(j: Any) -> None:
                self.write(i, j, self._slot(i, j), whole)

                @pl.when(j > 0)  # one store behind, so as not to wait for a store that has just begun
                def _() -> None:
                    plgpu.wait_smem_to_gmem(self.behind, wait_read_only=True)
                    self._fill(i + self.plan.depth, j - 1)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._fill(i + self.plan.depth, each - 1)

        plgpu.wait_smem_to_gmem(0)

    def _first_pass(self, i: Any) -> Tiles:
        def step(j: Any, state: Tiles) -> Tiles:
            self.await_piece(j, self._slot(i, j))
            return self.sweep.gather(state, self.cut.tiles(self.at(self._slot(i, j))))

        return lax.fori_loop(0, self.cut.each, step, self.begin())

    def _fill(self, i: Any, j: Any) -> None:
        slot = self._slot(i, j)

        @pl.when(i < self.mine)
        def _() -> None:
            self.pad(j, slot)
            self.fetch(i, j, slot)

    def _slot(self, i: Any, j: Any) -> Any:
        """Return the slot of this warpgroup's piece j of the i-th row."""
        return lax.rem(i, self.plan.depth) * self.plan.per_row + self.wg * self.cut.each + j
