"""Keys, candidates and cases for `python -m pallas_kernels.tune decode_attention`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.decode_attention import examples, gpu, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for dtype, width in itertools.product(("bfloat16", "float32"), (64, 128, 256)):
            yield {"dtype": dtype, "width": width}
        return
    for d, dv in gpu.WIDTHS:
        yield {"width": d, "values": dv}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    if platform == "tpu":
        for columns, workers in itertools.product((2048, 4096, 1024), (1, 2)):
            yield {"columns": columns, "workers": workers}
        return
    warpgroups = gpu.warpgroups(key["width"], key["values"])
    for size, slots, queries in itertools.product((64, 128), (4, 3, 2, 1), (2, 1)):
        tile = {"keys": size * warpgroups, "slots": slots, "queries": queries, "workers": 132}
        if gpu.shared_memory(key["width"], key["values"], tile) <= SHARED_MEMORY:
            yield tile


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a case of long rows without pages, with a tile, and the shapes of its arguments."""
    module = tpu if platform == "tpu" else gpu
    options = {"dtype": key["dtype"]} if platform == "tpu" else {}
    fn, shapes = examples.case(
        module.run, d=key["width"], dv=key["values" if platform == "gpu" else "width"], t=32768, **options
    )  # fmt: skip

    def with_tile(*arrays: Any) -> Any:
        with trying("decode_attention", tile):
            return fn(*arrays)

    return with_tile, shapes
