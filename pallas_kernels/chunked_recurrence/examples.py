"""Cases that the gate compiles: the mixers' recurrences at widths that models have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunked_recurrence.inputs import PRODUCTS, Inputs, checked
from pallas_kernels.dispatch import device

MIXERS: dict[str, dict[str, Any]] = {
    "RetNet": {"decay": "heads", "widths": (256, 512)},
    "Mamba-2": {"decay": "heads", "widths": (128, 64)},
    "linear attention": {"decay": "none", "widths": (64, 64)},
    "Gated DeltaNet": {"decay": "heads", "delta": True, "widths": (128, 128)},
    "GLA": {"decay": "channels", "widths": (64, 128)},
    "Kimi Delta Attention": {"decay": "channels", "delta": True, "widths": (128, 128)},
}
"""A mixer's name -> arguments of `shapes`."""


def shapes(
    seq: int,
    heads: int,
    *,
    widths: tuple[int, int],
    decay: str = "none",
    delta: bool = False,
    dtype: str = "bfloat16",
    batch: int = 1,
    state: bool = False,
) -> Inputs:
    """Return the shapes of a recurrence's arrays.

    Args:
      seq: tokens of a row.
      heads: number of heads.
      widths: of a key and of a value.
      decay: "none", "heads" or "channels".
      delta: with the delta rule.
      dtype: of q, k and v.
      batch: rows.
      state: go on from a state.
    """

    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, (key, value) = (batch, seq, heads), widths
    decays = {"none": None, "heads": array(*tokens), "channels": array(*tokens, key)}
    return Inputs(
        array(*tokens, key, dtype=dtype),
        array(*tokens, key, dtype=dtype),
        array(*tokens, value, dtype=dtype),
        decays[decay],
        array(*tokens) if delta else None,
        array(batch, seq, dtype=bool),
        array(batch, heads, key, value) if state else None,
    )


def case(
    run: Callable[..., Any], inputs: Inputs, direction: str, chunk: int | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one implementation, for the device in scope.

    Args:
      run: `run` of an implementation.
      inputs: of `shapes`.
      direction: "forward" or "backward".
      chunk: tokens in a chunk.
    """
    facts = checked(inputs, chunk)
    shape = (facts.batch, facts.heads, facts.key, facts.value)
    cotangents = (inputs.v, jax.ShapeDtypeStruct(shape, jnp.float32)) if direction == "backward" else ()
    return lambda *arrays: run(device(), *arrays, facts=facts, direction=direction), (inputs, *cotangents)


def cases(
    run: Callable[..., Any], serves: Callable[..., bool] = lambda **case: True
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): every mixer in both dtypes and directions, and odd lengths.

    Args:
      run: `run` of an implementation.
      serves: whether it serves a case, of `facts` and `direction`.
    """
    every = [
        (f"{name} {dtype}", shapes(4096, 16, dtype=dtype, **options))
        for name, options in MIXERS.items()
        for dtype in ("bfloat16", "float32")
    ]
    odd = {"state": True, "batch": 2} | MIXERS["Gated DeltaNet"]
    every += [(f"1000 tokens from a state, 3 heads {d}", shapes(1000, 3, dtype=d, **odd)) for d in PRODUCTS]
    for name, inputs in every:
        for direction in ("forward", "backward"):
            if serves(facts=checked(inputs, None), direction=direction):
                yield f"{name} {direction}", *case(run, inputs, direction)
