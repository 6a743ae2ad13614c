"""Softmax for TPUs in Mosaic: a row is read once where it fits in VMEM, else twice in chunks, and written once.

As on a GPU (see `gpu.py`), the scale of a row's partial sum is in units of the input. It stays in VMEM between chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import NO_FLOAT16, Target
from pallas_kernels.softmax.pairs import HIGHEST, LOWEST
from pallas_kernels.tiles import entries, lookup

VMEM_LIMIT = 48 * 2**20
"""Bytes that Mosaic may use; the smallest VMEM among v5e, v5p, v6e and tpu7x has 64 MiB."""

WHOLE_ROWS = 24 * 2**20
"""Bytes that a block of whole rows may take: double-buffered inputs and output, and float32 temporaries."""

_LANES = 128


def supported(target: Target, *, rows: int, columns: int, dtype: str, masked: bool, inputs: int) -> str | None:
    """Return why the kernels cannot run, or `None`; the arguments are those of `gpu.supported`."""
    if masked:
        return "a mask is left to XLA, which fuses it with its own reads"
    if dtype == "float16":
        return NO_FLOAT16
    return None


# ---- the arithmetic on a row


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Two passes over blocks of rows, in float32; statistics are columns (rows, 1).

    Args:
      pads: for each input, the number that fills the row beyond its end.
      begin: initial statistics.
      gather: statistics and a block of each input -> statistics.
      result: statistics and a block of each input -> a block of the output, or two columns.
    """

    pads: tuple[float, ...]
    begin: tuple[float, ...]
    gather: Callable[..., tuple[jax.Array, ...]]
    result: Callable[..., jax.Array]


def _gather_sum(stats: Sequence[jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    old, total = stats
    # Finite, so that infinity makes the sum infinite and not NaN, and a row of minus infinity sums to 0.
    new = jnp.clip(jnp.maximum(old, jnp.max(x, axis=1, keepdims=True)), LOWEST, HIGHEST)
    return new, total * jnp.exp(old - new) + jnp.sum(jnp.exp(x - new), axis=1, keepdims=True)


def _finite(total: jax.Array) -> jax.Array:
    return jnp.where(total <= HIGHEST, total, jnp.nan)  # +inf in the row: all NaN


def _softmax(stats: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    scale, total = stats
    return jnp.exp(x - scale) * (1 / _finite(total))


def _log_softmax(stats: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    scale, total = stats
    return (x - scale) - jnp.log(_finite(total))


def _sums(stats: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    scale, total = stats
    return jnp.where(lax.broadcasted_iota(jnp.int32, (scale.shape[0], 2), 1) == 0, scale, total)


def _gather_dot(stats: Sequence[jax.Array], y: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    return (stats[0] + jnp.sum(y * g, axis=1, keepdims=True),)


def _gather_both(stats: Sequence[jax.Array], x: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    return *_gather_sum(stats[:2], x), stats[2] + jnp.sum(g, axis=1, keepdims=True)


def _log_softmax_backward(stats: Sequence[jax.Array], x: jax.Array, g: jax.Array) -> jax.Array:
    return g - _softmax(stats[:2], x) * stats[2]


SWEEPS = {
    "softmax": Sweep((-jnp.inf,), (LOWEST, 0.0), _gather_sum, _softmax),
    "log_softmax": Sweep((-jnp.inf,), (LOWEST, 0.0), _gather_sum, _log_softmax),
    "sums": Sweep((-jnp.inf,), (LOWEST, 0.0), _gather_sum, _sums),
    # softmax's output and dL/dy -> dL/dx
    "softmax_backward": Sweep((0.0, 0.0), (0.0,), _gather_dot, lambda stats, y, g: y * (g - stats[0])),
    # log_softmax's input and dL/dy -> dL/dx: exp of a rounded output would be off by its magnitude
    "log_softmax_backward": Sweep((-jnp.inf, 0.0), (LOWEST, 0.0, 0.0), _gather_both, _log_softmax_backward),
}
"""A sweep for each op, by its name."""


# ---- reading a row once or twice


def sweep_rows(target: Target, op: str, arrays: Sequence[jax.Array], *, block: int, chunk: int) -> jax.Array:
    """Run one of `SWEEPS` over the rows of matrices (R, C) of one dtype.

    Args:
      target: the device to compile for.
      op: a key of `SWEEPS`.
      arrays: the inputs, all of one shape and dtype.
      block: elements that a block of whole rows should have.
      chunk: columns of a chunk of a row that does not fit, a multiple of 128.

    Returns:
      (R, C) in the inputs' dtype; for "sums" (R, 2) in float32: a scale, and the sum of exp(x - scale).
    """
    rows, columns = arrays[0].shape
    most = whole_rows(columns, arrays[0].dtype, len(arrays))
    if most:
        return _read_once(target, op, arrays, _block_rows(rows, min(most, max(1, block // columns)), arrays[0].dtype))
    return _read_twice(target, op, arrays, chunk)


def whole_rows(columns: int, dtype: Any, inputs: int) -> int:
    """Return how many whole rows fit in VMEM, a multiple of a register's rows; 0 when not even those fit."""
    size = jnp.dtype(dtype).itemsize
    per_row = max(columns, _LANES) * (2 * size * (inputs + 1) + 4 * (inputs + 2))
    step = _step(dtype)
    return WHOLE_ROWS // per_row // step * step


def _step(dtype: Any) -> int:
    return 32 // jnp.dtype(dtype).itemsize


def _block_rows(rows: int, aim: int, dtype: Any) -> int:
    step = _step(dtype)
    return rows if rows <= step else min(-(-aim // step), rows // step) * step


def _out(op: str, array: jax.Array) -> jax.ShapeDtypeStruct:
    if op == "sums":
        return jax.ShapeDtypeStruct((array.shape[0], 2), jnp.float32)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _read_once(target: Target, op: str, arrays: Sequence[jax.Array], block: int) -> jax.Array:
    sweep, out = SWEEPS[op], _out(op, arrays[0])

    def kernel(*refs: Any) -> None:
        *sources, result = refs
        xs = [s[...].astype(jnp.float32) for s in sources]
        stats = tuple(jnp.full((block, 1), b, jnp.float32) for b in sweep.begin)
        result[...] = sweep.result(sweep.gather(stats, *xs), *xs).astype(result.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(pl.cdiv(out.shape[0], block),),
        in_specs=[pl.BlockSpec((block, arrays[0].shape[1]), lambda i: (i, 0))] * len(arrays),
        out_specs=pl.BlockSpec((block, out.shape[1]), lambda i: (i, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT),
        interpret=target.tpu(),
    )(*arrays)


def _read_twice(target: Target, op: str, arrays: Sequence[jax.Array], chunk: int) -> jax.Array:
    sweep, out, (rows, columns) = SWEEPS[op], _out(op, arrays[0]), arrays[0].shape
    block, chunks = _block_rows(rows, 2 * _step(arrays[0].dtype), arrays[0].dtype), pl.cdiv(columns, chunk)
    sums = op == "sums"
    passes = 1 if sums else 2

    def kernel(*refs: Any) -> None:
        sources, result, stat_refs = refs[: len(arrays)], refs[len(arrays)], refs[len(arrays) + 1 :]
        second, j = pl.program_id(1), pl.program_id(2)

        @pl.when((second == 0) & (j == 0))
        def _() -> None:
            for k, b in zip(stat_refs, sweep.begin, strict=True):
                k[...] = jnp.full(k.shape, b, jnp.float32)

        xs = [s[...].astype(jnp.float32) for s in sources]
        if columns % chunk:  # the last chunk ends beyond the row
            inside = j * chunk + lax.broadcasted_iota(jnp.int32, (block, chunk), 1) < columns
            xs = [jnp.where(inside, x, pad) for x, pad in zip(xs, sweep.pads, strict=True)]
        stats = tuple(k[:, :1] for k in stat_refs)

        @pl.when(second == 0)
        def _() -> None:
            for k, value in zip(stat_refs, sweep.gather(stats, *xs), strict=True):
                k[...] = jnp.broadcast_to(value, k.shape)

        @pl.when((second == passes - 1) & ((j == chunks - 1) | (not sums)))
        def _() -> None:
            now = tuple(k[:, :1] for k in stat_refs) if sums else stats
            result[...] = sweep.result(now, *xs).astype(result.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(pl.cdiv(rows, block), passes, chunks),
        in_specs=[pl.BlockSpec((block, chunk), lambda i, p, j: (i, j))] * len(arrays),
        # During the first pass, the output block is the one that the second pass begins with.
        out_specs=pl.BlockSpec((block, 2 if sums else chunk), lambda i, p, j: (i, p * j)),
        scratch_shapes=[pltpu.VMEM((block, _LANES), jnp.float32)] * len(sweep.begin),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=target.tpu(),
    )(*arrays)


# ---- the ops


def forward(target: Target, x: jax.Array, *, op: str) -> Any:
    """Return "softmax" or "log_softmax" of (R, C), or its "sums" as `reference.sums`: two float32 (R,)."""
    y = sweep_rows(target, op, [x], **_tile(target, x.shape[1], x.dtype.name))
    return (y[:, 0], y[:, 1]) if op == "sums" else y


def backward(target: Target, saved: jax.Array, g: jax.Array, *, op: str) -> jax.Array:
    """Return the input's cotangent, (R, C); the arguments are those of `gpu.backward`."""
    return sweep_rows(target, f"{op}_backward", [saved, g], **_tile(target, saved.shape[1], saved.dtype.name))


def _tile(target: Target, columns: int, dtype: str) -> dict[str, int]:
    return lookup("softmax", target.kind or "TPU", kernel="rows", dtype=dtype, columns=columns)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) for the gate: every tile of the table on a shape of its own."""
    for entry in entries("softmax"):
        if not entry["device"].startswith("TPU"):
            continue
        columns, dtype = entry["key"]["columns"], entry["key"]["dtype"]
        for op in SWEEPS:
            inputs = 2 if op.endswith("backward") else 1
            # neither rows nor columns are a multiple of a tile
            shape = (jax.ShapeDtypeStruct((1001, columns - 3), dtype),) * inputs
            name, tile = f"{dtype} {columns - 3} {op}", entry["tile"]
            yield name, lambda *a, o=op, tile=tile: sweep_rows(Target("", "tpu"), o, a, **tile), shape
