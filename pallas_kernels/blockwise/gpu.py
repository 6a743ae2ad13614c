"""The update on NVIDIA Hopper and Blackwell (Mosaic GPU): one pass over memory, in place.

Memory is linear, so every supported tile is `high` rows of 128 columns of a matrix (R, C), usually one row, and the
matrix is viewed as (R / high, high, C). A block of 128 threads copies 256 x `pairs` elements to shared memory by TMA
and
processes 8 tiles per step: sixteen threads share a tile, each with 8 columns of its rows, so that four shuffles compute
a scale, and everything between two accesses to shared memory stays in registers. Several blocks on a multiprocessor
hide each other's copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.blockwise import examples
from pallas_kernels.blockwise.codecs import codec
from pallas_kernels.blockwise.reference import inverse
from pallas_kernels.blockwise.rules import ADAMW, LION, RULES, Rule
from pallas_kernels.dispatch import HOPPER, Target, hopper
from pallas_kernels.tiles import entries, lookup

LANES = 128
GATED = ("h200", "b200")
"""Devices that the gate compiles for."""
STEP = 8
"""Tiles that 128 threads process at once."""
GRADIENTS = ("float32", "bfloat16", "float16")
FORMATS = ("dynamic", "linear")


def supported(target: Target, **case: Any) -> str | None:
    """Return why this kernel cannot serve a case, or `None`."""
    if why := hopper(target, blackwell=True):
        return why
    if case["flat"] is not None:
        return "the flat form has no kernel; quantise by tiles (tile_for)"
    if case["format"] not in FORMATS:
        return f"there are kernels for the formats {' and '.join(map(repr, FORMATS))}, not '{case['format']}'"
    if case["grad_dtype"] not in GRADIENTS:
        return f"gradients are {', '.join(GRADIENTS)} in a kernel, not {case['grad_dtype']}"
    matrix = as_matrix(case["shape"], case["tile"])
    if isinstance(matrix, str):
        return matrix
    rows, _, high = matrix
    if (rows // high) % STEP:
        return f"it takes blocks of {STEP} tiles of {high} rows, and the {rows} rows of {case['shape']} are no multiple"
    return None


def as_matrix(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, int, int] | str:
    """Return (rows, columns, high) of the array as a matrix with tiles of `high` rows of 128, or why there is none."""
    size, block = math.prod(shape), math.prod(tile)
    if not size:
        return "the array is empty"
    if _is_run(shape, tile) and block % LANES == 0:  # seen as `high` rows of 128
        return size // LANES, LANES, block // LANES
    if tile[-1] != LANES:
        return (
            f"a tile's last dimension is {LANES}, or it is a run of a multiple of it in memory, in a kernel; "
            f"the tile is {tile}"
        )
    tall = [i for i, t in enumerate(tile[:-1]) if t > 1]
    if len(tall) != 1:
        return f"one dimension besides the last may be tiled in a kernel, and the tile is {tile}"
    (k,) = tall
    return math.prod(shape[: k + 1]), math.prod(shape[k + 1 :]), tile[k]


def _is_run(shape: tuple[int, ...], tile: tuple[int, ...]) -> bool:
    """Whether a tile's elements are neighbours in memory: part of a row, or whole heads, (1, 2, 64) of (E, H, 64)."""
    first = next((i for i, t in enumerate(tile) if t > 1), len(tile) - 1)
    return tile[first + 1 :] == shape[first + 1 :]


def run(
    target: Target,
    numbers: jax.Array,
    param: jax.Array,
    grad: jax.Array,
    codes: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    *,
    rule: Rule,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    tile: tuple[int, ...],
    flat: int | None,
    format: str,
    param_dtype: str,
    grad_dtype: str,
    apply: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Take one step; arguments and results are those of `reference.update`."""
    matrix = as_matrix(shape, tile)
    assert not isinstance(matrix, str)
    rows, columns, high = matrix
    groups, tall = columns // LANES, rows // high
    most = lookup("blockwise", target.kind, param=param_dtype, grad=grad_dtype)["pairs"]
    pairs = max(STEP, math.gcd(tall, most * 2 // high))  # tiles of a block, with as many bytes as tiles of two rows
    codecs = [codec(format, signed) for signed in rule.states]
    n = len(codecs)

    vector = 16 // max(param.dtype.itemsize, grad.dtype.itemsize, 2 if apply else 4)  # 16 bytes of the widest

    # Arrays that are updated are passed as references, so that donated ones are updated in place.
    p, g, *qs = (x.reshape(tall, high, columns) for x in (param, grad, *codes))
    p_io = jax.new_ref(p) if apply else p
    codes_io = tuple(map(jax.new_ref, qs))
    scales_io = tuple(jax.new_ref(s.reshape(tall, groups)) for s in scales)

    def blockwise_update(numbers_ref: Any, g_ref: Any, *refs: Any) -> None:
        code_refs, scale_refs, p_ref, rest = refs[:n], refs[n : 2 * n], refs[2 * n], refs[2 * n + 1 :]
        out_ref, rest = (p_ref, rest) if apply else (rest[0], rest[1:])
        *buffers, barriers = rest
        p_buf, g_buf, *q_bufs = buffers[: 2 + n]
        o_buf = p_buf if apply else buffers[2 + n]
        block = lax.axis_index("block")  # the grid has one dimension: CUDA's others end at 65535
        row, group = lax.div(block, groups) * pairs, lax.rem(block, groups)
        at = (pl.ds(row, pairs), slice(None), pl.ds(group * LANES, LANES))
        for i, (source, buffer) in enumerate(zip([p_ref, g_ref, *code_refs], buffers[: 2 + n], strict=True)):
            plgpu.copy_gmem_to_smem(source.at[at], buffer, barriers.at[i])
        derived = {name: numbers_ref[i] for i, name in enumerate(names)}
        wide, narrow = _layouts(vector)
        for i in range(2 + n):
            plgpu.barrier_wait(barriers.at[i])

        def load(buffer: Any, rows: Any, h: Any) -> Any:
            return plgpu.load(buffer.at[rows, h], layout=wide, optimized=False)  # type: ignore[call-arg]

        def spread(x: Any) -> Any:
            return lax.broadcast_in_dim(x, (STEP, LANES), (0,))

        def step(i: Any, carry: Any) -> Any:
            here = pl.ds(i * STEP, STEP)
            tile_rows = pl.ds(row + i * STEP, STEP)
            scale_slices = [s.at[tile_rows, group] for s in scale_refs]
            old = [spread(plgpu.load(s, layout=narrow, optimized=False)) for s in scale_slices]  # type: ignore[call-arg]
            fresh = []
            for h in range(high):
                p = load(p_buf, here, h).astype(jnp.float32)
                g = load(g_buf, here, h).astype(jnp.float32)
                states = tuple(c.decode(load(b, here, h)) * s for c, b, s in zip(codecs, q_bufs, old, strict=True))
                change, new = rule.step(p, g, states, derived)
                o_buf[here, h] = (p + change).astype(o_buf.dtype) if apply else change
                fresh.append(new)
            for k, (code, buffer) in enumerate(zip(codecs, q_bufs, strict=True)):
                size = [jnp.abs(new[k]) if code.signed else new[k] for new in fresh]
                top = jnp.max(functools.reduce(jnp.maximum, size), axis=1)
                _store(scale_refs[k].at[tile_rows, group], top)
                first, second = (spread(x) for x in inverse(top))
                for h in range(high):
                    buffer[here, h] = code.encode_moment(fresh[h][k] * first * second)
            return carry

        lax.fori_loop(0, pairs // STEP, step, 0)
        plgpu.commit_smem()
        for buffer, ref in zip([o_buf, *q_bufs], [out_ref, *code_refs], strict=True):
            plgpu.copy_smem_to_gmem(buffer, ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    shared = (pairs, high, LANES)
    buffers = [plgpu.SMEM(shared, param.dtype), plgpu.SMEM(shared, grad.dtype)]
    buffers += [plgpu.SMEM(shared, q.dtype) for q in codes]
    buffers += [] if apply else [plgpu.SMEM(shared, jnp.float32)]
    made = plgpu.kernel(
        blockwise_update,
        out_type=() if apply else (jax.ShapeDtypeStruct((tall, high, columns), jnp.float32),),
        grid=(tall // pairs * groups,),
        grid_names=("block",),
        scratch_types=[*buffers, plgpu.Barrier(num_barriers=2 + n)],
        **target.gpu(),
    )(numbers, g, *codes_io, *scales_io, p_io)
    out = p_io[...] if apply else made[0]
    return (
        out.reshape(shape),
        tuple(ref[...].reshape(shape) for ref in codes_io),
        tuple(ref[...].reshape(s.shape) for ref, s in zip(scales_io, scales, strict=True)),
    )


def _store(ref: Any, value: Any) -> None:
    """Store an array too small for wide stores, which jax 0.12 and newer allow only by an option."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _layouts(vector: int) -> tuple[Any, Any]:
    """Return layouts of (8, 128) elements over 128 threads, and of 8 values, one per row.

    A warp has 2 rows, with sixteen lanes per row; a lane has runs of `vector` columns, 8 in all.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    tiling = fa.Tiling(((STEP, LANES), (STEP // 4, 128 // STEP * vector), (vector,)))
    wide = plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)
    return wide, wide.reduce(1)


def configurations(op: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate.

    The shapes are those of Llama-3-8B on one device, and each rule occurs at least once.
    """
    case = functools.partial(examples.case, op, "mosaic_gpu")
    for entry in entries("blockwise"):
        if not any(name in entry["device"] for name in HOPPER):
            continue
        key = entry["key"]
        dtypes = jnp.dtype(key["param"]), jnp.dtype(key["grad"])
        if key["param"] != key["grad"]:
            name = f"adamw {key['param']} gradient {key['grad']}"
            yield case(name, ADAMW, (4096, 1792), (1, 128), *dtypes)
            continue
        for name, shape, tile in examples.LLAMA:
            yield case(f"adamw {key['param']} {name}", ADAMW, shape, tile, *dtypes)
        yield case(f"adamw {key['param']} heads of 64", ADAMW, (2048, 4, 64), (1, 2, 64), *dtypes)
        for rule in [r for r in RULES.values() if r not in (ADAMW, LION)]:
            yield case(f"{rule.name} {key['param']}", rule, (4096, 1792), (1, 128), *dtypes)
        yield case(f"update {key['param']}", ADAMW, (4096, 1792), (1, 128), *dtypes, apply=False)
        for format in FORMATS:
            name = f"lion {key['param']} {format}"
            yield case(name, LION, (4096, 1792), (1, 128), *dtypes, format=format)
