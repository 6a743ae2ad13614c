"""Keys, candidates and cases for `python -m pallas_kernels.tune grouped_experts`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.dispatch import Target
from pallas_kernels.grouped_experts import examples, tpu
from pallas_kernels.grouped_matmul.examples import MODELS
from pallas_kernels.grouped_matmul.tpu import DTYPES
from pallas_kernels.tiles import trying

Key = dict[str, Any]


def keys(platform: str) -> Iterator[Key]:
    """Yield what a tile depends on."""
    if platform == "tpu":
        for product, dtype in itertools.product(("hidden", "gradients"), DTYPES):
            yield {"product": product, "dtype": dtype}


def candidates(platform: str, key: Key) -> Iterator[dict[str, int]]:
    """Yield tiles, the likeliest to be fast first; wide rows have fewer columns, to fit VMEM."""
    if key["dtype"] == "float32":
        yield from ({"rows": rows, "n": 128} for rows in (256, 128))
    else:
        for rows, n in itertools.product((512, 256), (1024, 512, 256)):
            yield {"rows": rows, "n": n}


def build(platform: str, key: Key, tile: dict[str, int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a kernel for groups of one size with a tile, and its arguments' shapes.

    It is of Mixtral's experts, or of a small layer in float32.
    """
    sizes = (1000, 4, 512, 384) if key["dtype"] == "float32" else MODELS["mixtral"]
    fn, shapes = examples.case(tpu.run, key["product"], sizes, key["dtype"], Target("", "tpu"))

    def with_tile(*arrays: Any) -> Any:
        with trying("grouped_experts", tile):
            # constants: the tuner fills integer arguments with zeros
            even = jnp.full(sizes[1], sizes[0] // sizes[1], jnp.int32)
            return fn(*arrays[:3], even, *arrays[3:])

    return with_tile, (*shapes[:3], *shapes[4:])
