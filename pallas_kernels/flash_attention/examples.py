"""Cases that the gate compiles and the tuner times: shapes of a long sequence on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.dispatch import device
from pallas_kernels.flash_attention.dropout import Drop
from pallas_kernels.flash_attention.inputs import Inputs, Kind, Score, Settings
from pallas_kernels.flash_attention.masks import Mask, Tokens


def case(
    run: Callable[..., Any],
    direction: str,
    *,
    mask: Mask,
    b: int = 2,
    s: int = 4096,
    t: int | None = None,
    h: int = 8,
    kv: int = 2,
    d: int = 128,
    dv: int = 128,
    dtype: str = "bfloat16",
    kind: Kind = "softmax",
    softcap: float | None = None,
    segments: bool = False,
    positions: bool = False,
    deterministic: bool = False,
    dropout: float = 0.0,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of local arrays and their shapes: one direction of one implementation, for the device in scope.

    Args:
      run: `run` of an implementation.
      direction: "forward" or "backward".
      mask: the mask.
      b: examples.
      s: queries.
      t: keys; as many as queries by default.
      h: query heads.
      kv: key heads.
      d: width of keys.
      dv: width of values.
      dtype: of q, k and v.
      kind: as for `flash_attention`.
      softcap: as for `flash_attention`.
      segments: whether tokens have segment ids.
      positions: whether tokens have positions.
      deterministic: as for `flash_attention`.
      dropout: as for `flash_attention`.
    """
    t = s if t is None else t
    settings = Settings(
        mask, Score(kind, d**-0.5, softcap, -1.0 if kind == "sigmoid" else 0.0, dropout), False, deterministic, None
    )

    def array(*shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    ids = array(b, s, dtype="int32"), array(b, t, dtype="int32")
    tokens = Tokens(*(ids if segments else (None, None)), *(ids if positions else (None, None)))
    drop = Drop(array(b, h, 2, dtype="int32"), *ids) if dropout else None
    inputs = Inputs(array(b, s, h, d), array(b, t, kv, d), array(b, t, kv, dv), None, tokens, drop)
    out, rows = array(b, s, h, dv), array(b, s, h, dtype="float32") if kind == "softmax" else None
    others = (out, rows, out, rows) if direction == "backward" else ()
    return lambda *arrays: run(device(), *arrays, direction=direction, settings=settings), (inputs, *others)
