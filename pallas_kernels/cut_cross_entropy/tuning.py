"""Keys, candidates and cases for `python -m pallas_kernels.tune cut_cross_entropy`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.cut_cross_entropy import gpu, tpu
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits
from pallas_kernels.dispatch import Target
from pallas_kernels.tiles import trying

Key = dict[str, Any]
_TOKENS, _WORDS = 8192, 128256


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for dtype, width in (("bfloat16", 4096), ("bfloat16", 8192), ("float32", 4096)):
            yield {"kernel": "forward", "dtype": dtype, "width": width}
    else:
        yield from ({"kernel": "forward", "softcap": softcap, "width": 4096} for softcap in (False, True))


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first; on a GPU with as many slots as fit in shared memory."""
    if platform == "gpu":
        for span, (words, slots) in itertools.product((4, 2, 8), ((256, 4), (192, 5), (128, 6))):
            yield {"words": words, "slots": slots, "span": span}
        return
    # Mosaic took minutes to compile float32 tiles of 512 x 512.
    most = 256 if key["dtype"] == "float32" else 512 if key["width"] > 4096 else 1024
    for tokens, words in itertools.product((most, most // 2), (min(most, 512), 256)):
        yield {"tokens": tokens, "words": words}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the kernel with a tile, and the shapes of its arguments."""
    target = Target("NVIDIA H200", "cuda") if platform == "gpu" else Target("", "tpu")
    module, width, dtype = (gpu if platform == "gpu" else tpu), key["width"], key.get("dtype", "bfloat16")
    logits = Logits(softcap=30.0 if key.get("softcap") else None)

    def tried(*arrays: jax.Array) -> Any:
        with trying("cut_cross_entropy", tile):
            return module.run(target, Inputs(*arrays), direction="forward", logits=logits)

    like = jax.ShapeDtypeStruct
    return tried, (like((_TOKENS, width), dtype), like((_WORDS, width), dtype), like((_TOKENS,), "int32"))
