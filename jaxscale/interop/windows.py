"""Which layers attend to a window, as config.json says it and as we do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.fields import Fields
from jaxscale.models import TransformerConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def by_types(c: Fields, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The windows of layers of these types.

    Raises:
      CheckpointError: a type that is not known, a window without a size, or not one type for each layer.
    """
    depth = c.size("num_hidden_layers")
    strange = [t for t in types if t not in (FULL, SLIDING)]
    if strange:
        raise CheckpointError(f"{c.what} has the layer type '{strange[0]}'{near(str(strange[0]), (FULL, SLIDING))}")
    if len(types) != depth:
        raise CheckpointError(f"{c.what} has {len(types)} layer_types and {depth} layers")
    if SLIDING in types and not window:
        raise CheckpointError(f"{c.what} has layers of {SLIDING} and no sliding_window")
    return shortest([window if t == SLIDING else None for t in types])


def shortest(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """The shortest pattern that, repeated, gives a window for every layer."""
    n = len(windows)
    return next(tuple(windows[:p]) for p in range(1, n + 1) if all(windows[i] == windows[i % p] for i in range(n)))


def types_json(m: TransformerConfig) -> dict[str, Any]:
    """`layer_types` and `sliding_window` of a config; of several sizes of windows it can say one."""
    windows = m.layer_windows()
    size = next((w for w in windows if w is not None), None)
    return {"sliding_window": size, "layer_types": [FULL if w is None else SLIDING for w in windows]}
