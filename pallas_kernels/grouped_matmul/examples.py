"""Cases that the gate compiles: the three products of the experts of known models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.dispatch import Target, device
from pallas_kernels.grouped_matmul.inputs import Facts

MODELS: dict[str, tuple[int, int, int, int]] = {
    "mixtral": (16384, 8, 4096, 14336),
    "qwen3": (32768, 128, 2048, 768),
    "gpt-oss": (16384, 32, 2880, 2880),
    "deepseek": (16384, 8, 7168, 2048),
}
"""A name -> rows, groups, inputs and outputs of the experts of Mixtral-8x7B, Qwen3-30B-A3B, GPT-OSS-20B, and of those
that one of 32 devices has of DeepSeek-V3's."""

PRODUCTS = ("forward", "input gradient", "kernel gradient")


def case(
    run: Callable[..., Any],
    product: str,
    sizes: tuple[int, int, int, int],
    dtype: str = "bfloat16",
    target: Target | None = None,
    bias: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one product of a layer by one implementation.

    Args:
      run: `run` of an implementation.
      product: one of `PRODUCTS`.
      sizes: rows, groups, and the layer's inputs and outputs.
      dtype: of all arrays.
      target: the device; by default that in scope when the function is traced.
      bias: of "forward", add a bias.
    """
    m, groups, k, n = sizes
    like: Any = jax.ShapeDtypeStruct
    if product == "kernel gradient":
        facts = Facts("outer", groups, m, k, n, dtype, dtype, dtype)
        left, right = like((m, k), dtype), like((m, n), dtype)
    else:
        wide, narrow = (n, k) if product == "input gradient" else (k, n)
        facts = Facts("matmul", groups, m, wide, narrow, dtype, dtype, dtype, product == "input gradient", bias)
        left, right = like((m, wide), dtype), like((groups, k, n), dtype)
    fn = lambda *arrays: run(target or device(), *arrays, facts=facts)  # noqa: E731
    return fn, (left, right, like((groups,), "int32"), *([like((groups, n), "float32")] if bias else []))


def cases(run: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): every product of every model in bfloat16, and of a small layer in float32.

    Args:
      run: `run` of an implementation.
    """
    for name, sizes in MODELS.items():
        for product in PRODUCTS:
            yield (f"{name} {product}", *case(run, product, sizes))
    yield ("gpt-oss forward with a bias", *case(run, "forward", MODELS["gpt-oss"], bias=True))
    for product in PRODUCTS:
        yield (f"1000 rows float32 {product}", *case(run, product, (1000, 4, 512, 384), "float32"))
