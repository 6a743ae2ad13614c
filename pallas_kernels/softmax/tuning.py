"""Keys, candidates and cases for `python -m pallas_kernels.tune softmax`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, device
from pallas_kernels.softmax.gpu_rows import rows_once
from pallas_kernels.softmax.gpu_stream import row_sums
from pallas_kernels.softmax.tpu import sweep_rows

Key = dict[str, Any]
_ELEMENTS = 2**28  # elements of a matrix that is timed: far more than fit in a cache


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for dtype, columns in itertools.product(("float32", "bfloat16"), (1024, 32768, 262144)):
            yield {"kernel": "rows", "dtype": dtype, "columns": columns}
        return
    once = {"bfloat16": (4096, 16384, 65536, 110592), "float16": (16384, 65536), "float32": (2048, 8192, 32768)}
    sums = {"bfloat16": (262144, 1048576), "float16": (262144,), "float32": (131072,)}
    for kernel, lengths in (("rows_once", once), ("row_sums", sums)):
        for dtype, columns in ((d, c) for d, many in lengths.items() for c in many):
            yield {"kernel": kernel, "dtype": dtype, "columns": columns}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    if platform == "tpu":
        for block, chunk in itertools.product((262144, 131072, 524288), (8192, 4096, 16384)):
            yield {"block": block, "chunk": chunk}
    elif key["kernel"] == "rows_once":
        size = key["columns"] * jnp.dtype(key["dtype"]).itemsize
        first = 1 if size <= 8192 else 2 if size <= 32768 else 4
        yield from ({"warpgroups": n} for n in sorted((1, 2, 4), key=lambda n: n != first))
    else:
        for warpgroups, slots in itertools.product((2, 1, 4), (4, 2, 8)):
            yield {"warpgroups": warpgroups, "slots": slots}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a kernel with a tile, and the shape of its argument."""
    x = jax.ShapeDtypeStruct((max(8, _ELEMENTS // key["columns"]), key["columns"]), key["dtype"])
    if platform == "tpu":
        return lambda x: sweep_rows(Target("", "tpu"), "softmax", [x], block=tile["block"], chunk=tile["chunk"]), (x,)
    if key["kernel"] == "rows_once":
        return lambda x: rows_once(device(), "softmax", [x], **tile), (x,)

    def sums(x: jax.Array) -> Any:
        target = device()
        return row_sums(target, x, **tile, splits=max(1, min(-(-4 * target.cores // x.shape[0]), 8)))

    return sums, (x,)
