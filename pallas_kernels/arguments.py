"""Checks of arguments that several ops take, before anything is traced."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.errors import KernelError

__all__ = ["as_int32", "finite"]


def as_int32(op: str, name: str, value: Any) -> jax.Array:
    """Integers of any type as int32, none of which wraps.

    Args:
      op, name: of the op and its argument, for the sentence.
      value: an array or whatever makes one.

    Raises:
      KernelError: no integers; one that int32 does not hold; or a traced array of a type with such values, which
        cannot be looked at.
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
                f"{op}: {name} holds {host[wide].flat[0]}, and int32 ends at {2**31 - 1}; number them from 0"
            )
    return jnp.asarray(host.astype(np.int32))


def finite(op: str, name: str, value: Any, *, zero: bool = False) -> float | None:
    """A positive, finite number (or 0, with `zero`), or `None`.

    Raises:
      KernelError: it is another one, or known only when the program runs.
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
