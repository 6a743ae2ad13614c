"""One answer for all devices, also when memories have failed and copies of one value are no longer equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool

from jaxscale.layout import current


def anywhere(flags: Bool[Array, "..."]) -> Bool[Array, "..."]:
    """Which flags are set on any device of the layout in force; the same on all of them.

    The partitioner takes the copies of a value for equal and reduces over those mesh axes alone that cut it. Where one
    copy is bad, devices would then take different branches, and the first collective in one of them never ends.
    """
    layout = current()
    if layout is None or layout.devices == 1:
        return flags
    axes = tuple(layout.device_mesh.axis_names)

    def own(flags: Array) -> Array:
        # numbers that differ by device: a maximum of equal ones is no reduction to a compiler
        return lax.pmax(jnp.where(flags, 1 + lax.axis_index(axes), 0), axes) > 0

    return jax.shard_map(own, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(flags)
