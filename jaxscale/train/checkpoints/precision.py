"""Restore optimizer state that was saved in another precision, or with other 8-bit tiles, than it is used in."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layout.tensors import path_name
from jaxscale.optim import is_quantized
from jaxscale.step.state import TrainState
from pallas_kernels.blockwise import Quantized


def as_saved(
    state: TrainState, shardings: TrainState | None, saved: dict[str, Any]
) -> tuple[TrainState, TrainState | None]:
    """Return `state` and `shardings` with the optimizer's leaves in the precision in which they were saved.

    Args:
      state: shapes and dtypes of the state to restore.
      shardings: its shardings, or `None`.
      saved: leaves of the checkpoint's manifest.
    """
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(state.opt_state, is_leaf=is_quantized)
    places = structure.flatten_up_to(shardings.opt_state) if shardings else [None] * len(leaves)
    new_leaves, new_places = [], []
    for (path, leaf), place in zip(leaves, places, strict=True):
        name = f"opt_state/{path_name(path)}"
        home = place.codes if is_quantized(place) else place  # scales are sharded as the codes are
        encoding = saved.get(f"{name}/codes", {}).get("quantized")
        if name in saved and (is_quantized(leaf) or _other_float(leaf, saved[name])):
            leaf, place = jax.ShapeDtypeStruct(leaf.shape, np.dtype(saved[name]["dtype"])), home
        elif encoding is not None and (not is_quantized(leaf) or tuple(encoding["tile"]) != leaf.tile
                                       or encoding["format"] != leaf.format):  # fmt: skip
            parts = (saved[f"{name}/codes"], saved[f"{name}/scales"])
            shapes: Any = [jax.ShapeDtypeStruct(tuple(x["shape"]), np.dtype(x["dtype"])) for x in parts]
            tile = tuple(encoding["tile"])
            leaf = Quantized(shapes[0], shapes[1], tile, encoding["format"], encoding["signed"])
            place = dataclasses.replace(leaf, codes=home, scales=_replicated(home))
        new_leaves.append(leaf)
        new_places.append(place)
    stored = dataclasses.replace(state, opt_state=structure.unflatten(new_leaves))
    if shardings is None:
        return stored, None
    return stored, dataclasses.replace(shardings, opt_state=structure.unflatten(new_places))


def has_lost_moments(saved: dict[str, Any]) -> bool:
    """Whether a manifest is of a version that rounded small positive second moments to 0 in 8 bits.

    Args:
      saved: leaves of the manifest.
    """
    encodings = [e for leaf in saved.values() if (e := leaf.get("quantized")) is not None]
    return any(not e["signed"] and not e.get("positive", False) for e in encodings)


def _other_float(leaf: jax.Array | jax.ShapeDtypeStruct, saved: dict[str, Any]) -> bool:
    """Whether an array was saved with another float dtype: moments have their parameter's, or float32 with 8 bits."""
    dtype = np.dtype(saved["dtype"])
    return leaf.dtype != dtype and all(jnp.issubdtype(d, jnp.floating) for d in (leaf.dtype, dtype))


def _replicated(sharding: NamedSharding | None) -> Any:
    """Replicate over the mesh: scales of another tile size need not be divisible by it."""
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())
