"""Flags that are equal on all devices, even if faulty memory has made replicated values differ."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool

from jaxscale.layout import current


def anywhere(flags: Bool[Array, "..."]) -> Bool[Array, "..."]:
    """Return which flags are set on any device of the layout in force, equal on all devices.

    The partitioner assumes that replicated values are equal, and reduces only over mesh axes that shard a value. If one
    replica is corrupt, devices would take different branches, and a collective in one of them would never end.

    Args:
      flags: booleans, declared as replicated.
    """
    layout = current()
    if layout is None or layout.devices == 1:
        return flags
    axes = tuple(layout.device_mesh.axis_names)

    def own(flags: Array) -> Array:
        # different numbers on each device, because the compiler removes a maximum of equal numbers
        return lax.pmax(jnp.where(flags, 1 + lax.axis_index(axes), 0), axes) > 0

    return jax.shard_map(own, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(flags)
