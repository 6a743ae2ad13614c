"""Keys, candidates and cases for `python -m pallas_kernels.tune fftconv`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.fftconv import examples, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        yield from ({"size": 2 * seq} for seq in (1024, 4096, 16384))


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    for channels in (8, 4, 2, 1):
        yield {"channels": channels}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a convolution with a tile, and the shapes of its arguments."""
    seq = key["size"] // 2
    fn, shapes = examples.case(tpu.run, seq, seq, None, "convolve", channels=64)

    def with_tile(*arrays: Any) -> Any:
        with trying("fftconv", tile):
            return fn(*arrays)

    return with_tile, shapes
