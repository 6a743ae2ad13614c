"""The update on NVIDIA Hopper (Mosaic GPU): one pass over memory, in place.

Memory is linear, so every tile this takes is two rows of 128 columns of a matrix (R, C), and the matrix is seen as
(R / 2, 2, C). A block of 128 threads brings 2 x 128 x `pairs` elements to shared memory by TMA, and walks them in steps
of 16 pairs: eight threads share a pair, each with 16 columns of both rows, so that a scale is found with three
shuffles and everything between two shared memory accesses stays in registers. Several blocks on a multiprocessor hide
each other's copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.blockwise.codecs import codec
from pallas_kernels.blockwise.reference import inverse
from pallas_kernels.blockwise.rules import ADAMW, RULES, Rule
from pallas_kernels.dispatch import Target, hopper
from pallas_kernels.tiles import entries, lookup

LANES = 128
STEP = 8
"""Pairs of rows that 128 threads hold at once."""
GRADIENTS = ("float32", "bfloat16", "float16")
FORMATS = ("dynamic", "linear")


def supported(target: Target, **case: Any) -> str | None:
    """Why this kernel cannot serve a case, or `None`."""
    if why := hopper(target):
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
    """An array whose tile is `high` rows of 128 of a matrix (rows, columns), as it lies in memory, or why it is none."""
    size, block = math.prod(shape), math.prod(tile)
    if not size:
        return "the array is empty"
    if tile[-1] == block and block % LANES == 0:  # a run of one row: as many rows of 128
        if block == LANES or shape[-1] == block or len(shape) == 1 or shape[-1] % block == 0:
            return size // LANES, LANES, block // LANES
    if tile[-1] != LANES:
        return f"a tile's last dimension is {LANES} in a kernel, and the tile is {tile}"
    tall = [i for i, t in enumerate(tile[:-1]) if t > 1]
    if len(tall) != 1:
        return f"one dimension besides the last may be tiled in a kernel, and the tile is {tile}"
    (k,) = tall
    return math.prod(shape[: k + 1]), math.prod(shape[k + 1 :]), tile[k]


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
    """One step; arguments and results as `reference.update`."""
    matrix = as_matrix(shape, tile)
    assert not isinstance(matrix, str)
    rows, columns, high = matrix
    groups, tall = columns // LANES, rows // high
    most = lookup("blockwise", target.kind, param=param_dtype, grad=grad_dtype)["pairs"]
    pairs = max(STEP, math.gcd(tall, most))
    view = lambda x: x.reshape(tall, high, columns)  # noqa: E731
    scale_view = lambda x: x.reshape(tall, groups)  # noqa: E731
    codecs = [codec(format, signed) for signed in rule.states]
    n = len(codecs)

    vector = 16 // max(param.dtype.itemsize, grad.dtype.itemsize, 2 if apply else 4)  # 16 bytes of the widest

    # What is written over is handed in as references, so that donated arrays are updated in place.
    new_ref = functools.partial(jax.tree.map, jax.new_ref)
    out = new_ref(view(param)) if apply else jax.new_ref(jnp.zeros((tall, high, columns), jnp.float32))
    inputs = () if apply else (view(param),)
    code_refs = tuple(jax.new_ref(view(q)) for q in codes)
    scale_refs = tuple(jax.new_ref(scale_view(s)) for s in scales)

    def kernel(numbers_ref, *refs):
        refs, scratch = refs[: -(2 + n + (not apply)) - 1], refs[-(2 + n + (not apply)) - 1 :]
        *given, grad_ref, out_ref = refs[: len(inputs) + 2]
        code_refs, scale_refs = refs[len(inputs) + 2 :][:n], refs[len(inputs) + 2 + n :]
        *buffers, barriers = scratch
        p_buf, g_buf, *q_bufs = buffers[: 2 + n]
        o_buf = p_buf if apply else buffers[2 + n]
        at = (pl.ds(lax.axis_index("row") * pairs, pairs), slice(None), pl.ds(lax.axis_index("group") * LANES, LANES))
        sources = [*(given or [out_ref]), grad_ref, *code_refs]
        for i, (source, buffer) in enumerate(zip(sources, buffers, strict=False)):
            plgpu.copy_gmem_to_smem(source.at[at], buffer, barriers.at[i])
        derived = {name: numbers_ref[i] for i, name in enumerate(names)}
        wide, narrow = _layouts(vector)
        group = lax.axis_index("group")
        for i in range(2 + n):
            plgpu.barrier_wait(barriers.at[i])

        def load(buffer, rows, h):
            return plgpu.load(buffer.at[rows, h], layout=wide, optimized=False)

        def spread(x):
            return lax.broadcast_in_dim(x, (STEP, LANES), (0,))

        def step(i, carry):
            here = pl.ds(i * STEP, STEP)
            there = pl.ds(lax.axis_index("row") * pairs + i * STEP, STEP)
            old = [spread(plgpu.load(s.at[there, group], layout=narrow, optimized=False)) for s in scale_refs]
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
                plgpu.store(scale_refs[k].at[there, group], top, optimized=False)
                by = spread(inverse(top))
                for h in range(high):
                    buffer[here, h] = code.encode(fresh[h][k] * by)
            return carry

        lax.fori_loop(0, pairs // STEP, step, 0)
        plgpu.commit_smem()
        for buffer, ref in zip([o_buf, *q_bufs], [out_ref, *code_refs], strict=True):
            plgpu.copy_smem_to_gmem(buffer, ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    block = (pairs, high, LANES)
    buffers = [plgpu.SMEM(block, param.dtype), plgpu.SMEM(block, grad.dtype)]
    buffers += [plgpu.SMEM(block, q.dtype) for q in codes]
    buffers += [] if apply else [plgpu.SMEM(block, jnp.float32)]
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(tall // pairs, groups),
        grid_names=("row", "group"),
        scratch_types=[*buffers, plgpu.Barrier(num_barriers=2 + n)],
        **target.gpu(),
    )(numbers, *inputs, view(grad), out, *code_refs, *scale_refs)
    back = lambda ref, like: ref[...].reshape(like)  # noqa: E731
    return (
        back(out, shape),
        tuple(back(r, shape) for r in code_refs),
        tuple(back(r, s.shape) for r, s in zip(scale_refs, scales, strict=True)),
    )


def _layouts(vector: int) -> tuple[Any, Any]:
    """Of (16, 128) elements over 128 threads, and of 16 values, one a row.

    A warp has 4 rows, eight lanes to a row; a lane has runs of `vector` columns, 16 in all.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    tiling = fa.Tiling(((STEP, LANES), (STEP // 4, 128 // STEP * vector), (vector,)))
    wide = plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)
    return wide, wide.reduce(1)


def configurations() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """What ships, for the gate: (name, function, shapes) at Llama-3-8B's per-device sizes."""
    yield from ()
