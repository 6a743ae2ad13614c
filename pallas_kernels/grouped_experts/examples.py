"""Cases that the gate compiles: the kernels of the experts of known models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Target, device
from pallas_kernels.grouped_experts.inputs import Facts, swiglu
from pallas_kernels.grouped_matmul.examples import MODELS

KERNELS: dict[str, tuple[Any, bool]] = {
    "hidden": ("hidden", False),
    "hidden, saved": ("hidden", True),
    "gradients": ("gradients", False),
    "gradients, saved": ("gradients", True),
}
"""A name -> which kernel, and whether products are saved."""


def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return GPT-OSS's hidden layer.

    Args:
      gate: the gate's product.
      up: the other product.
    """
    gate = jnp.minimum(gate, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -7.0, 7.0) + 1)


def case(
    run: Callable[..., Any],
    kernel: str,
    sizes: tuple[int, int, int, int],
    dtype: str = "bfloat16",
    target: Target | None = None,
    biased: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one kernel by one implementation.

    Args:
      run: `run` of an implementation.
      kernel: one of `KERNELS`.
      sizes: rows, groups, and the layer's width and hidden width.
      dtype: of rows and matrices.
      target: the device; by default that in scope when the function is traced.
      biased: with biases and GPT-OSS's hidden layer.
    """
    (m, groups, k, n), (product, saved), like = sizes, KERNELS[kernel], jax.ShapeDtypeStruct
    facts = Facts(product, groups, m, k, n, dtype, saved, biased, clamped if biased else swiglu)
    into, bias = like((groups, k, n), dtype), like((groups, n), "float32")
    biases = (bias, bias) if biased else None
    shapes: tuple[Any, ...] = like((m, k), dtype), into, into, like((groups,), "int32"), like((m,), "float32"), biases
    if product == "gradients":
        saves = (like((m, n), dtype),) * 2 if saved else ()
        shapes += like((groups, n, k), dtype), like((m, k), dtype), saves
    return (lambda *arrays: run(target or device(), *arrays, facts=facts)), shapes


def cases(run: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): every kernel of every model in bfloat16, and of a small layer in float32.

    Args:
      run: `run` of an implementation.
    """
    for name, sizes in MODELS.items():
        for kernel in KERNELS:
            yield (f"{name} {kernel}", *case(run, kernel, sizes, biased=name == "gpt-oss"))
    for kernel in ("hidden", "gradients"):
        yield (f"1000 rows float32 {kernel}", *case(run, kernel, (1000, 4, 512, 384), "float32"))
