"""Keys, candidates and cases for `python -m pallas_kernels.tune routed_experts`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.routed_experts import examples, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]
_TOKENS = 256


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        yield from ({"dtype": dtype} for dtype in ("bfloat16", "float32"))


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    for columns, rows in itertools.product((256, 512, 128), (128, 64, 256)):
        yield {"rows": rows, "columns": columns}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return Qwen3's layer with a tile, its tokens spread evenly, and the shapes of its arguments."""
    sizes = examples.MODELS["qwen3"]
    fn, (x, (ids, weights), *matrices) = examples.case(tpu.run, _TOKENS, sizes, key["dtype"])

    def with_tile(x: Any, weights: Any, *matrices: Any) -> Any:
        with trying("routed_experts", tile):
            # constants: the tuner fills integer arguments with zeros
            even = jnp.arange(_TOKENS * sizes[1], dtype=jnp.int32).reshape(ids.shape) % sizes[0]
            return fn(x, (even, weights), *matrices)

    return with_tile, (x, weights, *matrices)
