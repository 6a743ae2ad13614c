"""Keys, candidates and cases for `python -m pallas_kernels.tune stored_matmul`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.stored_matmul import examples, tpu
from pallas_kernels.stored_matmul.numbers import Integers
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        yield from ({"bits": bits, "dtype": "bfloat16"} for bits in (3, 4, 8))


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    for rows, columns in itertools.product((2048, 4096, 1024), (512, 1024, 256)):
        yield {"rows": rows, "columns": columns}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a product of 16 rows with a tile, and the shapes of its arguments."""
    weight = examples.shapes(4096, 14336, numbers=Integers(key["bits"]), group=128, scale="bfloat16")
    fn, shapes = examples.case(tpu.run, weight, 16, key["dtype"])

    def with_tile(*arrays: Any) -> Any:
        with trying("stored_matmul", tile):
            return fn(*arrays)

    return with_tile, shapes
