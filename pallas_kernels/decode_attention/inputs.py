"""Arguments of attention to a cache: arrays, settings known before tracing, and the checks before tracing.

Keys lie in pages, and a row's table lists its pages in order; a cache without pages has one page per row. `first` and
`stride` describe tables that list every `stride`-th page of a sequence, whose pages are spread over devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import as_int32, finite
from pallas_kernels.errors import KernelError
from pallas_kernels.flash_attention.inputs import Score

__all__ = ["Inputs", "Settings", "checked", "starts"]

_OP = "decode_attention"
DTYPES = ("float32", "bfloat16", "float16")
CODES = ("int8", "float8_e4m3fn")
"""Types of keys and values that have scales."""


class Inputs(NamedTuple):
    """The arrays.

    Args:
      q: (B, Q, H, D).
      k: (P, page, K, D).
      v: (P, page, K, Dv), or `None`: the first Dv widths of keys.
      positions: int32 (B, Q).
      tables: int32 (B, N).
      first: int32 ().
      scales: of codes of 8 bits, float32 (P, page, K): those of keys, and of values or `None` as `v`; else `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    positions: jax.Array
    tables: jax.Array
    first: jax.Array
    scales: tuple[jax.Array, jax.Array | None] | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything besides shapes that is known before tracing.

    Args:
      score: scale and soft-cap.
      window: number of latest positions that a query sees, its own included, or `None`.
      value_dim: Dv.
      stride: pages of the sequence from one table entry to the next.
      maximum: used as the largest score of each query, or `None` to compute it.
      codes: whether keys and values are codes of 8 bits with scales.
    """

    score: Score
    window: int | None
    value_dim: int
    stride: int
    maximum: float | None = None
    codes: bool = False


def starts(first: Any, stride: int, page: int, entries: int) -> jax.Array:
    """Return the position of the first key of each entry of a table, int32."""
    return (jnp.asarray(first, jnp.int32) + jnp.arange(entries, dtype=jnp.int32) * stride) * page


def checked(
    q: Any,
    k: Any,
    v: Any,
    *,
    positions: Any,
    lengths: Any,
    tables: Any,
    first: Any,
    stride: int,
    window: Any,
    softcap: Any,
    scale: Any,
    value_dim: int | None,
    maximum: Any,
    scales: Any = None,
) -> tuple[Inputs, Settings]:
    """Check and convert the arguments of `decode_attention`.

    Returns:
      the arrays and the settings.

    Raises:
      KernelError: as `decode_attention`.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), None if v is None else jnp.asarray(v)
    scales = _scales(scales, k, v)
    _check_arrays(q, k, v, () if scales is None else CODES)
    (b, n, _, d), (pages, page) = q.shape, k.shape[:2]
    value_dim = _value_dim(d, v, value_dim)
    positions = _positions(positions, lengths, b, n)
    tables = _tables(tables, b, pages)
    if tables.shape[1] * page * stride >= 2**30:
        raise _error(f"{tables.shape[1]} pages of {page} keys, every {stride}-th of a sequence, pass position 2**30")
    if window is not None and (isinstance(window, bool) or not hasattr(window, "__index__") or int(window) < 1):
        raise _error(
            f"window has to be an integer of at least 1 (the query's own position counts) or None, not {window!r}"
        )
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        raise _error(f"stride has to be an integer of at least 1, not {stride!r}")
    softcap, scale = finite(_OP, "softcap", softcap), finite(_OP, "scale", scale, zero=True)
    maximum = _number("maximum", maximum)
    first = as_int32(_OP, "first", first)
    if first.ndim:
        raise _error(f"first has to be one integer, not of shape {first.shape}")
    score = Score("softmax", d**-0.5 if scale is None else scale, softcap, 0.0)
    settings = Settings(score, None if window is None else min(int(window), 2**30), value_dim, stride, maximum)
    settings = dataclasses.replace(settings, codes=scales is not None)
    return Inputs(q, k, v, positions, tables, first, scales), settings


def _error(what: str) -> KernelError:
    return KernelError(f"decode_attention: {what}")


def _scales(scales: Any, k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, jax.Array | None] | None:
    if scales is None:
        return None
    of_k, of_v = (None if x is None else jnp.asarray(x, jnp.float32) for x in scales)
    if (of_v is None) != (v is None):
        raise _error("scales has to be (those of k, those of v), the latter None where v is None")
    for name, scale, codes in (("k", of_k, k), ("v", of_v, v)):
        if codes is not None and (scale is None or scale.shape != codes.shape[:-1]):
            shape = None if scale is None else scale.shape
            raise _error(f"the scales of {name} have to be {codes.shape[:-1]}, one for each key and head, not {shape}")
    assert of_k is not None
    return of_k, of_v


def _check_arrays(q: jax.Array, k: jax.Array, v: jax.Array | None, codes: tuple[str, ...]) -> None:
    shapes = {"q": (q, "(rows, queries, heads, head_dim)"), "k": (k, "(pages, page, key heads, head_dim)")}
    for name, (x, words) in (shapes | ({} if v is None else {"v": (v, "(pages, page, key heads, width)")})).items():
        if x.ndim != 4:
            raise _error(f"{name} has to be {words}, not of shape {x.shape}")
        if codes and name != "q":
            if x.dtype.name not in codes:
                raise _error(f"scales are for int8 or float8_e4m3fn, and {name} is {x.dtype.name}; leave them out")
        elif x.dtype.name not in DTYPES:
            raise _error(
                f"takes float32, bfloat16 or float16, and {name} is {x.dtype.name}; convert with {name}.astype"
            )
        if not codes and x.dtype != q.dtype:
            raise _error(f"q is {q.dtype.name} and {name} is {x.dtype.name}; they have to share a dtype")
        if 0 in x.shape:
            raise _error(f"{name} of shape {x.shape} has nothing in it to attend with")
    if v is not None and k.shape[:3] != v.shape[:3]:
        raise _error(f"k of shape {k.shape} and v of shape {v.shape} differ before the last axis")
    if q.shape[3] != k.shape[3]:
        raise _error(f"the head_dim of q is {q.shape[3]}, and that of k is {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        near = max(1, round(q.shape[2] / k.shape[2])) * k.shape[2]
        raise _error(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads; {near} would be")


def _value_dim(d: int, v: jax.Array | None, value_dim: int | None) -> int:
    if v is not None:
        if value_dim not in (None, v.shape[3]):
            raise _error(f"value_dim is {value_dim}, and v is {v.shape[3]} wide; leave value_dim out")
        return int(v.shape[3])
    if value_dim is None:
        raise _error("without v, values are the first value_dim widths of k; set value_dim")
    if not 1 <= value_dim <= d:
        raise _error(f"value_dim has to be from 1 to the {d} widths of k, not {value_dim}")
    return value_dim


def _positions(positions: Any, lengths: Any, b: int, n: int) -> jax.Array:
    if (positions is None) == (lengths is None):
        raise _error("set either positions, (rows, queries), or lengths, (rows,)")
    name, value, want = ("lengths", lengths, (b,)) if positions is None else ("positions", positions, (b, n))
    array = as_int32(_OP, name, value)
    if array.shape != want:
        raise _error(f"{name} has to be integers of shape {want}, not of shape {array.shape}")
    return array if positions is not None else jnp.maximum(array[:, None] - n + jnp.arange(n, dtype=jnp.int32), -1)


def _tables(tables: Any, b: int, pages: int) -> jax.Array:
    if tables is None:
        if pages != b:
            raise _error(f"q has {b} rows and k has {pages} pages; set tables to list each row's pages")
        return jnp.asarray(np.arange(b, dtype=np.int32)[:, None])
    tables = as_int32(_OP, "tables", tables)
    if tables.ndim != 2 or tables.shape[0] != b or not tables.shape[1]:
        raise _error(f"tables has to be ({b}, pages of a row), not of shape {tables.shape}")
    return tables


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, jax.core.Tracer):
        raise _error(f"{name} has to be known before tracing; a traced scale may multiply q instead")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _error(f"{name} has to be a number or None, not {value!r}") from None
    if not np.isfinite(number):
        raise _error(f"{name} has to be finite or None, not {number}")
    return number
