"""The update on TPUs (Mosaic TPU): one pass over memory, in place.

There are two forms, by the layout of the tile's rows, so that no parameter needs another layout for the kernel. In a
matrix, a tile is `high` neighbouring rows of 128 lanes: lanes and then rows are reduced in registers, the rows by
rolls. In a stack of matrices (an attention projection (E, heads, 128) with the tile (2, 1, 128)), a tile is `high`
neighbours of the stack; there the scales, padded to registers, take as many bytes as a bfloat16 parameter.
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blockwise import examples
from pallas_kernels.blockwise.codecs import Codec, codec
from pallas_kernels.blockwise.reference import magnitude, scaled
from pallas_kernels.blockwise.rules import ADAMW, LION, RULES, Rule
from pallas_kernels.dispatch import Target
from pallas_kernels.tiles import lookup

LANES = 128
PACKED = 32
"""Rows of a register of 8-bit numbers."""
FLOATS = ("float32", "bfloat16")
FORMATS = ("dynamic", "linear")
WIDEST = LANES * LANES
"""Columns of a block of a matrix: their scales fill the lanes of a register, so more columns need several blocks."""
VMEM = 48 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""


def supported(target: Target, **case: Any) -> str | None:
    """Return why this kernel cannot serve a case, or `None`."""
    if case["flat"] is not None:
        return "the flat form has no kernel; quantise by tiles (tile_for)"
    if case["format"] not in FORMATS:
        return f"there are kernels for the formats {' and '.join(map(repr, FORMATS))}, not '{case['format']}'"
    for what in ("param", "grad"):
        if case[f"{what}_dtype"] not in FLOATS:
            return f"a TPU kernel takes {' and '.join(FLOATS)}, and the {what} is {case[f'{what}_dtype']}"
    form = as_stack(case["shape"], case["tile"])
    if isinstance(form, str):
        return form
    needed = _unit(form) * _row_bytes(form, _element_bytes(**case)) * 2
    if needed > VMEM:
        return f"the smallest block of {case['shape']} in tiles of {case['tile']} takes {needed} bytes of VMEM"
    return None


def _element_bytes(*, rule: Rule, param_dtype: str, grad_dtype: str, apply: bool, **_: Any) -> int:
    """Bytes that are read and written per element."""
    param, grad = jnp.dtype(param_dtype).itemsize, jnp.dtype(grad_dtype).itemsize
    return param + grad + (param if apply else 4) + 2 * len(rule.states)


def _unit(form: tuple[int, int, int, int]) -> int:
    """Rows of the smallest block: whole registers of codes and of scales."""
    _, middle, _, high = form
    return max(PACKED, 8 * high) if middle == 1 else high


def _row_bytes(form: tuple[int, int, int, int], element: int) -> int:
    """Bytes of a block's row in VMEM, padded to registers."""
    _, middle, columns, _ = form
    return element * (min(columns, WIDEST) if middle == 1 else -(-middle // PACKED) * PACKED * columns)


def as_stack(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, int, int, int] | str:
    """Return (stack, middle, columns, high) of the array in tiles (high, 1, 128), or why there is none.

    With middle = 1 it is a matrix.
    """
    if not math.prod(shape):
        return "the array is empty"
    if len(shape) < 2 or tile[-1] != LANES:
        return f"a tile's last dimension is {LANES} of a matrix in a kernel, and the tile is {tile} of {shape}"
    tall = [i for i, t in enumerate(tile[:-1]) if t > 1]
    if not tall:  # tiles of one row: rows of a matrix where they fill registers, else a stack of matrices with few rows
        few = len(shape) > 2 and shape[-2] % PACKED
        tall = [len(shape) - (3 if few else 2)]
    if len(tall) != 1:
        return f"one dimension besides the last may be tiled in a kernel, and the tile is {tile}"
    (k,) = tall
    high, between = tile[k], shape[k + 1 : -1]
    if high > 8:
        return f"a tile has at most 8 rows in a kernel, and the tile is {tile}"
    if len(between) > 1:
        return f"one dimension may stand between the tiled ones in a kernel, and {shape} has {len(between)}"
    stack, columns = math.prod(shape[: k + 1]), shape[-1]
    if between:
        if columns > 8 * LANES:
            return f"heads of at most {8 * LANES} fit a kernel, and {shape} has {columns}"
        return stack, between[0], columns, high
    if k and shape[k] % PACKED:
        return f"stacked matrices have a multiple of {PACKED} rows in a kernel, and {shape} has {shape[k]}"
    return stack, 1, columns, high


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
    form = as_stack(shape, tile)
    assert not isinstance(form, str)
    stack, middle, columns, high = form
    matrix = middle == 1
    whole = (stack, columns) if matrix else (stack, middle, columns)
    small = (stack // high, columns // LANES) if matrix else (stack // high, middle, columns // LANES)
    codecs = [codec(format, signed) for signed in rule.states]
    n = len(codecs)
    out_dtype = param.dtype if apply else jnp.dtype(jnp.float32)

    # As many rows as fit: blocks are double-buffered, and one has float32 scratch.
    element = _element_bytes(rule=rule, param_dtype=param_dtype, grad_dtype=grad_dtype, apply=apply)
    unit = _unit(form)
    most = lookup("blockwise", target.kind, form="matrix" if matrix else "stack")["bytes"]
    rows = max(unit, most // (2 * _row_bytes(form, element)) // unit * unit)
    rows = stack if rows >= stack else rows
    width = min(columns, WIDEST) if matrix else columns
    groups = width // LANES

    def specs(array: tuple[int, ...], count: int, divide: int, last: int) -> list[pl.BlockSpec]:
        between = array[1:-1]
        block = (rows // divide, *between, last)
        return [pl.BlockSpec(block, lambda i, j: (i, *[0] * len(between), j))] * count

    body = _matrix_kernel if matrix else _stack_kernel
    aliases = ({1: 0} if apply else {}) | {3 + i: 1 + i for i in range(2 * n)}
    if target.interpret and (stack % rows or columns % width):
        aliases = {}  # jax 0.10's interpreter returns an aliased array with its last block padded

    def kernel(numbers_ref: Any, p: Any, g: Any, *refs: Any) -> None:
        derived = {name: numbers_ref[i] for i, name in enumerate(names)}
        old_codes, old_scales, out, new_codes = refs[:n], refs[n : 2 * n], refs[2 * n], refs[2 * n + 1 : 3 * n + 1]
        new_scales, scratch = refs[3 * n + 1 : 4 * n + 1], refs[4 * n + 1 :]
        states = list(zip(codecs, old_codes, old_scales, new_codes, new_scales, strict=True))
        body(rule, derived, apply, high, p, g, out, states, scratch)

    result = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(stack, rows), pl.cdiv(columns, width)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *specs(whole, 2 + n, 1, width),
            *specs(small, n, high, groups),
        ],
        out_specs=[*specs(whole, 1 + n, 1, width), *specs(small, n, high, groups)],
        out_shape=[
            jax.ShapeDtypeStruct(whole, out_dtype),
            *(jax.ShapeDtypeStruct(whole, q.dtype) for q in codes),
            *(jax.ShapeDtypeStruct(small, jnp.float32) for _ in scales),
        ],
        scratch_shapes=[pltpu.VMEM((rows, groups), jnp.float32)] * (n if matrix else 0),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=60 * math.prod(shape),
            transcendentals=math.prod(shape),
            bytes_accessed=element * math.prod(shape),
        ),
        interpret=target.tpu(),
    )(numbers, *(x.reshape(whole) for x in (param, grad, *codes)), *(s.reshape(small) for s in scales))
    out, new_codes, new_scales = result[0], result[1 : 1 + n], result[1 + n :]
    return (
        out.reshape(shape),
        tuple(q.reshape(shape) for q in new_codes),
        tuple(a.reshape(s.shape) for a, s in zip(new_scales, scales, strict=True)),
    )


def _matrix_kernel(
    rule: Rule,
    derived: dict[str, Any],
    apply: bool,
    high: int,
    p_ref: Any,
    g_ref: Any,
    out_ref: Any,
    states: list[tuple[Codec, Any, Any, Any, Any]],
    wide: Any,
) -> None:
    """Process a block of whole rows, 128 columns at a time; `wide` holds a scale for each row, not each `high` rows."""
    rows, columns = p_ref.shape
    few, groups = rows // high, columns // LANES
    for (_, _, scale_ref, _, _), scratch in zip(states, wide, strict=True):
        for h in range(high):
            scratch[pl.ds(h, few, high), :] = scale_ref[...]
    lane = lax.broadcasted_iota(jnp.int32, (rows, groups), 1)
    row = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)

    def over_tile(x: jax.Array) -> jax.Array:
        """Return the maximum of each tile, in all its rows and lanes."""
        x = jnp.broadcast_to(jnp.max(x, axis=1, keepdims=True), x.shape)
        d = 1
        while d < high:
            x = jnp.maximum(x, jnp.where((row & d) == 0, pltpu.roll(x, rows - d, 0), pltpu.roll(x, d, 0)))
            d *= 2
        return x

    def group(j: jax.Array, tops: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = pl.ds(pl.multiple_of(j * LANES, LANES), LANES)
        old = [jnp.sum(jnp.where(lane == j, scratch[...], 0.0), axis=1, keepdims=True) for scratch in wide]
        decoded = tuple(c.decode(q[:, at].astype(jnp.int32)) * s for (c, q, *_), s in zip(states, old, strict=True))
        p = p_ref[:, at].astype(jnp.float32)
        change, new = rule.step(p, g_ref[:, at].astype(jnp.float32), decoded, derived)
        out_ref[:, at] = (p + change).astype(out_ref.dtype) if apply else change
        new_tops = []
        for (c, _, _, q_ref, _), x, top in zip(states, new, tops, strict=True):
            largest = over_tile(magnitude(x))
            q_ref[:, at] = c.encode_moment(scaled(x, largest))
            new_tops.append(jnp.where(lane == j, largest[:, :1], top))
        return tuple(new_tops)

    tops = lax.fori_loop(0, groups, group, tuple(jnp.zeros((rows, groups), jnp.float32) for _ in states))
    for (*_, scale_ref), scratch, top in zip(states, wide, tops, strict=True):
        scratch[...] = top
        scale_ref[...] = scratch[pl.ds(0, few, high), :]


def _stack_kernel(
    rule: Rule,
    derived: dict[str, Any],
    apply: bool,
    high: int,
    p_ref: Any,
    g_ref: Any,
    out_ref: Any,
    states: list[tuple[Codec, Any, Any, Any, Any]],
    scratch: Any,
) -> None:
    """Process a block of matrices, a few tiles at a time."""
    stack, middle, columns = p_ref.shape

    few = math.gcd(8, stack // high)  # tiles at a time

    def one(i: jax.Array, carry: int) -> int:
        at, scales = pl.ds(i * few * high, few * high), pl.ds(i * few, few)
        for j in range(columns // LANES):
            lanes = slice(j * LANES, (j + 1) * LANES)
            decoded = tuple(
                c.decode(q[at, :, lanes].astype(jnp.int32)) * over(s[scales, :, j : j + 1]) for c, q, s, _, _ in states
            )
            p = p_ref[at, :, lanes].astype(jnp.float32)
            change, new = rule.step(p, g_ref[at, :, lanes].astype(jnp.float32), decoded, derived)
            out_ref[at, :, lanes] = (p + change).astype(out_ref.dtype) if apply else change
            for (c, _, _, q_ref, scale_ref), x in zip(states, new, strict=True):
                tall = magnitude(x).reshape(few, high, middle, LANES)
                largest = jnp.max(jnp.max(tall, axis=1), axis=2, keepdims=True)
                scale_ref[scales, :, j : j + 1] = largest
                q_ref[at, :, lanes] = c.encode_moment(scaled(x, over(largest)))
        return carry

    def over(scales: jax.Array) -> jax.Array:
        """Repeat a scale for every row of its tile."""
        wide = jnp.broadcast_to(scales[:, None], (few, high, middle, 1))
        return wide.reshape(few * high, middle, 1)

    lax.fori_loop(0, stack // high // few, one, 0)


def configurations(op: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate.

    The shapes are those of Llama-3-8B on one device, and each rule occurs at least once.
    """
    case = functools.partial(examples.case, op, "mosaic_tpu")
    for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        for name, shape, tile in examples.LLAMA:
            if not isinstance(as_stack(shape, tile), str):
                yield case(f"adamw {dtype} {name}", ADAMW, shape, tile, dtype, dtype)
        for rule in [r for r in RULES.values() if r not in (ADAMW, LION)]:
            yield case(f"{rule.name} {dtype}", rule, (4096, 1792), (1, 128), dtype, dtype)
        yield case(f"wide {dtype}", ADAMW, (512, 28672), (1, 128), dtype, dtype)
        for tile in ((2, 128), (8, 128)):
            yield case(f"adamw {dtype} {tile}", ADAMW, (4096, 1792), tile, dtype, dtype)
        yield case(f"update {dtype}", ADAMW, (4096, 1792), (1, 128), dtype, dtype, apply=False)
        for format in FORMATS:
            name = f"lion {dtype} {format}"
            yield case(name, LION, (4096, 1792), (1, 128), dtype, dtype, format=format)
