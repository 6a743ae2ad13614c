"""The product on TPUs: a tile of words is unpacked in VMEM, plane by plane, and each plane goes to the matrix unit.

Words of 32 bits are rows of the tile, since four bytes of neighbouring rows are one register's word. Code j of each
unit of words (8 codes of 4 bits in a word; 32 codes of 3 bits in 3 words) makes plane j, whose row i is the matrix' row
i · codes + j. So no row of the matrix moves: x, which is small, is put in the order of the planes beforehand, and a
plane is unpacked by a shift and a mask.
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
from pallas_kernels.stored_matmul import examples
from pallas_kernels.stored_matmul.inputs import Facts, Packed
from pallas_kernels.tiles import lookup

LANES = 128
PLANE = 16
"""Rows of a plane are a multiple of it: a register of bfloat16."""
DTYPES = ("float32", "bfloat16")
VMEM = 48 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""
_ROWS = 256  # rows of x of a tile


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if facts.dtype not in DTYPES:
        return f"TPUs compute in {' and '.join(DTYPES)}, not {facts.dtype}"
    if not facts.m:
        return "x has no rows"
    if facts.n < LANES:
        return f"a kernel takes {LANES} columns or more, not {facts.n}"
    if facts.transposed and facts.n % LANES:
        return f"the product with the transpose takes a multiple of {LANES} columns, not {facts.n}"
    codes, words = facts.unit
    if facts.k % (PLANE * codes):
        return f"of {facts.numbers.bits} bits a kernel takes a multiple of {PLANE * codes} rows, not {facts.k}"
    for name, blocks, _ in facts.parts:
        group = facts.k // blocks
        if group % codes and codes % group:
            return f"{name}s for {group} rows each neither divide nor fill units of {codes} codes"
    tile = _tile(target, facts)
    if tile is None:
        groups = ", ".join(str(facts.k // blocks) for _, blocks, _ in facts.parts)
        return f"no tile of {facts.k} rows has whole groups of {groups} rows and {PLANE * codes} rows at a time"
    if (needed := _vmem(facts, *tile)) > VMEM:
        return f"a tile of {tile[0]} x {tile[1]} takes {needed} bytes of VMEM, over {VMEM}"
    return None


def _tile(target: Target, facts: Facts) -> tuple[int, int] | None:
    """Return the rows and columns of a tile of the matrix, as near to the table's as there are."""
    want = lookup("stored_matmul", target.kind or "TPU", bits=facts.numbers.bits, dtype=facts.dtype)
    step, groups = PLANE * facts.unit[0], [facts.k // blocks for _, blocks, _ in facts.parts]
    fits = [
        k for k in range(step, facts.k + 1, step) if facts.k % k == 0 and all(k % g == 0 or g % k == 0 for g in groups)
    ]
    if not fits:
        return None
    k = min(fits, key=lambda k: abs(math.log2(k / want["rows"])))
    columns = min(want["columns"], facts.n // LANES * LANES)
    if facts.transposed:
        columns = max(c for c in range(LANES, columns + 1, LANES) if facts.n % c == 0)
    return k, columns


def _m(facts: Facts) -> tuple[int, int]:
    """Return rows of x with padding, and those of a tile."""
    padded = -(-facts.m // PLANE) * PLANE
    tile = min(padded, _ROWS)
    return -(-padded // tile) * tile, tile


def _vmem(facts: Facts, k: int, n: int) -> int:
    _, m = _m(facts)
    word = 2 * k * n * facts.numbers.bits // 8  # two tiles of codes
    unpacked = 8 * k * LANES * 4
    x = 2 * m * (n if facts.transposed else k) * jnp.dtype(facts.dtype).itemsize
    y = 3 * m * (k if facts.transposed else n) * 4
    parts = sum(2 * max(k * blocks // facts.k, 8) * n * 4 for _, blocks, _ in facts.parts)
    return word + unpacked + x + y + parts


def run(target: Target, x: jax.Array, weight: Packed, *, facts: Facts) -> jax.Array:
    """Return the product."""
    tile = _tile(target, facts)
    assert tile is not None
    (bk, bn), (padded, bm) = tile, _m(facts)
    codes, _ = facts.unit
    tiles, plane = facts.k // bk, bk // codes
    names = [name for name, _, _ in facts.parts]
    x = jnp.pad(x, ((0, padded - facts.m), (0, 0)))
    word_rows = bk * facts.numbers.bits // (8 * weight.codes.dtype.itemsize)

    # tiles of the matrix' rows; of blocks, those of a tile, or the one that a tile is part of
    blocks, block_specs, per = [], [], []
    for name, count, _ in facts.parts:
        part = getattr(weight, name)
        rows = max(1, count // tiles)
        per.append(rows)
        wide = jnp.broadcast_to(part, (count, facts.n)).reshape(count // rows, rows, facts.n)
        blocks.append(wide)
        step = tiles // (count // rows)  # tiles of a block
        block_specs.append((rows, step))

    grid_n = pl.cdiv(facts.n, bn)
    out_shape: tuple[int, ...]
    acc: tuple[int, ...]
    if facts.transposed:
        grid = (padded // bm, tiles, grid_n)
        at = lambda f: lambda m, k, n: f(m, n, k)  # noqa: E731
        x_spec = pl.BlockSpec((bm, bn), at(lambda m, n, k: (m, n)))
        out_shape, out_block = (tiles, codes, padded, plane), (None, codes, bm, plane)
        out_spec = pl.BlockSpec(out_block, at(lambda m, n, k: (k, 0, m, 0)))
        acc = (codes, bm, plane)
    else:
        grid = (padded // bm, grid_n, tiles)
        at = lambda f: f  # noqa: E731
        x = x.reshape(padded, tiles, plane, codes).transpose(1, 3, 0, 2)
        x_spec = pl.BlockSpec((None, codes, bm, plane), lambda m, n, k: (k, 0, m, 0))
        out_shape, out_spec = (padded, facts.n), pl.BlockSpec((bm, bn), lambda m, n, k: (m, n))
        acc = (bm, bn)

    def part_spec(rows: int, step: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, bn), at(lambda m, n, k: (lax.div(k, step), 0, n)))

    scalars = [s for s in (weight.factor, weight.table) if s is not None]
    # strided rows are read and written of scratch that is one register wide
    scratch = [pltpu.VMEM(acc, jnp.float32), pltpu.VMEM((plane * facts.unit[1], LANES), jnp.int32)]
    scratch += [pltpu.VMEM((max(rows, plane), LANES), jnp.float32) for rows in per]

    def kernel(x_ref: Any, codes_ref: Any, *refs: Any) -> None:
        part_refs, refs = refs[: len(names)], refs[len(names) :]
        scalar_refs, (out_ref, acc_ref, words_ref, *spread_refs) = refs[: len(scalars)], refs[len(scalars) :]
        factor = scalar_refs[0][0, 0] if weight.factor is not None else None
        table = scalar_refs[-1] if weight.table is not None else None
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            acc_ref[...] = jnp.zeros(acc, jnp.float32)

        def columns(c: jax.Array, carry: int) -> int:
            at = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
            plane_of = planes_of(facts, codes_ref[:, at], words_ref)
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
                w = facts.numbers.decode(plane_of(j), table)
                for name, combine in (("zero", jnp.subtract), ("scale", jnp.multiply), ("offset", jnp.add)):
                    if name in values:
                        w = combine(w, values[name](j))
                w = w.astype(facts.dtype)
                if facts.transposed:
                    acc_ref[j] += _dot(x_ref[:, at], w, 1)
                else:
                    acc_ref[:, at] += _dot(x_ref[j], w, 0)
            return carry

        lax.fori_loop(0, bn // LANES, columns, 0)

        @pl.when(step == grid[2] - 1)
        def _() -> None:
            out_ref[...] = acc_ref[...].astype(out_ref.dtype)

    item = jnp.dtype(facts.dtype).itemsize
    out = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            x_spec,
            pl.BlockSpec((word_rows, bn), at(lambda m, n, k: (k, n))),
            *(part_spec(*s) for s in block_specs),
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
        ],
        out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct(out_shape, facts.out),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * facts.m * facts.k * facts.n,
            transcendentals=0,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in (weight.codes, *blocks))
            + item * facts.m * (facts.k + facts.n),
        ),
        interpret=target.tpu(),
    )(x, weight.codes, *blocks, *scalars)
    if facts.transposed:
        out = out.transpose(2, 0, 3, 1).reshape(padded, facts.k)
    return out[: facts.m]


def _dot(x: jax.Array, w: jax.Array, over: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (over,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)


def planes_of(facts: Facts, tile: jax.Array, words_ref: Any) -> Callable[[int], jax.Array]:
    """Return a function of j: the int32 codes of plane j of a tile of words, (rows of a plane, 128).

    Args:
      facts: of the product.
      tile: the words, 128 columns.
      words_ref: int32 scratch for them.
    """
    count, bits = facts.unit[1], facts.numbers.bits
    words = pltpu.bitcast(tile, jnp.int32)
    if count > 1:
        words_ref[...] = words
        every = [words_ref[pl.ds(t, words.shape[0] // count, count), :] for t in range(count)]
    else:
        every = [words]

    def of(j: int) -> jax.Array:
        index, shift = divmod(j * bits, 32)
        code = lax.shift_right_logical(every[index], jnp.int32(shift)) if shift else every[index]
        if shift + bits > 32:
            code = code | (every[index + 1] << (32 - shift))
        return code & (2**bits - 1)

    return of


def spread_of(value: jax.Array, codes: int, plane: int, scratch: Any) -> Callable[[int], jax.Array]:
    """Return a function of j: for each row of plane j the value of its block, of a tile's blocks (blocks, 128).

    Args:
      value: of the blocks, float32.
      codes: planes.
      plane: rows of a plane.
      scratch: float32, as many rows as blocks or as a plane has.
    """
    rows = value.shape[0]
    if rows in (1, plane):
        return lambda j: value
    if rows < plane:  # a block is whole units, so that every plane has the same
        each = plane // rows
        for h in range(each):
            scratch[pl.ds(h, rows, each), :] = value
        return lambda j: scratch[...]
    each = rows // plane  # blocks of a unit
    scratch[...] = value
    return lambda j: scratch[pl.ds(j * each // codes, plane, each), :]


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
