"""Softmax for Hopper and Blackwell in Mosaic GPU: a row is read once where it fits in shared memory, and written once.

Dukhan and Ablavatski's two passes (arXiv:2001.04438): the first keeps a sum and its scale for each element of a tile,
without a pass for the maximum; the second computes the result. A scale is in the units of the input and is updated once
per batch of tiles. At 4.3 TB/s a multiprocessor has 31 instructions for a bfloat16 element, most of which a split of
each element into mantissa and exponent would take; differences in units of the input are exact at any magnitude.

Longer rows are streamed twice, the second time backwards, to read from the L2 cache what is still in it. Where there
are few long rows, several blocks share a row to compute its sums, and XLA computes the result, which is elementwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, hopper
from pallas_kernels.softmax.gpu_rows import PIECE, most_columns, rows_once
from pallas_kernels.softmax.gpu_stream import row_sums
from pallas_kernels.softmax.gpu_twice import rows_twice
from pallas_kernels.softmax.pairs import HIGHEST
from pallas_kernels.tiles import entries, lookup

INPUTS = {"softmax": 1, "log_softmax": 1, "softmax_backward": 2, "log_softmax_backward": 2}
"""An op that writes rows -> the arrays that it reads."""
GATED = ("h200", "b200")
"""Devices that the gate compiles for."""
_XLA_ONCE = (
    16384  # columns up to which XLA's softmax on an H200 is one kernel, which reads once; beyond, it reads thrice
)
_WARPGROUPS = 4  # number that share a row which is too long for shared memory


def supported(target: Target, *, rows: int, columns: int, dtype: str, masked: bool, inputs: int) -> str | None:
    """Return why an op that writes rows cannot run, or `None`.

    Args:
      target: the device to compile for.
      rows: rows of the array as a matrix.
      columns: columns of the array as a matrix.
      dtype: dtype of the inputs and the output.
      masked: whether there is a mask.
      inputs: number of arrays that a row is read from: 1 forward, 2 backward.
    """
    longest = most_columns(dtype, inputs)
    if why := _unfit(target, columns, masked):
        return why
    if inputs > 1 and columns > longest and not _fill(target, rows):
        return (
            f"a row of {columns} columns does not fit in shared memory ({longest} of {dtype} do), and {rows} rows "
            f"cannot be shared evenly among {target.cores} multiprocessors"
        )
    return None


def supported_sums(target: Target, *, rows: int, columns: int, dtype: str, masked: bool) -> str | None:
    """Return why the kernel that streams rows cannot run, or `None`; the arguments are those of `supported`."""
    return _unfit(target, columns, masked)


def _unfit(target: Target, columns: int, masked: bool) -> str | None:
    if why := hopper(target, blackwell=True):
        return why
    if masked:
        return "a mask is left to XLA, which fuses it with its own reads"
    if columns % 128:
        reads = f"XLA reads a row of at most {_XLA_ONCE} once, too"
        if columns > _XLA_ONCE:
            reads = f"XLA's softmax reads a row of more than {_XLA_ONCE} three times"
        return f"TMA copies rows with a multiple of 128 columns, not {columns}, and {reads}"
    if columns < 1024 and not target.interpret:
        return f"a row of {columns} columns is too short for a warpgroup; the kernel is faster from 1024 columns on"
    return None


# ---- the ops


def forward(target: Target, x: jax.Array, *, op: str) -> Any:
    """Return "softmax" or "log_softmax" of (R, C), or its "sums" as `reference.sums`: two float32 (R,)."""
    rows, columns = x.shape
    if op != "sums" and columns <= most_columns(x.dtype.name, 1):
        return rows_once(target, op, [x], **_once_tile(target, columns, x.dtype.name, 1))
    if op != "sums" and _fill(target, rows):
        return rows_twice(target, op, [x], warpgroups=_WARPGROUPS)
    top, total = row_sums(target, x, **_stream_tile(target, rows, columns, x.dtype.name))
    if op == "sums":
        return top, total
    # The second pass is elementwise: XLA runs it at the speed of memory.
    total = jnp.where(total <= HIGHEST, total, jnp.nan)[:, None]
    shifted = x.astype(jnp.float32) - top[:, None]
    return (jnp.exp(shifted) * (1 / total) if op == "softmax" else shifted - jnp.log(total)).astype(x.dtype)


def backward(target: Target, saved: jax.Array, g: jax.Array, *, op: str) -> jax.Array:
    """Return the input's cotangent, (R, C).

    Args:
      target: the device to compile for.
      saved: (R, C), the output of "softmax" or the input of "log_softmax".
      g: (R, C), the output's cotangent, in the same dtype.
      op: "softmax" or "log_softmax".
    """
    if saved.shape[1] > most_columns(saved.dtype.name, 2):
        return rows_twice(target, f"{op}_backward", [saved, g], warpgroups=_WARPGROUPS)
    tile = _once_tile(target, saved.shape[1], saved.dtype.name, 2)
    return rows_once(target, f"{op}_backward", [saved, g], **tile)


def _fill(target: Target, rows: int) -> bool:
    """Whether this many rows, a block each, keep at least nine in ten multiprocessors busy."""
    return rows >= 0.9 * target.cores * -(-rows // target.cores)


def _once_tile(target: Target, columns: int, dtype: str, inputs: int) -> dict[str, int]:
    tile = lookup("softmax", target.kind, kernel="rows_once", dtype=dtype, columns=columns * inputs)
    return {"warpgroups": tile["warpgroups"]}


def _stream_tile(target: Target, rows: int, columns: int, dtype: str) -> dict[str, int]:
    tile = lookup("softmax", target.kind, kernel="row_sums", dtype=dtype, columns=columns)
    pieces = columns * jnp.dtype(dtype).itemsize // (PIECE * tile["warpgroups"] * tile["slots"])
    few = -(-4 * target.cores // max(rows, 1))  # blocks that share a row, so that few rows fill the GPU, too
    return {"warpgroups": tile["warpgroups"], "slots": tile["slots"], "splits": max(1, min(few, pieces))}


def _shape(rows: int, columns: int, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, columns), dtype)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) for the gate: every tile of the table on a shape of its own."""
    for entry in entries("softmax"):
        key = entry["key"]
        if not entry["device"].startswith("NVIDIA"):
            continue
        target = Target(entry["device"], "cuda")
        columns, dtype = key["columns"], key["dtype"]
        name = f"{key['kernel']} {dtype} {columns}"
        if key["kernel"] == "row_sums":
            yield name, functools.partial(forward, target, op="sums"), (_shape(256, columns, dtype),)
            for op, inputs in INPUTS.items():
                name, shape = f"rows_twice {dtype} {columns} {op}", (_shape(264, columns, dtype),) * inputs
                yield name, lambda *a, t=target, o=op: rows_twice(t, o, a, warpgroups=_WARPGROUPS), shape
            continue
        for op, inputs in INPUTS.items():
            c = columns // inputs // 128 * 128
            shape = (_shape(512, c, dtype),) * inputs
            if c <= most_columns(dtype, inputs):
                tile = _once_tile(target, c, dtype, inputs)
                yield f"{name} {op}", lambda *a, t=target, o=op, tile=tile: rows_once(t, o, a, **tile), shape
