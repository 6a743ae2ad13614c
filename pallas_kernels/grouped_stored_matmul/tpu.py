"""The grouped product with stored matrices on TPUs: `grouped_matmul`'s grid, each step's tile unpacked in VMEM before.

A tile of words is unpacked plane by plane as in `stored_matmul`, into scratch: code j of each unit of words makes plane
j, so the matrix' rows are in the order of the planes, and so are the columns of the rows it is multiplied with (of a
transpose the output's). Steps go through a group's tiles of rows one after another, so where the sum over k has one
tile, a group's matrix is unpacked once for each tile of columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul.inputs import Facts as Dense
from pallas_kernels.grouped_matmul.tpu import matmul_step, part_of, steps_of
from pallas_kernels.grouped_stored_matmul import examples
from pallas_kernels.grouped_stored_matmul.inputs import Facts
from pallas_kernels.stored_matmul import inputs
from pallas_kernels.stored_matmul.inputs import Packed
from pallas_kernels.stored_matmul.tpu import DTYPES, LANES, PLANE, planes_of, spread_of
from pallas_kernels.tiles import lookup

__all__ = ["VMEM", "configurations", "run", "supported", "tile_of"]

VMEM = 56 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""
_ROWS = 8  # of a register of float32: planes have whole ones

Tile = tuple[int, int, int]
"""Rows, rows of the matrix, columns of the matrix."""


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    each = facts.each
    if each.dtype not in DTYPES or each.out not in DTYPES:
        return f"TPUs compute in {' and '.join(DTYPES)}, not {each.dtype} to {each.out}"
    if not each.m:
        return "there are no rows"
    if each.n < LANES:
        return f"a kernel takes {LANES} columns or more, not {each.n}"
    if each.transposed and each.n % LANES:
        return f"the product with the transpose takes a multiple of {LANES} columns, not {each.n}"
    codes, _ = each.unit
    if each.k % (_ROWS * codes):
        return f"of {each.numbers.bits} bits a kernel takes a multiple of {_ROWS * codes} rows, not {each.k}"
    for name, blocks, _ in each.parts:
        group = each.k // blocks
        if group % codes and codes % group:
            return f"{name}s for {group} rows each neither divide nor fill units of {codes} codes"
    if tile_of(target, facts) is None:
        groups = ", ".join(str(each.k // blocks) for _, blocks, _ in each.parts)
        return f"no tile of {each.k} rows with whole groups of {groups} rows fits in {VMEM} bytes of VMEM"
    return None


def tile_of(target: Target, facts: Facts) -> Tile | None:
    """Return the tile of a case, with as many of the matrix' rows as fit, or `None` if none does.

    Args:
      target: the device.
      facts: of the product.
    """
    each = facts.each
    want = lookup("grouped_stored_matmul", target.kind or "TPU", bits=each.numbers.bits, dtype=each.dtype)
    rows, columns = min(each.m, want["rows"]), min(want["columns"], each.n // LANES * LANES)
    if each.transposed:
        columns = max(c for c in range(LANES, columns + 1, LANES) if each.n % c == 0)
    step, groups = PLANE * each.unit[0], [each.k // blocks for _, blocks, _ in each.parts]
    fits = [k for k in range(step, each.k, step) if each.k % k == 0 and all(k % g == 0 or g % k == 0 for g in groups)]
    for k in (each.k, *reversed(fits)):
        if _vmem(each, rows, k, columns) <= VMEM:
            return rows, k, columns
    return None


def _padded(each: inputs.Facts, k: int) -> int:
    """Return the rows of a plane in scratch: whole registers, whose planes together fill whole lanes."""
    codes = each.unit[0]
    whole = max(PLANE, LANES // math.gcd(codes, LANES))
    return -(-k // codes // whole) * whole


def _vmem(each: inputs.Facts, rows: int, k: int, n: int) -> int:
    item, out = (jnp.dtype(d).itemsize for d in (each.dtype, each.out))
    wide = each.unit[0] * _padded(each, k)
    summed, produced = (n, wide) if each.transposed else (wide, n)
    words = 2 * k * n * each.numbers.bits // 8  # two tiles of codes
    unpacked = 8 * k * LANES * 4
    parts = sum(2 * max(k * blocks // each.k, 8) * n * 4 for _, blocks, _ in each.parts)
    return words + unpacked + parts + wide * n * item + rows * (2 * summed * item + produced * (8 + 2 * out))


def run(target: Target, rows: jax.Array, weight: Packed, sizes: jax.Array, *, facts: Facts) -> jax.Array:
    """Return the product; see `dispatch.Implementation`."""
    each, groups, tile = facts.each, facts.groups, tile_of(target, facts)
    assert tile is not None
    bm, bk, bn = tile
    m, codes, tiles = each.m, each.unit[0], each.k // bk
    plane, padded = bk // codes, _padded(each, bk)
    wide = codes * padded
    names = [name for name, _, _ in each.parts]
    word_rows = bk * each.numbers.bits // (8 * weight.codes.dtype.itemsize)
    steps = steps_of(sizes, m, bm, outer=False)
    grid_n = pl.cdiv(each.n, bn)
    produced, summed = (tiles, grid_n) if each.transposed else (grid_n, tiles)

    def here(o: Any, s: Any, c: Any, group: Any) -> tuple[Any, Any, Any]:
        """Return a step's group, tile of the matrix' rows, and tile of its columns; empty rows read nothing new."""
        c = jnp.where(group[s] == groups, summed - 1, c)
        return jnp.minimum(group[s], groups - 1), *((o, c) if each.transposed else (c, o))

    def words_at(o: Any, s: Any, c: Any, group: Any, tile: Any, read: Any, starts: Any) -> Any:
        return here(o, s, c, group)

    # of blocks of rows, those of a tile, or the one that a tile is part of
    blocks, block_specs, block_rows = [], [], []
    for name, count, _ in each.parts:
        few = max(1, count // tiles)
        part = jnp.broadcast_to(getattr(weight, name), (groups, count, each.n))
        blocks.append(part.reshape(groups, count // few, few, each.n))
        block_rows.append(few)
        step = tiles // (count // few)  # tiles of a block

        def block_at(o: Any, s: Any, c: Any, group: Any, tile: Any, read: Any, starts: Any, step: int = step) -> Any:
            g, k, n = here(o, s, c, group)
            return g, lax.div(k, jnp.int32(step)), 0, n

        block_specs.append(pl.BlockSpec((None, None, few, bn), block_at))

    if each.transposed:
        x, x_block, out_block, out_width = rows, (bm, bn), (bm, wide), tiles * wide
    else:
        x = rows.reshape(m, tiles, plane, codes).swapaxes(2, 3)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padded - plane))).reshape(m, tiles * wide)
        x_block, out_block, out_width = (bm, wide), (bm, bn), each.n

    def rows_at(o: Any, s: Any, c: Any, group: Any, tile: Any, read: Any, starts: Any) -> Any:
        return read[s], jnp.where(group[s] == groups, summed - 1, c)

    scalars = [a.astype(jnp.float32).reshape(groups, -1) for a in (weight.factor, weight.table) if a is not None]
    scratch = [
        pltpu.VMEM(out_block, jnp.float32),
        pltpu.VMEM((wide, bn), jnp.dtype(each.dtype)),
        pltpu.VMEM((plane * each.unit[1], LANES), jnp.int32),
        *(pltpu.VMEM((max(few, plane), LANES), jnp.float32) for few in block_rows),
    ]
    dense = Dense("matmul", groups, m, summed * x_block[1], out_width, *(each.dtype,) * 2, each.out, each.transposed)

    def kernel(group: Any, tile: Any, read: Any, starts: Any, x_ref: Any, codes_ref: Any, *refs: Any) -> None:
        part_refs, refs = refs[: len(names)], refs[len(names) :]
        scalar_refs, (out_ref, acc_ref, w_ref, words_ref, *spread_refs) = refs[: len(scalars)], refs[len(scalars) :]
        s = pl.program_id(1)
        g = group[s]
        fresh = g < groups
        if summed == 1:
            fresh = fresh & ((s == 0) | (group[jnp.maximum(s - 1, 0)] != g))

        @pl.when(fresh)
        def _() -> None:
            factor = scalar_refs[0][g, 0] if weight.factor is not None else None
            table = None
            if weight.table is not None:
                table = [scalar_refs[-1][g, i] for i in range(2**each.numbers.bits)]

            def columns(c: jax.Array, carry: int) -> int:
                at = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
                plane_of = planes_of(each, codes_ref[:, at], words_ref)
                values = {}
                for name, part, spread in zip(names, part_refs, spread_refs, strict=True):
                    value = part[:, at]
                    if value.dtype == jnp.uint8:
                        value = weight.of(name).decode(value.astype(jnp.int32))
                    value = value.astype(jnp.float32)
                    if name == "scale" and factor is not None:
                        value = value * factor
                    values[name] = spread_of(value, codes, plane, spread)
                for j in range(codes):
                    w = each.numbers.decode(plane_of(j), table)
                    for name, combine in (("zero", jnp.subtract), ("scale", jnp.multiply), ("offset", jnp.add)):
                        if name in values:
                            w = combine(w, values[name](j))
                    if padded > plane:
                        w = jnp.concatenate([w, jnp.zeros((padded - plane, LANES), jnp.float32)])
                    w_ref[pl.ds(j * padded, padded), at] = w.astype(each.dtype)
                return carry

            lax.fori_loop(0, bn // LANES, columns, 0)

        matmul_step(
            group, tile, read, starts, x_ref, w_ref, out_ref, acc_ref,
            facts=dense, rows=bm, part=part_of(bm), grid_k=summed,
        )  # fmt: skip

    item = jnp.dtype(each.dtype).itemsize
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(produced, steps.steps, summed),
            in_specs=[
                pl.BlockSpec(x_block, rows_at),
                pl.BlockSpec((None, word_rows, bn), words_at),
                *block_specs,
                *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
            ],
            out_specs=pl.BlockSpec(out_block, lambda o, s, c, group, tile, read, starts: (tile[s], o)),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((m, out_width), each.out),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM + 8 * 2**20
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * each.k * each.n,
            transcendentals=0,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (weight.codes, *blocks))
            + item * m * (each.k + each.n),
        ),
        interpret=target.tpu(),
        name="grouped_stored_matmul",
    )(*steps[:4], x, weight.codes, *blocks, *scalars)
    if each.transposed:
        out = out.reshape(m, tiles, codes, padded)[..., :plane].swapaxes(2, 3).reshape(m, each.k)
    return out


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
