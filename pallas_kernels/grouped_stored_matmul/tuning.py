"""Keys, candidates and cases for `python -m pallas_kernels.tune grouped_stored_matmul`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.grouped_stored_matmul import examples, tpu
from pallas_kernels.tiles import trying

Key = dict[str, Any]
_FORMS = {4: "int4, groups of 128", 8: "int8"}


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        yield from ({"bits": bits, "dtype": "bfloat16"} for bits in _FORMS)


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first."""
    for columns, rows in itertools.product((512, 256, 1024), (256, 128, 512)):
        yield {"rows": rows, "columns": columns}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a product of Qwen3's experts, 8 rows each, with a tile, and the shapes of its arguments."""
    sizes = examples.MODELS["qwen3"]
    fn, (rows, weight, _) = examples.case(tpu.run, sizes, _FORMS[key["bits"]], key["dtype"])

    def with_tile(*arrays: Any) -> Any:
        with trying("grouped_stored_matmul", tile):
            # constants: the tuner fills integer arguments with zeros
            return fn(*arrays, jnp.full(sizes[1], sizes[0] // sizes[1], jnp.int32))

    return with_tile, (rows, weight)
