"""Softmax, its logarithm and its denominator in two passes, with kernels for TPU and Hopper.

    from pallas_kernels.softmax import combine, log_softmax, logsumexp, partial, softmax
    y = softmax(x)                                            # the best implementation of the platform
    total = combine(partial(x[:, :n]), partial(x[:, n:]))     # a row in two parts
    total.logsumexp()                                         # logsumexp(x)

All ops reduce over the last axis and take any leading shape. Kernels are differentiable once and in reverse mode, XLA's
implementations in any mode.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.dispatch import Implementation, KernelError, Target, dispatch
from pallas_kernels.softmax import gpu, reference, tpu
from pallas_kernels.softmax.pairs import Partial, combine, combine_all, empty, partial

__all__ = [
    "IMPLEMENTATIONS",
    "Partial",
    "combine",
    "combine_all",
    "empty",
    "log_softmax",
    "logsumexp",
    "partial",
    "softmax",
]

_DTYPES = ("float32", "bfloat16", "float16")


def softmax(x: jax.Array, *, where: jax.Array | None = None, implementation: str | None = None) -> jax.Array:
    """Return exp(x) over its sum along the last axis, computed in float32; special values as in `jax.nn.softmax`.

    Args:
      x: (..., C) in float32, bfloat16 or float16, with at least one column.
      where: boolean, broadcastable to x. Where it is False, x is ignored and the output is 0.
      implementation: "mosaic_tpu", "mosaic_gpu" or "xla"; `None` chooses the best for the platform. The gradient uses a
        named implementation, too.

    Returns:
      an array of x's shape and dtype. The gradient saves only this output (and the mask).

    Raises:
      KernelError: another dtype, no columns, a mask of another dtype or shape, or a named implementation that is not
        supported here.
    """
    return _normalise(*_checked("softmax", x, where), "softmax", implementation)


def log_softmax(x: jax.Array, *, where: jax.Array | None = None, implementation: str | None = None) -> jax.Array:
    """Return log(softmax(x)), also exact where softmax underflows; special values as in `jax.nn.log_softmax`.

    Args:
      x: (..., C) in float32, bfloat16 or float16, with at least one column.
      where: boolean, broadcastable to x. Where it is False, x is ignored and the output is -inf.
      implementation: as for `softmax`.

    Returns:
      an array of x's shape and dtype. The gradient saves x (and the mask): probabilities from the rounded output would
      be less exact.

    Raises:
      KernelError: as `softmax`.
    """
    return _normalise(*_checked("log_softmax", x, where), "log_softmax", implementation)


def logsumexp(x: jax.Array, *, where: jax.Array | None = None, implementation: str | None = None) -> jax.Array:
    """Return log(sum(exp(x))) along the last axis; special values as in `jax.nn.logsumexp`.

    Args:
      x: (..., C) in float32, bfloat16 or float16, with at least one column.
      where: boolean, broadcastable to x. Where it is False, x is ignored.
      implementation: as for `softmax`.

    Returns:
      float32 of x's leading shape; -inf, with gradient 0, where every column is ignored or -inf. The gradient saves x
      and two numbers per row: a scale, and the sum of exp(x - scale).

    Raises:
      KernelError: as `softmax`.
    """
    return _sum(*_checked("logsumexp", x, where), implementation)


# ---- implementations


def _gpu_supported(target: Target, *, op: str, **case: Any) -> str | None:
    if op.endswith("_backward"):
        return gpu.supported(target, inputs=2, **case)
    return gpu.supported_sums(target, **case)


def _tpu_supported(target: Target, *, op: str, **case: Any) -> str | None:
    return tpu.supported(target, inputs=2 if op.endswith("_backward") else 1, **case)


def _always_supported(target: Target, **case: Any) -> str | None:
    return None


def _run_kernel(module: Any, target: Target, *arrays: jax.Array, op: str, **case: Any) -> Any:
    shape = arrays[0].shape
    rows = [a.reshape(-1, shape[-1]) for a in arrays]
    if op.endswith("_backward"):
        return module.backward(target, *rows, op=op.removesuffix("_backward")).reshape(shape)
    if op == "sums":
        return tuple(y.reshape(shape[:-1]) for y in module.forward(target, *rows, op=op))
    return module.forward(target, *rows, op=op).reshape(shape)


def _run_xla(target: Target, *arrays: jax.Array, op: str, **case: Any) -> Any:
    run = {**reference.FORWARD, **{f"{k}_backward": f for k, f in reference.BACKWARD.items()}}[op]
    return run(*arrays)


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", ("cuda",), _gpu_supported, functools.partial(_run_kernel, gpu)),
    Implementation("mosaic_tpu", ("tpu",), _tpu_supported, functools.partial(_run_kernel, tpu)),
    Implementation("xla", (), _always_supported, _run_xla),
)
"""Best first."""


def _run(op: str, implementation: str | None, x: jax.Array, *others: jax.Array, masked: bool) -> Any:
    rows = math.prod(x.shape[:-1])
    case = {"op": op, "rows": rows, "columns": x.shape[-1], "dtype": x.dtype.name, "masked": masked}
    if rows == 0:  # a kernel's grid would be empty
        implementation = "xla"
    name = "logsumexp" if op == "sums" else op
    return dispatch(name, IMPLEMENTATIONS, (x, *others), case, implementation)


# ---- gradients


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _normalise(x: jax.Array, where: jax.Array | None, op: str, implementation: str | None) -> jax.Array:
    return _run(op, implementation, x, *(() if where is None else (where,)), masked=where is not None)


def _normalise_forward(
    x: jax.Array, where: jax.Array | None, op: str, implementation: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    y = _normalise(x, where, op, implementation)
    return y, (y if op == "softmax" else x, where)


def _normalise_backward(
    op: str, implementation: str | None, residuals: tuple[jax.Array, jax.Array | None], g: jax.Array
) -> tuple[jax.Array, None]:
    saved, where = residuals
    others: tuple[jax.Array, ...] = ()
    if where is not None:  # masked outputs are constant, so their cotangents do not count
        g = jnp.where(where, g, 0)
        others = () if op == "softmax" else (where,)  # softmax's output is 0 there
    g = g.astype(saved.dtype)
    return _run(f"{op}_backward", implementation, saved, g, *others, masked=bool(others)), None


_normalise.defvjp(_normalise_forward, _normalise_backward)


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _sum(x: jax.Array, where: jax.Array | None, implementation: str | None) -> jax.Array:
    return _sum_forward(x, where, implementation)[0]


def _sum_forward(
    x: jax.Array, where: jax.Array | None, implementation: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]]:
    others = () if where is None else (where,)
    scale, total = _run("sums", implementation, x, *others, masked=where is not None)
    return scale + jnp.log(total), (x, where, scale, total)


def _sum_backward(
    implementation: str | None, residuals: tuple[jax.Array, jax.Array | None, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
    x, where, scale, total = residuals
    some = (total != 0)[..., None]
    share = jnp.exp(reference.masked(x, where) - scale[..., None]) / jnp.where(some, total[..., None], 1)
    return (g[..., None] * jnp.where(some, share, 0)).astype(x.dtype), None


_sum.defvjp(_sum_forward, _sum_backward)


# ---- checks of the arguments


def _checked(op: str, x: Any, where: Any) -> tuple[jax.Array, jax.Array | None]:
    x = jnp.asarray(x)
    if x.dtype.name not in _DTYPES:
        raise KernelError(f"{op} takes float32, bfloat16 or float16, not {x.dtype.name}; convert with x.astype")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise KernelError(f"{op} sums over the last axis, which needs at least one column, not shape {x.shape}")
    if where is None:
        return x, None
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise KernelError(f"{op}: where has to be boolean, not {where.dtype.name}; compare with 0")
    try:
        fits = jnp.broadcast_shapes(where.shape, x.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise KernelError(f"{op}: where of shape {where.shape} does not broadcast to x of shape {x.shape}")
    return x, where
