"""Optimizer states in eight bits, one scale per block, and their update in one pass (Dettmers et al. 2022).

    tile = tile_for(param.shape, ("embed", "mlp"))
    states = tuple(quantize_blockwise(jnp.zeros(param.shape), tile=tile, signed=signed) for signed in ADAMW.states)
    param, states = update_blockwise(ADAMW, scalars, param, grad, states)

`codecs` holds the 8-bit codes, `rules` the optimizers' arithmetic, `quantized` the arrays and their tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise import gpu, reference, tpu
from pallas_kernels.blockwise.codecs import FORMATS, Codec, codec
from pallas_kernels.blockwise.quantized import (
    Quantized,
    check_quantized,
    dequantize_blockwise,
    quantize_blockwise,
    tile_for,
)
from pallas_kernels.blockwise.rules import (
    ADAGRAD,
    ADAM_DIRECTION,
    ADAMW,
    LION,
    MOMENTUM,
    NESTEROV,
    RULES,
    Rule,
)
from pallas_kernels.dispatch import Implementation, KernelError, dispatch

__all__ = [
    "ADAGRAD",
    "ADAMW",
    "ADAM_DIRECTION",
    "Codec",
    "FORMATS",
    "LION",
    "MOMENTUM",
    "NESTEROV",
    "Quantized",
    "RULES",
    "Rule",
    "codec",
    "dequantize_blockwise",
    "quantize_blockwise",
    "tile_for",
    "update_blockwise",
    "without_kernel",
]

PARAM_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of parameters; gradients may be of any float dtype."""


def update_blockwise(
    rule: Rule,
    scalars: Mapping[str, jax.Array | float],
    param: jax.Array,
    grad: jax.Array,
    states: tuple[Quantized, ...],
    *,
    apply: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[Quantized, ...]]:
    """Take one step of an optimizer with 8-bit states, in one pass over memory.

    Dequantise the states, apply the rule in float32, add the update to the parameter and quantise the new float32
    states. The parameter, codes and scales are updated in place when the caller donates them. Under `jit` on several
    devices call it inside `shard_map` with local arrays: a tile never straddles two shards, so the result is the same
    to the bit.

    Args:
      rule: one of `RULES`.
      scalars: exactly the numbers that `rule.scalars` names, each a float or a scalar array; used as float32.
      param: float32, bfloat16 or float16, of any shape.
      grad: a float array of the parameter's shape.
      states: one `Quantized` per entry of `rule.states`, of the parameter's shape, all of the same tile and format.
      apply: False returns the float32 update (what to add) in place of the new parameter.
      implementation: "mosaic_tpu", "mosaic_gpu", "xla", or `None` for the best.

    Returns:
      the new parameter, in its dtype, or the update; and the new states.

    Raises:
      KernelError: dtypes, shapes, tiles or scalars do not fit, or a named implementation is not supported here.
    """
    _check(rule, scalars, param, grad, states)
    derived = rule.derive({name: jnp.asarray(scalars[name], jnp.float32) for name in rule.scalars})
    names = tuple(sorted(derived))
    first = states[0]
    case = dict(
        rule=rule,
        names=names,
        shape=tuple(param.shape),
        tile=first.tile,
        flat=first.flat,
        format=first.format,
        param_dtype=str(param.dtype),
        grad_dtype=str(grad.dtype),
        apply=bool(apply),
    )
    arrays = (
        jnp.stack([jnp.asarray(derived[n], jnp.float32) for n in names]),
        param,
        grad,
        tuple(q.codes for q in states),
        tuple(q.scales for q in states),
    )
    out, codes, scales = dispatch("blockwise", IMPLEMENTATIONS, arrays, case, implementation)
    new = zip(codes, scales, states, strict=True)
    return out, tuple(Quantized(c, s, q.tile, q.format, q.signed, q.flat) for c, s, q in new)


def without_kernel(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[str, ...]:
    """Return the platforms, of "TPU" and "GPU", whose kernel does not support a tile, so that XLA does the update.

    Args:
      shape: the parameter's shape on one device.
      tile: its tile.
    """
    forms = {"TPU": tpu.as_stack, "GPU": gpu.as_matrix}
    return tuple(name for name, form in forms.items() if isinstance(form(shape, tile), str))


def _always_supported(target: Any, **case: Any) -> str | None:
    return None


def _xla(target: Any, numbers: Any, param: Any, grad: Any, codes: Any, scales: Any, **case: Any) -> Any:
    rule, names = case["rule"], case["names"]
    static = {k: case[k] for k in ("tile", "flat", "format", "apply")}
    return reference.update(rule, dict(zip(names, numbers, strict=True)), param, grad, codes, scales, **static)


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", ("tpu",), tpu.supported, tpu.run),
    Implementation("mosaic_gpu", ("cuda",), gpu.supported, gpu.run),
    Implementation("xla", (), _always_supported, _xla),
)
"""Best first."""


def _check(rule: Rule, scalars: Mapping[str, Any], param: Any, grad: Any, states: tuple[Quantized, ...]) -> None:
    if set(scalars) != set(rule.scalars):
        wrong = sorted(set(scalars) ^ set(rule.scalars))
        raise KernelError(f"{rule.name} takes the scalars {', '.join(rule.scalars)}; {', '.join(wrong)} do not match")
    if str(param.dtype) not in PARAM_DTYPES:
        raise KernelError(f"a parameter is {', '.join(PARAM_DTYPES[:-1])} or {PARAM_DTYPES[-1]}, not {param.dtype}")
    if not jnp.issubdtype(grad.dtype, jnp.floating):
        raise KernelError(f"a gradient is a float, not {grad.dtype}; cast it to {param.dtype} first")
    if param.shape != grad.shape:
        raise KernelError(f"the gradient's shape {tuple(grad.shape)} is not the parameter's, {tuple(param.shape)}")
    if len(states) != len(rule.states):
        raise KernelError(f"{rule.name} has {len(rule.states)} states, but the argument states has {len(states)}")
    for i, (q, signed) in enumerate(zip(states, rule.states, strict=True)):
        check_quantized(q, f"state {i}")
        if q.shape != tuple(param.shape):
            raise KernelError(f"state {i}'s shape {q.shape} is not the parameter's, {tuple(param.shape)}")
        if q.signed != signed:
            raise KernelError(f"state {i} of {rule.name} must be quantised with signed={signed}")
        if (q.tile, q.flat, q.format) != (states[0].tile, states[0].flat, states[0].format):
            raise KernelError(f"state {i} has another tile or format than state 0; all states need the same")
