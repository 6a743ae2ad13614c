"""Keys, candidates and cases for `python -m pallas_kernels.tune grouped_matmul`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul import examples, gpu, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]
_PRODUCTS = {"matmul": "forward", "transposed": "input gradient", "outer": "kernel gradient"}
_DEPTHS = {"matmul": (768, 4096), "transposed": (768, 4096), "outer": (256, 2048)}
"""Lengths of a product's sums on a GPU: of k, and of a group's rows."""


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for product, dtype in itertools.product(("matmul", "outer"), tpu.DTYPES):
            yield {"product": product, "dtype": dtype}
    else:
        for product, depths in _DEPTHS.items():
            for even, depth in itertools.product((True, False), depths):
                yield {"product": product, "depth": depth, "even": even}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first; on a GPU those that fit in shared memory."""
    if platform == "gpu":
        widths = (256, 192, 128) if key["even"] else (192, 256, 128)
        for columns in widths:
            outer = key["product"] == "outer"
            # the most buffers, up to one for each piece of 64 columns, that cost no chunk in flight
            buffers = {gpu.slots_of(columns, b, outer=outer): b for b in range(1, columns // gpu.CHUNK + 1)}
            # where a sum ends often, more buffers are worth a chunk
            for slots in sorted(buffers, reverse=outer or key["depth"] >= 1024):
                yield {"columns": columns, "slots": slots, "buffers": buffers[slots]}
        return
    if key["dtype"] == "float32":  # products of float32 take Mosaic minutes to compile in large tiles
        yield from ({"rows": rows, "k": 512, "n": 256} for rows in (256, 128))
    elif key["product"] == "outer":
        for rows, (k, n) in itertools.product((512, 1024, 256), ((1024, 1024), (2048, 1024), (512, 1024))):
            yield {"rows": rows, "k": k, "n": n}
    else:
        for rows, (k, n) in itertools.product((512, 256, 1024), ((4096, 1024), (2048, 1024), (4096, 512))):
            yield {"rows": rows, "k": k, "n": n}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a product of groups of one size with a tile, and its arguments' shapes.

    On a TPU it is of Mixtral's experts (of a small layer in float32), on a GPU of experts with the key's sizes.
    """
    if platform == "gpu":
        sizes, dtype, target, run = _sizes(**key), "bfloat16", Target("NVIDIA H200", "cuda"), gpu.run
    else:
        sizes = (1000, 4, 1024, 512) if key["dtype"] == "float32" else examples.MODELS["mixtral"]
        dtype, target, run = key["dtype"], Target("", "tpu"), tpu.run
    fn, (left, right, _) = examples.case(run, _PRODUCTS[key["product"]], sizes, dtype, target)

    def with_tile(*arrays: Any) -> Any:
        with trying("grouped_matmul", tile):
            # constants: the tuner fills integer arguments with zeros
            return fn(*arrays, jnp.full(sizes[1], sizes[0] // sizes[1], jnp.int32))

    return with_tile, (left, right)


def _sizes(product: str, depth: int, even: bool) -> tuple[int, int, int, int]:
    """Return rows, groups, and the layer's inputs and outputs of a key for GPUs."""
    wide, groups = 4096 if even else 2880, 16
    if product == "outer":
        return depth * groups, groups, 2048, wide
    return 16384, groups, *((depth, wide) if product == "matmul" else (wide, depth))
