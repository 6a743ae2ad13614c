"""Keys, candidates and cases for `python -m pallas_kernels.tune chunked_recurrence`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.chunked_recurrence import examples, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        yield from (
            {"decay": "heads", "delta": delta, "dtype": dtype}
            for dtype in ("bfloat16", "float32")
            for delta in (False, True)
        )


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    chunks = (64, 128) if key["delta"] else (128, 64, 256)
    for heads, chunk in itertools.product((4, 8, 2, 1), chunks):
        yield {"chunk": chunk, "heads": heads}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a gradient of 8192 tokens with a tile, and the shapes of its arguments."""
    inputs = examples.shapes(8192, 16, widths=(128, 128), **key)
    fn, shapes = examples.case(tpu.run, inputs, "backward")

    def with_tile(*arrays: Any) -> Any:
        with trying("chunked_recurrence", tile):
            return fn(*arrays)

    return with_tile, shapes
