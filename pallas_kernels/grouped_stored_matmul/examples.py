"""Cases that the gate compiles: products of known models' experts, stored in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import device
from pallas_kernels.grouped_stored_matmul.inputs import Facts, one_of
from pallas_kernels.stored_matmul.examples import FORMATS, shapes
from pallas_kernels.stored_matmul.inputs import Packed, checked

MODELS: dict[str, tuple[int, int, int, int]] = {
    "gpt-oss": (1024, 32, 2880, 2880),
    "qwen3": (1024, 128, 2048, 768),
    "mixtral down": (512, 8, 14336, 4096),
}
"""A name -> rows of 128 or 256 tokens, groups, inputs and outputs of the experts of GPT-OSS-20B, Qwen3-30B-A3B and
Mixtral-8x7B."""

STORED = ("int8", "int4, groups of 128", "mxfp4")
"""Formats of `stored_matmul.examples.FORMATS`."""


def weight_of(groups: int, k: int, n: int, form: str) -> Packed:
    """Return the shapes of the matrices.

    Args:
      groups: number of groups.
      k: rows of a matrix.
      n: its columns.
      form: a key of `stored_matmul.examples.FORMATS`; its groups of 128 rows are of 64 where 128 does not divide k.
    """
    options = dict(FORMATS[form])
    if options.get("group") == 128 and k % 128:
        options["group"] = 64
    one = shapes(k, n, **options)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((groups, *a.shape), a.dtype), one)


def case(
    run: Callable[..., Any],
    sizes: tuple[int, int, int, int],
    form: str,
    dtype: str = "bfloat16",
    transposed: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one implementation, for the device in scope.

    Args:
      run: `run` of an implementation.
      sizes: rows, groups, and the layer's inputs and outputs.
      form: see `weight_of`.
      dtype: of the rows.
      transposed: as for `grouped_stored_matmul`.
    """
    m, groups, k, n = sizes
    weight = weight_of(groups, k, n, form)
    rows: Any = jax.ShapeDtypeStruct((m, n if transposed else k), dtype)
    facts = Facts(groups, checked(rows, one_of(weight), transposed, None))
    fn = lambda rows, weight, sizes: run(device(), rows, weight, sizes, facts=facts)  # noqa: E731
    return fn, (rows, weight, jax.ShapeDtypeStruct((groups,), jnp.int32))


def cases(run: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): every model in every format, with more rows, in float32 and transposed.

    Args:
      run: `run` of an implementation.
    """
    for name, sizes in MODELS.items():
        for form in STORED:
            yield (f"{name} {form}", *case(run, sizes, form))
    yield ("qwen3 mxfp4, 32768 rows", *case(run, (32768, *MODELS["qwen3"][1:]), "mxfp4"))
    yield ("1000 rows float32 int4", *case(run, (1000, 4, 512, 384), "int4, groups of 128", "float32"))
    for form in STORED:
        yield (f"qwen3 {form} transposed", *case(run, MODELS["qwen3"], form, transposed=True))
