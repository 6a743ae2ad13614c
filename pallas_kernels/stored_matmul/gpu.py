"""The product on Hopper (Mosaic GPU): planes of codes are unpacked in registers and multiplied from shared memory.

A block of one warpgroup has 64 rows of x and 128 columns of the matrix. Code j of each byte makes plane j: TMA copies
tiles of bytes as they are, a shift and a mask unpack a plane of 64 rows, and wgmma multiplies it with the same columns
of x, which is put in the order of the planes beforehand. Where these blocks would leave multiprocessors idle, several
share the columns, each with a part of the matrix's rows, and XLA adds their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.dispatch import HOPPER, Target, hopper
from pallas_kernels.stored_matmul import examples
from pallas_kernels.stored_matmul.examples import FORMATS
from pallas_kernels.stored_matmul.inputs import Facts, Packed, checked
from pallas_kernels.stored_matmul.numbers import Codebook, Table

plgpu: Any = mosaic_gpu  # its names differ between versions

ROWS = 64
"""Rows of x of a block, and of the matrix in a plane."""
COLUMNS = 128
"""Columns of a block."""
DTYPES = ("bfloat16", "float16")
_GROUPS = 4  # blocks of scales of a tile: with 8, registers spill
_RESIDENT = 2  # blocks that a multiprocessor runs at a time, by their shared memory
_TILES = 4  # fewest tiles of a block, so that its copies run ahead of its products


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if why := hopper(target):
        return why
    if facts.dtype not in DTYPES:
        return f"Hopper's tensor cores take {' and '.join(DTYPES)}, and {facts.dtype} is left to XLA"
    if facts.transposed:
        return "the product with the transpose is left to XLA"
    if facts.word != "uint8":
        return f"a kernel for GPUs takes codes packed in uint8, not {facts.word}"
    if isinstance(facts.numbers, (Codebook, Table)):
        return "numbers of a table are left to XLA (registers spill)"
    if not facts.m:
        return "x has no rows"
    codes = 8 // facts.numbers.bits
    tile = ROWS * codes
    if facts.numbers.bits not in (4, 8):
        return f"a kernel for GPUs takes codes of 4 or 8 bits; those of {facts.numbers.bits} are left to XLA"
    if facts.k % tile or facts.n % COLUMNS:
        return (
            f"of {facts.numbers.bits} bits a kernel takes multiples of {tile} rows and {COLUMNS} columns, not "
            f"{facts.k} and {facts.n}"
        )
    for name, blocks, _ in facts.parts:
        group = facts.k // blocks
        if group % codes or (tile % group and group % tile) or tile // group > _GROUPS:
            return f"{name}s for {group} rows each are not 1 to {_GROUPS} of a tile of {tile} rows"
    return None


def splits_of(cores: int, blocks: int, tiles: int) -> int:
    """Return how many blocks share the rows of the matrix: a divisor of its tiles, 1 where blocks abound."""
    most = max(1, min(_RESIDENT * cores // blocks, tiles // _TILES))
    return next(s for s in range(most, 0, -1) if tiles % s == 0)


def run(target: Target, x: jax.Array, weight: Packed, *, facts: Facts) -> jax.Array:
    """Return the product."""
    bits, dtype, k, n = facts.numbers.bits, jnp.dtype(facts.dtype), facts.k, facts.n
    codes = 8 // bits
    slots = 2  # tiles in flight
    tiles, padded = k // (ROWS * codes), -(-facts.m // ROWS) * ROWS
    lines = sum(max(1, blocks // tiles) for _, blocks, _ in facts.parts)  # of scales and offsets, for a tile
    splits = 1  # registers would spill where there are many lines
    if lines <= _GROUPS:
        splits = splits_of(target.cores, padded // ROWS * (n // COLUMNS), tiles)
    each, rows = tiles // splits, min(ROWS, -(-facts.m // 8) * 8)  # rows of a block that are stored
    x = jnp.pad(x, ((0, padded - facts.m), (0, 0)))
    x = x.reshape(padded, tiles, ROWS, codes).transpose(1, 3, 0, 2)
    names = [name for name, _, _ in facts.parts]
    parts = [jnp.broadcast_to(getattr(weight, name), (blocks, n)) for name, blocks, _ in facts.parts]
    if weight.factor is not None:
        parts.append(weight.factor.reshape(1))
    row_layout, wide = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA
    shape = (ROWS, COLUMNS)

    def kernel(x_ref: Any, words_ref: Any, *refs: Any) -> None:
        part_refs, (out_ref, x_s, words_s, w_s, out_s, x_full, words_full) = refs[: len(parts)], refs[len(parts) :]
        m0, n0 = lax.axis_index("m") * ROWS, lax.axis_index("n") * COLUMNS
        split, at = lax.axis_index("split"), pl.ds(n0, COLUMNS)
        begin = split * each if splits > 1 else jnp.int32(0)
        row = plgpu.layout_cast(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=wide), wide)

        def bring(t: Any) -> None:
            slot = lax.rem(t, slots)
            plgpu.copy_gmem_to_smem(x_ref.at[t, :, pl.ds(m0, ROWS)], x_s.at[slot], x_full.at[slot])
            tile = words_ref.at[pl.ds(t * ROWS, ROWS), at]
            plgpu.copy_gmem_to_smem(tile, words_s.at[slot], words_full.at[slot])

        for t in range(min(slots, each)):
            bring(begin + t)

        def values(t: Any) -> dict[str, Any]:
            """Return each part's values for the rows of a plane."""
            every = {}
            for name, (_, blocks, _), ref in zip(names, facts.parts, part_refs, strict=False):
                few = max(1, blocks // tiles)
                first = t * few if blocks >= tiles else lax.div(t, tiles // blocks)
                value = None
                for i in range(few):
                    line = plgpu.load(ref.at[first + i, at], layout=row_layout, optimized=False)
                    if ref.dtype == jnp.uint8:
                        line = weight.of(name).decode(line.astype(jnp.int32))
                    line = line.astype(jnp.float32)
                    if name == "scale" and weight.factor is not None:
                        line = line * part_refs[-1][0]
                    line = lax.broadcast_in_dim(line, shape, (1,))
                    value = line if value is None else jnp.where(row >= i * (ROWS // few), line, value)
                every[name] = value
            return every

        def step(t: Any, total: Any) -> Any:
            slot = lax.rem(t, slots)
            plgpu.barrier_wait(words_full.at[slot])
            plgpu.barrier_wait(x_full.at[slot])
            of = values(t)
            raw = plgpu.load(words_s.at[slot], layout=wide, optimized=False).astype(jnp.int32)
            for j in range(codes):
                code = lax.shift_right_logical(raw, jnp.int32(j * bits)) if j else raw
                w = facts.numbers.decode(code & (2**bits - 1))
                for name, combine in (("zero", jnp.subtract), ("scale", jnp.multiply), ("offset", jnp.add)):
                    if name in of:
                        w = combine(w, of[name])
                w_s[j] = plgpu.layout_cast(w.astype(dtype), wide)
            plgpu.commit_smem()

            def multiply(acc: Any) -> Any:
                for j in range(codes):
                    plgpu.wgmma(acc, x_s.at[slot, j], w_s.at[j])
                return acc[...]

            total = total + pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

            @pl.when(t + slots < begin + each)
            def _() -> None:
                bring(t + slots)

            return total

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), wide)
        out_s[...] = lax.fori_loop(begin, begin + each, step, zeros)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, rows)], out_ref.at[split, pl.ds(m0, rows), at])
        plgpu.wait_smem_to_gmem(0)

    def swizzled(*buffer: int) -> Any:
        return plgpu.SMEM(buffer, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, padded - ROWS + rows, n), jnp.float32),
        grid=(padded // ROWS, n // COLUMNS, splits),
        grid_names=("m", "n", "split"),
        scratch_types=[
            swizzled(slots, codes, ROWS, ROWS),
            plgpu.SMEM((slots, ROWS, COLUMNS), jnp.uint8),
            swizzled(codes, ROWS, COLUMNS),
            plgpu.SMEM(shape, jnp.float32),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        **target.gpu(),
    )(x, weight.codes, *parts)
    return jnp.sum(out, axis=0)[: facts.m].astype(facts.out)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    for name, options in FORMATS.items():
        weight = examples.shapes(4096, 14336, **options)
        for m in (16, 1024) if name.startswith("int4, groups") else (16,):
            fn, arrays = examples.case(run, weight, m)
            if supported(Target(HOPPER[1], "cuda"), facts=checked(arrays[0], arrays[1], False, None)) is None:
                yield f"{name}, {m} rows", fn, arrays
