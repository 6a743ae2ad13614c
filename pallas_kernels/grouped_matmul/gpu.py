"""The grouped products on Hopper in Mosaic GPU: persistent blocks that walk through tiles which never join two groups.

A block has two warpgroups that multiply, each 64 rows by `columns` columns, and one that copies both operands by TMA.
Tiles of 128 rows start at a group's first row, rounded down to 8 (what a swizzled copy can address), so a group of r
rows has at most (r + 134) / 128 of them. A small table, which XLA makes from the sizes, lists them; how many there are
is known on the device only. Rows after the last group are tiles without products, and a warpgroup whose 64 rows are all
of other groups multiplies nothing.

A tile whose 64 rows are all of its group is stored by one copy for each piece of 128 bytes of columns. Else the rows
of the group are stored by copies of 32, 16, 8, 4, 2 and 1 rows, so that a neighbour's rows stay as they are.

The outer product goes through the rows of a group in chunks of 64. In the first and last chunk the warpgroups put
zeros, in shared memory and in both operands, into the rows of other groups: those may hold infinities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.dispatch import HOPPER, Target, hopper
from pallas_kernels.grouped_matmul import examples
from pallas_kernels.grouped_matmul.inputs import Facts
from pallas_kernels.tiles import lookup

plgpu: Any = mosaic_gpu  # its names differ between versions

ROWS = 64
"""Rows of a warpgroup: those of one wgmma."""
WARPGROUPS = 2
"""Warpgroups that multiply; one more copies memory."""
TILE = ROWS * WARPGROUPS
CHUNK = 64
"""Elements of a vector that one copy moves: 128 bytes, the widest swizzle."""
DTYPES = ("bfloat16", "float16")
_STRIP = 8  # rows of a swizzle's pattern: where tiles of rows may start
_TOGETHER = 16  # tiles of rows side by side: they and their columns fit in the L2 cache


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if why := hopper(target):
        return why
    if facts.dtype not in DTYPES or facts.right != facts.dtype:
        return f"Hopper's kernel takes {' and '.join(DTYPES)}, and {facts.dtype} is left to XLA"
    if facts.out not in (*DTYPES, "float32"):
        return f"Hopper's kernel writes {', '.join(DTYPES)} and float32, not {facts.out}"
    if not facts.m or not facts.groups:
        return "there are no rows" if facts.groups else "there are no groups"
    for name, size in (("k", facts.k), ("n", facts.n)):
        if size % CHUNK or not size:
            near = max(1, round(size / CHUNK)) * CHUNK
            return f"Hopper's kernel takes multiples of {CHUNK} for {name}, not {size}; the nearest is {near}"
    return None


def run(
    target: Target,
    left: jax.Array,
    right: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    facts: Facts,
) -> jax.Array:
    """Return the product."""
    more = short(facts.m)
    left = jnp.pad(left, ((0, more), (0, 0)))
    if facts.product == "outer":
        return _outer(target, left, jnp.pad(right, ((0, more), (0, 0))), sizes, facts)
    out = jax.ShapeDtypeStruct((len(left), facts.n), facts.out)
    return _matmul(target, tiles_of(sizes, len(left)), left, right, bias, facts, out)[: facts.m]


def multiply_into(
    target: Target, out: Any, table: jax.Array, rows: jax.Array, matrices: jax.Array, facts: Facts
) -> None:  # fmt: skip
    """Write the rows of some tiles times their groups' matrices into an array, and leave its other rows as they are.

    Args:
      target: the device.
      out: a `jax.Ref` (m, n), of a number of rows that is a multiple of 8.
      table: tiles, as `tiles_between` returns them.
      rows: (m, k).
      matrices: those of the table's groups.
      facts: of the product with these matrices.
    """
    _matmul(target, table, rows, matrices, None, facts, out)


def short(m: int) -> int:
    """Return the rows that `m` rows lack to a multiple of 8, which the kernels take.

    Args:
      m: number of rows.
    """
    return -m % _STRIP


def key_of(facts: Facts) -> dict[str, Any]:
    """Return what the tile of a product depends on.

    Args:
      facts: of the product.
    """
    outer = facts.product == "outer"
    product = "outer" if outer else "transposed" if facts.transposed else "matmul"
    depth = max(1, facts.m // facts.groups) if outer else facts.k
    return {"product": product, "depth": depth, "even": facts.n % 256 == 0}


def tile_of(target: Target, facts: Facts) -> tuple[int, int, int]:
    """Return columns of a tile, chunks of both operands in flight, and buffers from which a warpgroup stores.

    Args:
      target: the device.
      facts: of the product.
    """
    tile = lookup("grouped_matmul", target.kind, **key_of(facts))
    return tile["columns"], tile["slots"], tile["buffers"]


def slots_of(columns: int, buffers: int, *, outer: bool) -> int:
    """Return how many chunks of both operands fit in shared memory.

    Args:
      columns: of a tile.
      buffers: from which a warpgroup stores; a matmul has one more.
      outer: whether it is the outer product.
    """
    stores = WARPGROUPS * (buffers + (not outer)) * ROWS * 128
    return (SHARED_MEMORY - 1024 - stores) // ((TILE + columns) * CHUNK * 2)


def tiles_of(sizes: jax.Array, m: int) -> jax.Array:
    """Return the tiles of a matmul as int32 (tiles, 5).

    Each is (first row, first and end of the rows that belong to the group, group, number of tiles); the group of rows
    after the last one is the number of groups. Lines past the number of tiles mean nothing.

    Args:
      sizes: int32 (groups,).
      m: rows, with those after the last group; a multiple of 8.
    """
    ends = jnp.append(jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), m), m)
    return tiles_between(jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends, m)


def tiles_between(starts: jax.Array, ends: jax.Array, m: int) -> jax.Array:
    """Return the tiles of groups of rows, as `tiles_of` does; no tile has other rows.

    Args:
      starts: int32 (groups,), the first row of each.
      ends: int32 (groups,), the end of the rows of each; groups share no rows.
      m: rows, with those of no group; a multiple of 8.
    """
    bases = starts // _STRIP * _STRIP
    counts = jnp.where(ends > starts, -((bases - ends) // TILE), 0)
    until = jnp.cumsum(counts, dtype=jnp.int32)
    most = (m + (TILE + _STRIP - 2) * len(ends)) // TILE
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile[:, None] >= until, 1, dtype=jnp.int32), len(ends) - 1)
    first = bases[group] + (tile - until[group] + counts[group]) * TILE
    begin, end = (jnp.clip(edge[group] - first, 0, TILE) for edge in (starts, ends))
    total = jnp.broadcast_to(until[-1], tile.shape)  # beside the others: a kernel of its own would slice it
    return jnp.stack([first, begin, end, group, total], 1)


def multiplied_rows(sizes: Any, m: int) -> int:
    """Return the rows that a matmul multiplies, with those of other groups in a group's warpgroups.

    Args:
      sizes: rows of each group, known.
      m: all rows.
    """
    ends = np.minimum(np.cumsum(sizes), m)
    starts = np.concatenate([[0], ends[:-1]])
    total = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        base = start // _STRIP * _STRIP
        total += ROWS * sum(at + ROWS > start for at in range(base, end, ROWS)) if end > start else 0
    return total


def _each(body: Callable[[Any, Any], Any], items: Any, blocks: int) -> Any:
    """Call `body(item, carry)` for each of this block's items, and return the last carry; the first one is 0."""
    block = lax.axis_index("block")
    steps = lax.div(items + (blocks - 1) - block, jnp.int32(blocks))
    return lax.fori_loop(0, steps, lambda k, carry: body(block + k * blocks, carry), jnp.int32(0))


def _banded(item: Any, rows: Any, columns: int) -> tuple[Any, Any]:
    """Return an item's tile of rows and of columns: bands of rows, in which neighbours share columns."""
    band = lax.div(item, jnp.int32(_TOGETHER * columns))
    wide = lax.min(jnp.int32(_TOGETHER), rows - band * _TOGETHER)
    inner = item - band * (_TOGETHER * columns)
    return band * _TOGETHER + lax.rem(inner, wide), lax.div(inner, wide)


def _pieces(dtype: str) -> int:
    return 128 // jnp.dtype(dtype).itemsize  # columns that a swizzled copy stores


def _swizzled(dtype: Any, *shape: int) -> Any:
    transforms = (plgpu.TilingTransform((8, _pieces(dtype))), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _multiply(acc: Any, operands: Callable[[Any, Any], tuple[Any, Any]], done: Any, chunks: Any, *barriers: Any) -> Any:
    """Return the accumulator after `chunks` products of shared memory; `done` chunks went before."""
    full, free = barriers
    slots = full.shape[0]

    def chunk(c: Any, _: None) -> None:
        slot = lax.rem(done + c, slots)
        plgpu.barrier_wait(full.at[slot])
        plgpu.wgmma(acc, *operands(c, slot))
        plgpu.wgmma_wait(1)
        before = lax.rem(done + c - 1, slots)
        pl.when(c > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

    lax.fori_loop(0, chunks, chunk, None)
    result = acc[...]
    pl.when(chunks > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(done + chunks - 1, slots)]))
    return result


def _pass(done: Any, chunks: Any, full: Any, free: Any) -> None:
    """Free `chunks` chunks, as they arrive, that this warpgroup does not multiply."""

    def chunk(c: Any, _: None) -> None:
        slot = lax.rem(done + c, full.shape[0])
        plgpu.barrier_wait(full.at[slot])
        plgpu.barrier_arrive(free.at[slot])

    lax.fori_loop(0, chunks, chunk, None)


def _registers(target: Target, warpgroup: Any, multiply: Callable[[], None], bring: Callable[[], None]) -> None:
    """Run `multiply` in the warpgroups that multiply, and `bring` in the one that copies memory."""

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        if not target.interpret:
            plgpu.set_max_registers(232, action="increase")
        multiply()
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        if not target.interpret:
            plgpu.set_max_registers(40, action="decrease")
        bring()


def _drain(free: Any, done: Any) -> None:
    slots = free.shape[0]
    drain = lambda k, _: plgpu.barrier_wait(free.at[lax.rem(k, slots)])  # noqa: E731
    lax.fori_loop(lax.max(done - slots, 0), done, drain, None)


def _matmul(
    target: Target,
    table: jax.Array,
    rows: jax.Array,
    matrices: jax.Array,
    bias: jax.Array | None,
    facts: Facts,
    out: Any,
) -> Any:
    """Return the product of the table's tiles, as `out` says; or write it into `out`, a `jax.Ref`."""
    k, n, dtype, transposed = rows.shape[1], facts.n, rows.dtype, facts.transposed
    columns, slots, buffers = tile_of(target, facts)
    across, chunks, piece = -(-n // columns), k // CHUNK, _pieces(facts.out)
    blocks = min(target.cores, len(table) * across)
    # zeros for the rows after the last group, and up to the last tile's last column
    biases = [] if bias is None else [jnp.pad(bias, ((0, 1), (0, across * columns - n)))]

    def grouped_matmul(table_ref: Any, rows_ref: Any, matrices_ref: Any, *refs: Any) -> None:
        *bias_refs, out_ref, rows_s, w_s, out_s, plain_s, full, free = refs
        wg, tiles = lax.axis_index("wg"), table_ref[0, 4]

        def place(item: Any) -> tuple[Any, ...]:
            at, column = _banded(item, tiles, across)
            group = table_ref[at, 3]
            return (
                at,
                pl.multiple_of(column * columns, CHUNK),
                group,
                lax.select(group < facts.groups, jnp.int32(chunks), jnp.int32(0)),
            )

        def store(acc: Any, first: Any, begin: Any, end: Any, column: Any, group: Any) -> None:
            whole = (begin == 0) & (end == ROWS)
            for p in range(columns // piece):
                values, at = acc[:, p * piece : (p + 1) * piece], pl.ds(column + p * piece, piece)
                for ref in bias_refs:
                    line = plgpu.load(ref.at[group, at], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    values = values + lax.broadcast_in_dim(line, (ROWS, piece), (1,))
                values = values.astype(facts.out)
                plgpu.wait_smem_to_gmem(buffers - 1 if p else 0, wait_read_only=True)

                @pl.when(whole)
                def _(values: Any = values, at: Any = at, buffer: int = p % buffers) -> None:
                    out_s[wg, buffer] = values
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_s.at[wg, buffer], out_ref.at[pl.ds(first, ROWS), at])

                @pl.when(jnp.logical_not(whole))
                def _(values: Any = values, at: Any = at) -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plain_s[wg] = values
                    plgpu.commit_smem()
                    row, count = begin, 32
                    while count:
                        here, size = row, count

                        @pl.when((end - begin) & size != 0)
                        def _(here: Any = here, size: int = size) -> None:
                            source = plain_s.at[wg, pl.ds(here, size)]
                            plgpu.copy_smem_to_gmem(
                                source, out_ref.at[pl.ds(first + here, size), at], commit_group=False
                            )

                        row, count = row + ((end - begin) & size), count // 2
                    plgpu.commit_smem_to_gmem_group()

        def multiply() -> None:
            def item(i: Any, done: Any) -> Any:
                at, column, group, steps = place(i)
                operands = lambda c, slot: (  # noqa: E731
                    rows_s.at[slot, wg],
                    w_s.at[slot].T if transposed else w_s.at[slot],
                )
                begin, end = (lax.clamp(0, table_ref[at, edge] - wg * ROWS, ROWS) for edge in (1, 2))

                @pl.when(begin < end)
                def _() -> None:
                    acc = pl.run_scoped(
                        lambda acc: _multiply(acc, operands, done, steps, full, free),
                        plgpu.ACC((ROWS, columns), jnp.float32),
                    )
                    store(acc, pl.multiple_of(table_ref[at, 0], _STRIP) + wg * ROWS, begin, end, column, group)

                pl.when(begin >= end)(lambda: _pass(done, steps, full, free))
                return done + steps

            _each(item, tiles * across, blocks)

        def bring() -> None:
            def item(i: Any, done: Any) -> Any:
                at, column, group, steps = place(i)
                first = pl.multiple_of(table_ref[at, 0], _STRIP)

                def chunk(c: Any, _: None) -> None:
                    slot, inner, across_ = lax.rem(done + c, slots), pl.ds(c * CHUNK, CHUNK), pl.ds(column, columns)
                    pl.when(done + c >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half in range(WARPGROUPS):
                        source = rows_ref.at[pl.ds(first + half * ROWS, ROWS), inner]
                        plgpu.copy_gmem_to_smem(source, rows_s.at[slot, half], full.at[slot])
                    matrix = (group, across_, inner) if transposed else (group, inner, across_)
                    plgpu.copy_gmem_to_smem(matrices_ref.at[matrix], w_s.at[slot], full.at[slot])

                lax.fori_loop(0, steps, chunk, None)
                return done + steps

            _drain(free, _each(item, tiles * across, blocks))

        _registers(target, wg, multiply, bring)

    made = isinstance(out, jax.ShapeDtypeStruct)
    return plgpu.kernel(
        grouped_matmul,
        out_type=out if made else (),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            _swizzled(dtype, slots, WARPGROUPS, ROWS, CHUNK),
            _swizzled(dtype, slots, *((columns, CHUNK) if transposed else (CHUNK, columns))),
            _swizzled(facts.out, WARPGROUPS, buffers, ROWS, piece),
            plgpu.SMEM((WARPGROUPS, ROWS, piece), facts.out),
            plgpu.Barrier(num_arrivals=1 + WARPGROUPS, num_barriers=slots),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
        ],
        **target.gpu(),
    )(table, rows, matrices, *biases, *([] if made else [out]))


def _outer(target: Target, left: jax.Array, right: jax.Array, sizes: jax.Array, facts: Facts) -> jax.Array:
    (m, k), n, dtype = left.shape, facts.n, left.dtype
    columns, slots, buffers = tile_of(target, facts)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), m)
    edges = jnp.stack([jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends], 1)
    down, across, piece = -(-k // TILE), -(-n // columns), _pieces(facts.out)
    items = facts.groups * down * across
    blocks = min(target.cores, items)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def grouped_outer(
        edges_ref: Any, left_ref: Any, right_ref: Any, out_ref: Any, left_s: Any, right_s: Any, out_s: Any,
        full: Any, free: Any, masked: Any,
    ) -> None:  # fmt: skip
        wg = lax.axis_index("wg")

        def place(item: Any) -> tuple[Any, ...]:
            group, inner = lax.div(item, jnp.int32(down * across)), lax.rem(item, jnp.int32(down * across))
            row, column = _banded(inner, jnp.int32(down), across)
            start, end = edges_ref[group, 0], edges_ref[group, 1]
            base = start - lax.rem(start, jnp.int32(_STRIP))
            steps = lax.select(end > start, lax.div(end - base + (CHUNK - 1), jnp.int32(CHUNK)), jnp.int32(0))
            return group, row * TILE, column * columns, start - base, end - base, pl.multiple_of(base, _STRIP), steps

        def multiply() -> None:
            def item(i: Any, done: Any) -> Any:
                group, row, column, begin, end, _, steps = place(i)

                def operands(c: Any, slot: Any) -> tuple[Any, Any]:
                    first, last = begin - c * CHUNK, end - c * CHUNK

                    @pl.when((first > 0) | (last < CHUNK))
                    def _() -> None:
                        line = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=row_layout)
                        own = lax.broadcast_in_dim((line >= first) & (line < last), (CHUNK, CHUNK), (0,))

                        def mask(ref: Any) -> None:
                            values = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
                            zeros = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), dtype), plgpu.Layout.WGMMA)
                            ref[...] = jnp.where(own, values, zeros)

                        mask(left_s.at[slot, wg])
                        for p in range(columns // CHUNK):  # each warpgroup has every second piece
                            part = right_s.at[slot, :, pl.ds(p * CHUNK, CHUNK)]
                            pl.when(wg == p % WARPGROUPS)(functools.partial(mask, part))
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(masked)
                        plgpu.barrier_wait(masked)

                    return left_s.at[slot, wg].T, right_s.at[slot]

                acc = pl.run_scoped(
                    lambda acc: _multiply(acc, operands, done, steps, full, free),
                    plgpu.ACC((ROWS, columns), jnp.float32),
                )
                for p in range(columns // piece):
                    plgpu.wait_smem_to_gmem(buffers - 1 if p else 0, wait_read_only=True)
                    out_s[wg, p % buffers] = acc[:, p * piece : (p + 1) * piece].astype(facts.out)
                    plgpu.commit_smem()
                    to = out_ref.at[group, pl.ds(row + wg * ROWS, ROWS), pl.ds(column + p * piece, piece)]
                    plgpu.copy_smem_to_gmem(out_s.at[wg, p % buffers], to)
                return done + steps

            _each(item, jnp.int32(items), blocks)

        def bring() -> None:
            def item(i: Any, done: Any) -> Any:
                _, row, column, _, _, base, steps = place(i)

                def chunk(c: Any, _: None) -> None:
                    slot, inner = lax.rem(done + c, slots), pl.ds(base + c * CHUNK, CHUNK)
                    pl.when(done + c >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half in range(WARPGROUPS):
                        source = left_ref.at[inner, pl.ds(row + half * ROWS, ROWS)]
                        plgpu.copy_gmem_to_smem(source, left_s.at[slot, half], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        right_ref.at[inner, pl.ds(column, columns)], right_s.at[slot], full.at[slot]
                    )

                lax.fori_loop(0, steps, chunk, None)
                return done + steps

            _drain(free, _each(item, jnp.int32(items), blocks))

        _registers(target, wg, multiply, bring)

    return plgpu.kernel(
        grouped_outer,
        out_type=jax.ShapeDtypeStruct((facts.groups, k, n), facts.out),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            _swizzled(dtype, slots, WARPGROUPS, CHUNK, ROWS),
            _swizzled(dtype, slots, CHUNK, columns),
            _swizzled(facts.out, WARPGROUPS, buffers, ROWS, piece),
            plgpu.Barrier(num_arrivals=1 + WARPGROUPS, num_barriers=slots),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        **target.gpu(),
    )(edges, left, right)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    target = Target(f"NVIDIA {HOPPER[1]}", "cuda")
    for name, sizes in examples.MODELS.items():
        for product in examples.PRODUCTS:
            yield (f"{name} {product}", *examples.case(run, product, sizes, target=target))
    sizes = examples.MODELS["gpt-oss"]
    yield ("gpt-oss forward with a bias", *examples.case(run, "forward", sizes, target=target, bias=True))
