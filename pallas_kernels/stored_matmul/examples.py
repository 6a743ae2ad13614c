"""Cases that the gate compiles: a product of Llama-3-8B, in the formats that have a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import device
from pallas_kernels.stored_matmul.inputs import Packed, checked
from pallas_kernels.stored_matmul.numbers import Codebook, Floats, Integers, Numbers, Powers, Table

NF4 = Table(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)
"""The quantiles of a normal distribution of Dettmers et al. 2023."""

FORMATS: dict[str, dict[str, Any]] = {
    "int4, groups of 128": {"numbers": Integers(4), "group": 128, "scale": "bfloat16"},
    "int8": {"numbers": Integers(8)},
    "uint4, zero points": {
        "numbers": Integers(4, signed=False), "group": 128, "scale": "bfloat16", "zero": "uint8",
    },
    "int4, offsets": {"numbers": Integers(4), "group": 32, "offset": "float32"},
    "int4 in 32-bit words": {"numbers": Integers(4), "group": 128, "word": "uint32"},
    "int2, groups of 32": {"numbers": Integers(2), "group": 32, "scale": "bfloat16"},
    "int3, groups of 64": {"numbers": Integers(3), "group": 64, "scale": "bfloat16"},
    "int3, groups of 16": {"numbers": Integers(3), "group": 16},
    "int5, groups of 128": {"numbers": Integers(5), "group": 128, "scale": "bfloat16"},
    "int6, groups of 128": {"numbers": Integers(6), "group": 128, "scale": "bfloat16"},
    "int7, groups of 128": {"numbers": Integers(7), "group": 128, "scale": "bfloat16"},
    "binary": {"numbers": Table((-1.0, 1.0))},
    "ternary": {"numbers": Table((0.0, 1.0, 0.0, -1.0))},
    "nf4": {"numbers": NF4, "group": 64},
    "kmeans3": {"numbers": Codebook(3)},
    "fp6": {"numbers": Floats(3, 2)},
    "fp8": {"numbers": Floats(4, 3), "group": 128},
    "mxfp4": {"numbers": Floats(2, 1), "group": 32, "scale": "uint8", "scale_numbers": Powers()},
    "nvfp4": {
        "numbers": Floats(2, 1), "group": 16, "scale": "uint8", "scale_numbers": Floats(4, 3), "factor": True,
    },
}  # fmt: skip
"""A format's name -> arguments of `shapes`."""


def shapes(
    k: int,
    n: int,
    *,
    numbers: Numbers,
    group: int | None = None,
    scale: str = "float32",
    scale_numbers: Numbers | None = None,
    zero: str | None = None,
    offset: str | None = None,
    factor: bool = False,
    word: str = "uint8",
) -> Packed:
    """Return the shapes of a weight.

    Args:
      k: rows of the matrix.
      n: its columns.
      numbers: what codes stand for.
      group: rows of a block; `None` is all.
      scale: dtype of scales.
      scale_numbers: what scales of uint8 stand for.
      zero: dtype of zero points, or `None`.
      offset: dtype of offsets, or `None`.
      factor: whether scales have a factor.
      word: type of the words.
    """
    blocks = 1 if group is None else k // group

    def array(*shape: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def part(dtype: str | None) -> Any:
        return None if dtype is None else array(blocks, n, dtype=dtype)

    words = k * numbers.bits // (8 * jnp.dtype(word).itemsize)
    more = {} if scale_numbers is None else {"scale_numbers": scale_numbers}
    return Packed(
        array(words, n, dtype=word),
        part(scale),
        part(zero),
        part(offset),
        array(1, 1) if factor else None,
        array(2**numbers.bits) if isinstance(numbers, Codebook) else None,
        numbers=numbers,
        **more,
    )


def case(
    run: Callable[..., Any], weight: Packed, m: int, dtype: str = "bfloat16", transposed: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one implementation, for the device in scope.

    Args:
      run: `run` of an implementation.
      weight: of `shapes`.
      m: rows of x.
      dtype: of x.
      transposed: as for `stored_matmul`.
    """
    x: Any = jax.ShapeDtypeStruct((m, weight.shape[1 if transposed else 0]), dtype)
    facts = checked(x, weight, transposed, None)
    return lambda x, weight: run(device(), x, weight, facts=facts), (x, weight)


def cases(run: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): every format, and int4 with more rows, in float32 and transposed."""
    for name, options in FORMATS.items():
        yield (name, *case(run, shapes(4096, 14336, **options), 16))
    int4 = FORMATS["int4, groups of 128"]
    for m, dtype, transposed in ((1, "bfloat16", False), (1024, "bfloat16", False), (7, "float32", False)):
        yield (f"int4, {m} rows {dtype}", *case(run, shapes(4096, 14336, **int4), m, dtype, transposed))
    for name in ("int4, groups of 128", "int3, groups of 64", "mxfp4"):
        yield (f"{name} transposed", *case(run, shapes(4096, 14336, **FORMATS[name]), 128, transposed=True))
    yield ("int4, 11008 rows", *case(run, shapes(11008, 4000, **int4), 16))
