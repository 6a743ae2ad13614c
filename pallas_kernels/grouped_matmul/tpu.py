"""The grouped products on TPUs: a grid over steps, each one group's share of a tile of rows.

Which group and which tile a step has is computed on the device from the sizes, before the kernel, and given to it in
SMEM; the number of steps is part of the grid, so that empty groups take no step. Of a tile that several groups share,
only parts of `PART` rows are multiplied, from the group's first row on, rounded down to a register of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul import examples
from pallas_kernels.grouped_matmul.inputs import Facts
from pallas_kernels.tiles import lookup

__all__ = [
    "DTYPES",
    "LANES",
    "PART",
    "STRIP",
    "VMEM",
    "Steps",
    "configurations",
    "dot",
    "each_part",
    "inside",
    "matmul_step",
    "multiplied_rows",
    "part_of",
    "run",
    "steps_of",
    "supported",
    "tile_of",
]

LANES = 128
PART = 128
"""Rows of a tile that are multiplied together where several groups share the tile."""
STRIP = 16
"""Rows of a register of bfloat16: where parts may start."""
DTYPES = ("float32", "bfloat16")
OUTPUTS = ("float32", "bfloat16")
VMEM = 56 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""

Tile = tuple[int, int, int]
"""Rows, columns of k, columns of n."""


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if facts.dtype not in DTYPES or facts.right not in DTYPES:
        return f"TPUs compute in {' and '.join(DTYPES)}, and {facts.dtype} is left to XLA"
    if facts.out not in OUTPUTS:
        return f"the output is {' or '.join(OUTPUTS)}, not {facts.out}"
    if not min(facts.m, facts.k, facts.n, facts.groups):
        return "an operand is empty"
    if (needed := _vmem(facts, tile := tile_of(target, facts))) > VMEM:
        return f"a tile of {' x '.join(map(str, tile))} takes {needed} bytes of VMEM, over {VMEM}"
    return None


def tile_of(target: Target, facts: Facts) -> Tile:
    """Return the tile of a case, as near to the table's as its shapes allow.

    Args:
      target: the device.
      facts: of the product.
    """
    want = lookup("grouped_matmul", target.kind or "TPU", product=facts.product, dtype=facts.dtype)
    rows = facts.m if facts.m <= want["rows"] else want["rows"]
    n = min(facts.n, want["n"])
    if facts.product == "outer":
        return rows, min(facts.k, want["k"]), n
    # a matmul sums over k, so its tiles divide it: with one tile, a group's matrix is read once
    whole = LANES * (facts.k // LANES)
    fits = [d for d in range(LANES, min(want["k"], whole) + 1, LANES) if facts.k % d == 0]
    tile = (rows, facts.k, n)
    return tile if _vmem(facts, tile) <= VMEM or not fits else (rows, fits[-1], n)


def _vmem(facts: Facts, tile: Tile) -> int:
    rows, k, n = tile
    item, out = (4 if d == "float32" else 2 for d in (facts.dtype, facts.out))
    if facts.product == "outer":
        return 2 * rows * (k + n) * item + k * n * (8 + 2 * out)
    return 2 * (rows + n) * k * item + rows * n * (8 + 2 * out)


class Steps(NamedTuple):
    """What each step of the grid does, int32.

    Args:
      group: (steps,) its group; for the rows after the last group, the number of groups.
      tile: (steps,) its tile of rows.
      read: (steps,) the tile of rows that it reads: of a step that reads none, that of the step before.
      starts: (groups + 2,) the first row of each group, of the rows after them, and m.
      steps: () the steps that there are; the others are after them.
    """

    group: jax.Array
    tile: jax.Array
    read: jax.Array
    starts: jax.Array
    steps: jax.Array


def steps_of(sizes: jax.Array, m: int, rows: int, *, outer: bool) -> Steps:
    """Return the steps of a product.

    Args:
      sizes: rows of each group, int32.
      m: all rows.
      rows: rows of a tile.
      outer: a step for each empty group, to write zeros, and none for the rows after the last group; else a step for
        each tile of those rows, to write zeros, and none for empty groups.
    """
    groups, tiles = len(sizes), pl.cdiv(m, rows)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), m)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends, jnp.full(1, m, jnp.int32)])
    begin, end = starts[:-1], starts[1:]
    first, last = begin // rows, (end - 1) // rows
    some = end > begin
    each = jnp.where(some, last - first + 1, 0)
    if outer:
        each = jnp.where(some, each, 1)[:groups]
    upto = jnp.cumsum(each)
    count = upto[-1]
    most = tiles + groups
    step = jnp.minimum(jnp.arange(most, dtype=jnp.int32), count - 1)
    group = jnp.sum(step[:, None] >= upto[None, :-1], axis=1, dtype=jnp.int32)
    tile = first[group] + step - (upto - each)[group]
    reads = some[group] & (group < groups)
    read = lax.cummax(jnp.where(reads, tile, 0))  # tiles never go down
    return Steps(group, jnp.minimum(tile, tiles - 1), read, starts, count)


def multiplied_rows(sizes: Any, m: int, rows: int) -> int:
    """Return the rows that a kernel multiplies, those of parts that are multiplied twice counted twice.

    Args:
      sizes: rows of each group, known.
      m: all rows.
      rows: rows of a tile.
    """
    total = begin = 0
    for size in map(int, sizes):
        end = min(begin + size, m)
        if end > begin:
            for first in range(begin // rows * rows, end, rows):
                low, high = max(begin - first, 0), min(end - first, rows)
                part = part_of(rows)
                base = low // STRIP * STRIP if part % STRIP == 0 else 0
                total += rows if high - low == rows else -(-(high - base) // part) * part
        begin = end
    return total


def part_of(rows: int) -> int:
    """Return the rows of a part of a tile.

    Args:
      rows: of the tile.
    """
    return PART if rows % PART == 0 else rows


def run(
    target: Target,
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    facts: Facts,
) -> jax.Array:
    """Return the product; see `dispatch.Implementation`."""
    outer = facts.product == "outer"
    rows, bk, bn = tile_of(target, facts)
    steps = steps_of(sizes, facts.m, rows, outer=outer)
    part, groups = part_of(rows), facts.groups
    grid_k, grid_n = pl.cdiv(facts.k, bk), pl.cdiv(facts.n, bn)

    if outer:
        grid: Any = (grid_k, grid_n, steps.steps)
        in_specs = [
            pl.BlockSpec((rows, bk), lambda k, n, s, group, tile, read, starts: (read[s], k)),
            pl.BlockSpec((rows, bn), lambda k, n, s, group, tile, read, starts: (read[s], n)),
        ]
        out_spec = pl.BlockSpec((None, bk, bn), lambda k, n, s, group, tile, read, starts: (group[s], k, n))
        out_shape: Any = (groups, facts.k, facts.n)
        acc = (bk, bn)
    else:
        grid = (grid_n, steps.steps, grid_k)

        def depth(s: Any, k: Any, group: Any) -> Any:  # rows after the last group read nothing new
            return jnp.where(group[s] == groups, grid_k - 1, k)

        def matrix(n: Any, s: Any, k: Any, group: Any, tile: Any, read: Any, starts: Any) -> Any:
            here = jnp.minimum(group[s], groups - 1), depth(s, k, group), n
            return (here[0], here[2], here[1]) if facts.transposed else here

        in_specs = [
            pl.BlockSpec((rows, bk), lambda n, s, k, group, tile, read, starts: (read[s], depth(s, k, group))),
            pl.BlockSpec((None, bn, bk) if facts.transposed else (None, bk, bn), matrix),
        ]
        out_spec = pl.BlockSpec((rows, bn), lambda n, s, k, group, tile, read, starts: (tile[s], n))
        if bias is not None:  # a line for each group: a block has whole lines
            in_specs.append(
                pl.BlockSpec(
                    (None, 1, bn),
                    lambda n, s, k, group, tile, read, starts: (jnp.minimum(group[s], groups - 1), 0, n),
                )
            )
        out_shape, acc = (facts.m, facts.n), (rows, bn)
    biases = [] if bias is None else [bias[:, None]]
    kernel = functools.partial(_outer if outer else matmul_step, facts=facts, rows=rows, part=part, grid_k=grid_k)
    item = jnp.dtype(facts.dtype).itemsize
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=[pltpu.VMEM(acc, jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, facts.out),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel" if outer else "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM + 8 * 2**20,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * (facts.m + PART * min(groups - 1, facts.m)) * facts.k * facts.n,
            transcendentals=0,
            bytes_accessed=item
            * (facts.m * facts.k * grid_n + facts.m * facts.n * grid_k + facts.groups * facts.k * facts.n),
        ),
        interpret=target.tpu(),
        name=f"grouped_{facts.product}",
    )(*steps[:4], left, right, *biases)


def dot(left: jax.Array, right: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices in float32.

    Args:
      left: a matrix.
      right: likewise.
      dims: the dimension of each that is summed.
    """
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=jnp.float32)


def inside(first: Any, low: Any, high: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return which rows of a block a group has.

    Args:
      first: the block's first row.
      low: the group's first row.
      high: the row after its last one.
      shape: of the block.
    """
    row = first + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= low) & (row < high)


def each_part(rows: int, part: int, first: Any, low: Any, high: Any, do: Callable[[Any, Any], None]) -> None:
    """Call `do(offset, begin)` for each part of a tile that a group of rows low to high reaches into.

    A last part that would end after the tile starts earlier, and `begin` is its first row that no part before it has.

    Args:
      rows: of the tile.
      part: of `part_of`.
      first: the tile's first row.
      low: the group's first row.
      high: the row after its last one.
      do: what is called, with the part's first row in the tile.
    """
    low, high = jnp.maximum(low - first, 0), jnp.minimum(high - first, rows)
    base = low // STRIP * STRIP if part % STRIP == 0 else jnp.int32(0)

    def of_part(i: Any, carry: Any) -> Any:
        begin = base + i * part
        at = jnp.minimum(begin, rows - part)
        do(pl.multiple_of(at, STRIP) if part % STRIP == 0 else at, first + begin)
        return carry

    lax.fori_loop(0, lax.div(high - base + (part - 1), part), of_part, 0)


def matmul_step(
    group: Any, tile: Any, read: Any, starts: Any, rows_ref: Any, matrix_ref: Any, *refs: Any,
    facts: Facts, rows: int, part: int, grid_k: int,
) -> None:  # fmt: skip
    """Do one step of a matmul: one group's share of a tile of rows, by one tile of its matrix.

    Args:
      group: see `Steps`, as `tile`, `read` and `starts`.
      tile: likewise.
      read: likewise.
      starts: likewise.
      rows_ref: the tile of rows.
      matrix_ref: the tile of the matrix.
      refs: the tile of the bias, if there is one; that of the output; sums over the tiles of k, float32.
      facts: of the product.
      rows: of a tile.
      part: of `part_of`.
      grid_k: tiles of k.
    """
    *bias_refs, out_ref, acc_ref = refs
    s, k = pl.program_id(1), pl.program_id(2)
    g, first = group[s], tile[s] * rows
    low, high = starts[g], starts[g + 1]
    whole, after = (low <= first) & (high >= first + rows), g == facts.groups
    dims = (1, 1 if facts.transposed else 0)

    def add(at: Any, size: int) -> jax.Array:
        """Return the sum of a part up to this tile of k, which is kept for the next."""
        at_rows = pl.ds(at, size)
        value = dot(rows_ref[at_rows, :], matrix_ref[...], dims)
        return value if grid_k == 1 else value + jnp.where(k == 0, 0.0, acc_ref[at_rows, :])

    def store(at: Any, size: int, begin: Any, masked: bool) -> None:
        value = add(at, size)
        own = inside(first + at, jnp.maximum(low, begin), high, value.shape)
        if grid_k > 1:
            total = jnp.where(own, value, acc_ref[pl.ds(at, size), :]) if masked else value
            acc_ref[pl.ds(at, size), :] = total

        @pl.when(k == grid_k - 1)
        def _() -> None:
            done = value
            for bias_ref in bias_refs:
                done = done + bias_ref[...]
            if masked:
                done = jnp.where(own, done, out_ref[pl.ds(at, size), :].astype(jnp.float32))
            out_ref[pl.ds(at, size), :] = done.astype(out_ref.dtype)

    @pl.when(whole & ~after)
    def _() -> None:
        store(0, rows, first, False)

    @pl.when(~whole & ~after)
    def _() -> None:
        each_part(rows, part, first, low, high, lambda at, begin: store(at, part, begin, True))

    @pl.when(after & (k == grid_k - 1))
    def _() -> None:
        own = inside(first, low, high, out_ref.shape)
        out_ref[...] = jnp.where(own, 0.0, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def _outer(
    group: Any, tile: Any, read: Any, starts: Any, left_ref: Any, right_ref: Any, out_ref: Any, acc_ref: Any,
    *, facts: Facts, rows: int, part: int, grid_k: int,
) -> None:  # fmt: skip
    s = pl.program_id(2)
    g, first = group[s], tile[s] * rows
    low, high = starts[g], starts[g + 1]
    whole = (low <= first) & (high >= first + rows)

    # the first tile of a group is that of its first row, the last that of its last one; an empty group has one step
    @pl.when((high <= low) | (tile[s] == low // rows))
    def _() -> None:
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    @pl.when(whole)
    def _() -> None:
        acc_ref[...] += dot(left_ref[...], right_ref[...], (0, 0))

    def some(at: Any, begin: Any) -> None:
        """Add a part's rows of the group; of both operands, since the others may be infinite."""

        def own(ref: Any) -> jax.Array:
            x = ref[pl.ds(at, part), :].astype(jnp.float32)
            own_rows = inside(first + at, jnp.maximum(low, begin), high, x.shape)
            return jnp.where(own_rows, x, 0.0).astype(ref.dtype)

        acc_ref[...] += dot(own(left_ref), own(right_ref), (0, 0))

    @pl.when(~whole & (high > low))
    def _() -> None:
        each_part(rows, part, first, low, high, some)

    @pl.when((high <= low) | (tile[s] == (high - 1) // rows))
    def _() -> None:
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
