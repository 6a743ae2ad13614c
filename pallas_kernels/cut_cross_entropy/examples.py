"""Cases that the gate compiles: the loss and its gradients, of heads of Llama 3's and GPT-2's vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.cut_cross_entropy.inputs import Inputs, Logits, Merged
from pallas_kernels.dispatch import Target

CASES: dict[str, dict[str, Any]] = {
    "ve 128256": {"layout": "ve", "vocabulary": 128256},
    "ve 50257 softcap sum": {"layout": "ve", "vocabulary": 50257, "softcap": 30.0, "summed": True},
    "ev 50257 softcap sum": {"layout": "ev", "vocabulary": 50257, "softcap": 30.0, "summed": True},
    "ve 128256 entropy": {"layout": "ve", "vocabulary": 128256, "entropy": True},
}
"""A name -> arguments of `case`."""


def case(
    run: Callable[..., Any],
    target: Target,
    *,
    layout: Any,
    vocabulary: int,
    width: int,
    dtype: str,
    softcap: float | None = None,
    summed: bool = False,
    entropy: bool = False,
    direction: str = "forward",
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of x, w and rows and, backward, the log-sum-exp and cotangents; and their shapes.

    The number of tokens is no multiple of a tile.

    Args:
      run: the implementation's.
      target: the device to compile for.
      layout: of w, "ve" or "ev".
      vocabulary: words.
      width: of the vectors.
      dtype: of x and w.
      softcap: of the logits, or `None`.
      summed: whether the sum of logits is needed.
      entropy: whether the entropy is needed.
      direction: "forward" or "backward".
    """
    logits = Logits(layout, softcap, summed, entropy)
    shape = (vocabulary, width) if layout == "ve" else (width, vocabulary)
    like = jax.ShapeDtypeStruct
    arrays = [like((8100, width), dtype), like(shape, dtype), like((8100,), "int32")]
    if direction == "backward":
        arrays += [like((8100,), "float32")] * logits.statistics

    def run_case(x: jax.Array, w: jax.Array, rows: jax.Array, *others: jax.Array) -> Any:
        more: tuple[Any, ...] = ()
        if others:
            lse, *slopes = logits.named(others)
            more = lse, Merged(*slopes)
        return run(target, Inputs(x, w, rows), *more, direction=direction, logits=logits, dw_dtype=dtype)

    return run_case, tuple(arrays)
