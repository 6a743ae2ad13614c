"""What `python -m pallas_kernels.tune flash_attention` tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention import examples, tpu
from pallas_kernels.flash_attention.masks import Mask
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """What a tile depends on."""
    if platform == "tpu":
        for kernel, dtype, width in itertools.product(("forward", "backward"), ("bfloat16", "float32"), (128, 256)):
            yield {"kernel": kernel, "dtype": dtype, "width": width}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Tiles, the likeliest first."""
    if platform == "tpu":
        large = key["dtype"] == "bfloat16"
        sizes = (1024, 512, 2048) if large else (512, 256, 1024)
        yield from ({"q": q, "k": k} for q, k in itertools.product(sizes, sizes))
        return
    raise _none_for(platform)


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A causal case with a tile, and the shapes of its arguments."""
    if platform == "tpu":
        width, s = key["width"], 8192
        fn, shapes = examples.case(
            tpu.run, key["kernel"], mask=Mask(causal=True), s=s, d=width, dv=width, dtype=key["dtype"]
        )
    else:
        raise _none_for(platform)

    def tried(*arrays: Any) -> Any:
        with trying("flash_attention", tile):
            return fn(*arrays)

    return tried, shapes


def _none_for(platform: str) -> KernelError:
    return KernelError(f"flash_attention has no tiles to tune for '{platform}', only for 'tpu'")
