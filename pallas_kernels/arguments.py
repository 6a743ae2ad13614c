"""Checks of arguments that several ops share, made before anything is traced."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError

__all__ = ["as_int32", "checks_devices", "finite", "summed", "varying"]


def as_int32(op: str, name: str, value: Any) -> jax.Array:
    """Return integers of any type as int32; raise instead of wrapping around.

    Args:
      op: name of the op, for the error message.
      name: name of the argument, for the error message.
      value: an array of integers, or what `np.asarray` accepts.

    Raises:
      KernelError: the values are not integers; one does not fit in int32; or a traced array has a wider type, whose
        values cannot be checked.
    """
    host = value if isinstance(value, jax.Array | jax.core.Tracer) else np.asarray(value)
    if not jnp.issubdtype(host.dtype, jnp.integer):
        raise KernelError(f"{op}: {name} has to be integers, not {host.dtype.name} of shape {host.shape}")
    if jnp.iinfo(host.dtype).max > 2**31 - 1:
        if isinstance(host, jax.core.Tracer) or not getattr(host, "is_fully_addressable", True):
            raise KernelError(
                f"{op}: {name} is {host.dtype.name}, which int32 does not hold; convert with {name}.astype('int32') "
                "where its values allow it"
            )
        host = np.asarray(host)
        wide = (host < -(2**31)) | (host > 2**31 - 1)
        if wide.any():
            raise KernelError(
                f"{op}: {name} holds {host[wide].flat[0]}, and int32 ends at {2**31 - 1}; number the ids from 0"
            )
    return jnp.asarray(host.astype(np.int32))


def finite(op: str, name: str, value: Any, *, zero: bool = False) -> float | None:
    """Return a positive, finite number (or 0, with `zero`), or `None` for `None`.

    Args:
      op: name of the op, for the error message.
      name: name of the argument, for the error message.
      value: the number, or `None`.
      zero: allow 0.

    Raises:
      KernelError: the number is negative, zero without `zero` or not finite, or it is traced.
    """
    if value is None:
        return None
    if isinstance(value, jax.core.Tracer):
        raise KernelError(f"{op}: {name} has to be known before tracing; a traced scale may multiply q instead")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise KernelError(f"{op}: {name} has to be a number or None, not {value!r}") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        least = "finite and at least 0" if zero else "finite and greater than 0"
        raise KernelError(f"{op}: {name} has to be {least} or None, not {number}")
    return number


def varying(x: jax.Array, *like: Any) -> jax.Array:
    """Return an array that differs between devices of a `shard_map` where any of some others does, by its type.

    Args:
      x: any array.
      *like: types of arrays, from `jax.typeof`.
    """
    missing = frozenset[str]().union(*map(_varies, like)) - _varies(jax.typeof(x))
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def summed(cotangent: jax.Array, kind: Any) -> jax.Array:
    """Return the sum of a cotangent over the devices of a `shard_map` that have the same value.

    Args:
      cotangent: of a value on each device.
      kind: the value's type, from `jax.typeof`.
    """
    same = _varies(jax.typeof(cotangent)) - _varies(kind)
    return jax.lax.psum(cotangent, tuple(sorted(same))) if same else cotangent


def checks_devices(arrays: Any) -> bool:
    """Return whether arrays are of a `shard_map` that checks what differs between devices, by their types.

    Args:
      arrays: a tree of arrays.
    """
    return any(_varies(jax.typeof(x)) for x in jax.tree.leaves(arrays))


def _varies(kind: Any) -> frozenset[str]:
    return getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset())
