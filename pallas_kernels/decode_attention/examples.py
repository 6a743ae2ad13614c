"""Cases that the gate compiles and the tuner times: shapes of a cache on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.decode_attention.inputs import Inputs, Settings
from pallas_kernels.dispatch import device
from pallas_kernels.flash_attention.inputs import Score


def case(
    run: Callable[..., Any],
    *,
    b: int = 8,
    queries: int = 1,
    t: int = 4096,
    h: int = 32,
    kv: int = 8,
    d: int = 128,
    dv: int = 128,
    page: int | None = None,
    stride: int = 1,
    dtype: str = "bfloat16",
    window: int | None = None,
    softcap: float | None = None,
    shared: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one implementation, for the device in scope.

    Args:
      run: `run` of an implementation.
      b: rows.
      queries: queries of each row.
      t: keys of each row.
      h: query heads.
      kv: key heads.
      d: width of keys.
      dv: width of values.
      page: keys of a page; those of a row by default.
      stride: as for `decode_attention`.
      dtype: of q, k and v.
      window: as for `decode_attention`.
      softcap: as for `decode_attention`.
      shared: values are the first widths of keys.
    """
    page = t if page is None else page
    entries = -(-t // page)
    settings = Settings(Score("softmax", d**-0.5, softcap, 0.0), window, dv, stride)

    def array(*shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    inputs = Inputs(
        q=array(b, queries, h, d),
        k=array(b * entries, page, kv, d),
        v=None if shared else array(b * entries, page, kv, dv),
        positions=array(b, queries, dtype="int32"),
        tables=array(b, entries, dtype="int32"),
        first=array(dtype="int32"),
    )
    return lambda *arrays: run(device(), *arrays, settings=settings), (inputs,)
