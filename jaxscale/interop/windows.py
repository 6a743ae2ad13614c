"""Convert sliding windows of layers between config.json and our config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.fields import Fields
from jaxscale.models import TransformerConfig

T = TypeVar("T")

FULL, SLIDING = "full_attention", "sliding_attention"


def by_types(c: Fields, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return `TransformerConfig.windows` for layers of these types.

    Args:
      c: the fields of config.json.
      types: "full_attention" or "sliding_attention" for each layer.
      window: the window's size in tokens.

    Raises:
      CheckpointError: a type is unknown, the window has no size, or there is not one type for each layer.
    """
    depth = c.size("num_hidden_layers")
    unknown = [t for t in types if t not in (FULL, SLIDING)]
    if unknown:
        raise CheckpointError(f"{c.what} has the layer type '{unknown[0]}'{near(str(unknown[0]), (FULL, SLIDING))}")
    if len(types) != depth:
        raise CheckpointError(f"{c.what} has {len(types)} layer_types and {depth} layers")
    if SLIDING in types and not window:
        raise CheckpointError(f"{c.what} has layers of {SLIDING} and no sliding_window")
    return shortest([window if t == SLIDING else None for t in types])


def shortest(layers: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest pattern that gives each layer's window, or other values, when it is repeated."""
    n = len(layers)
    return next(tuple(layers[:p]) for p in range(1, n + 1) if all(layers[i] == layers[i % p] for i in range(n)))


def types_json(m: TransformerConfig) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window` of a config; config.json can express only one size of windows."""
    windows = m.layer_windows()
    size = next((w for w in windows if w is not None), None)
    return {"sliding_window": size, "layer_types": [FULL if w is None else SLIDING for w in windows]}
