"""Keys, candidates and cases for `python -m pallas_kernels.tune grouped_matmul`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_matmul import examples, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]
_PRODUCTS = {"matmul": "forward", "outer": "kernel gradient"}


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for product, dtype in itertools.product(_PRODUCTS, tpu.DTYPES):
            yield {"product": product, "dtype": dtype}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    if key["dtype"] == "float32":  # products of float32 take Mosaic minutes to compile in large tiles
        yield from ({"rows": rows, "k": 512, "n": 256} for rows in (256, 128))
    elif key["product"] == "outer":
        for rows, (k, n) in itertools.product((512, 1024, 256), ((1024, 1024), (2048, 1024), (512, 1024))):
            yield {"rows": rows, "k": k, "n": n}
    else:
        for rows, (k, n) in itertools.product((512, 256, 1024), ((4096, 1024), (2048, 1024), (4096, 512))):
            yield {"rows": rows, "k": k, "n": n}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a product of Mixtral's experts (of a small layer in float32) with a tile, and its arguments' shapes."""
    small = key["dtype"] == "float32"
    sizes = (1000, 4, 1024, 512) if small else examples.MODELS["mixtral"]
    fn, shapes = examples.case(tpu.run, _PRODUCTS[key["product"]], sizes, key["dtype"], Target("", "tpu"))

    def with_tile(*arrays: Any) -> Any:
        with trying("grouped_matmul", tile):
            return fn(*arrays)

    return with_tile, shapes
