"""Keys, candidates and cases for `python -m pallas_kernels.tune blockwise`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels import blockwise
from pallas_kernels.blockwise import examples
from pallas_kernels.blockwise.rules import ADAMW
from pallas_kernels.tiles import trying

Key = dict[str, Any]
_SHAPES = {"matrix": ((4096, 14336), (1, 128)), "stack": ((16384, 8, 128), (1, 1, 128))}


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        yield from ({"form": form} for form in _SHAPES)
        return
    for param in ("bfloat16", "float32"):
        yield from ({"param": param, "grad": grad} for grad in ("bfloat16", "float32"))


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first.

    On a GPU a tile is a number of pairs of rows of a block, on a TPU the bytes of blocks in flight.
    """
    if platform == "tpu":
        first = 16 if key["form"] == "matrix" else 8
        yield from ({"bytes": m * 2**20} for m in sorted((16, 8, 24, 4), key=lambda m: m != first))
        return
    first = 32 if key == {"param": "bfloat16", "grad": "bfloat16"} else 16
    yield from ({"pairs": n} for n in sorted((16, 32, 8, 64), key=lambda n: n != first))


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return AdamW with a tile, and the shapes of its arguments."""
    shape, block = _SHAPES[key.get("form", "matrix")]
    dtypes = (jnp.dtype(key.get(which, "float32")) for which in ("param", "grad"))
    _, step, shapes = examples.case(blockwise, f"mosaic_{platform}", "", ADAMW, shape, block, *dtypes)

    def tried(*args: Any) -> Any:
        with trying("blockwise", tile):
            return step(*args)

    return tried, shapes
