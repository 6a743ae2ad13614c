"""Keys, candidates and cases for `python -m pallas_kernels.tune cut_cross_entropy`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.cut_cross_entropy import gpu, tpu
from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged
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
        for kernel, softcap in itertools.product(("forward", "backward"), (False, True)):
            yield {"kernel": kernel, "softcap": softcap, "width": 4096}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first; on a GPU with as many slots as fit in shared memory."""
    if platform == "gpu" and key["kernel"] == "backward":
        for words, slots, buffers in ((256, 4, 2), (256, 4, 1), (256, 3, 4), (192, 5, 1), (192, 4, 3), (128, 6, 2)):
            yield {"words": words, "slots": slots, "buffers": buffers}
        return
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

    backward = key["kernel"] == "backward"

    def tried(x: jax.Array, w: jax.Array, rows: jax.Array, *more: jax.Array) -> Any:
        others = (more[0], Merged(more[1], more[2], None)) if backward else ()
        options = {"direction": key["kernel"], "logits": logits, "dw_dtype": dtype}
        with trying("cut_cross_entropy", tile):
            return module.run(target, Inputs(x, w, rows), *others, **options)

    like = jax.ShapeDtypeStruct
    arrays = like((_TOKENS, width), dtype), like((_WORDS, width), dtype), like((_TOKENS,), "int32")
    return tried, (*arrays, *[like((_TOKENS,), "float32")] * (3 * backward))
