"""Cases that the gate compiles: Llama-3-8B's parameters, sharded over eight devices, with their tiles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise.quantized import quantize_blockwise
from pallas_kernels.blockwise.rules import Rule

LLAMA = (
    ("embedding, tensor=8", (16032, 4096), (1, 128)),
    ("mlp, tensor=8", (4096, 1792), (1, 128)),
    ("mlp, fsdp=8", (512, 14336), (1, 128)),
    ("mlp stacked, fsdp=8", (4, 512, 14336), (1, 1, 128)),
    ("q, tensor=8", (4096, 4, 128), (1, 1, 128)),
    ("k, tensor=8", (4096, 1, 128), (1, 1, 128)),
    ("k stacked, fsdp=8", (6, 512, 8, 128), (1, 1, 1, 128)),
    ("o, tensor=8", (4, 128, 4096), (1, 1, 128)),
    ("norm", (4096,), (128,)),
)
"""(name, local shape, tile)."""


def case(
    op: Any,
    implementation: str,
    name: str,
    rule: Rule,
    shape: tuple[int, ...],
    tile: tuple[int, ...],
    param: Any,
    grad: Any,
    *,
    apply: bool = True,
    format: str = "dynamic",
) -> tuple[str, Any, tuple[Any, ...]]:
    """Return (name, a function of local arrays, their shapes): one step by a named implementation.

    Args:
      op: the package `pallas_kernels.blockwise`, an argument because it imports this module.
      implementation: its name.
      name: name of the case.
      rule: the optimizer's rule.
      shape: the shape of a parameter on one device.
      tile: its tile.
      param: the parameter's dtype.
      grad: the gradient's dtype.
      apply: as for `update_blockwise`.
      format: as for `quantize_blockwise`.
    """

    def states() -> tuple[Any, ...]:
        zero = jnp.zeros(shape, jnp.float32)
        return tuple(quantize_blockwise(zero, tile=tile, signed=signed, format=format) for signed in rule.states)

    def step(scalars: Any, p: Any, g: Any, state: Any) -> Any:
        return op.update_blockwise(rule, scalars, p, g, state, apply=apply, implementation=implementation)

    scalars = {s: jax.ShapeDtypeStruct((), jnp.float32) for s in rule.scalars}
    arrays = (jax.ShapeDtypeStruct(shape, param), jax.ShapeDtypeStruct(shape, grad))
    return name, step, (scalars, *arrays, jax.eval_shape(functools.partial(states)))
