"""Arrays to another layout without a restart: each device receives only what it has not (ElasticMoE, 2025).

With more or fewer devices along a mesh axis, most of what a device needs is often on it already, if it takes the right
place in the new mesh. `nearest` chooses places, and `moved` copies the rest from device to device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding

from jaxscale.errors import LayoutError
from jaxscale.layout.layout import Layout

Region = tuple[tuple[int, int], ...]
"""Of each dimension the first index and the one after the last."""


def nearest(
    layout: Layout, arrays: Sequence[jax.Array], where: Callable[[Layout], Sequence[Sharding]],
    devices: Sequence[jax.Device],
) -> Layout:  # fmt: skip
    """Return a layout on those devices, and in that order, for which `moved` copies the fewest bytes.

    The order ignores how devices are linked: it is for devices that all others reach alike.

    Args:
      layout: the new layout, whose mesh has no -1.
      arrays: the arrays, where they are.
      where: returns their shardings on a placed layout.
      devices: those that may be used, at least as many as the mesh has.

    Raises:
      LayoutError: fewer devices than the mesh has.
    """
    from scipy.optimize import linear_sum_assignment  # takes long, and everything imports layouts

    sizes = layout.specification.sizes
    many = math.prod(sizes.values())
    if many > len(devices):
        raise LayoutError(f"mesh '{layout.mesh}' needs {many} devices and there are {len(devices)}; use a smaller mesh")

    def on(ordered: Sequence[jax.Device]) -> Layout:
        mesh = Mesh(np.array(ordered).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        return layout.specification._placed(mesh)

    first = list(devices[:many])
    have = np.zeros((len(devices), many))
    for x, sharding in zip(arrays, where(on(first)), strict=True):
        held, needed = _regions(x.sharding, x.shape), _regions(sharding, x.shape)
        for (row, device), (column, place) in itertools.product(enumerate(devices), enumerate(first)):
            if device in held:
                have[row, column] += x.dtype.itemsize * _size(_meet(held[device], needed[place]))
    rows, columns = linear_sum_assignment(have, maximize=True)
    return on([devices[row] for _, row in sorted(zip(columns, rows, strict=True))])


def moved(arrays: Sequence[jax.Array], where: Sequence[Sharding]) -> tuple[list[jax.Array], int]:
    """Return arrays with other shardings, and the bytes that devices received; what is in place is not copied.

    Args:
      arrays: the arrays, all of whose shards this process has.
      where: the new sharding of each.
    """
    made = [_moved(x, sharding) for x, sharding in zip(arrays, where, strict=True)]
    return [x for x, _ in made], sum(size for _, size in made)


def _moved(x: jax.Array, where: Sharding) -> tuple[jax.Array, int]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data, size = _moved(jax.random.key_data(x), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)), size
    shards: dict[Region, dict[jax.Device, jax.Array]] = {}
    for shard in x.addressable_shards:
        shards.setdefault(_region(shard.index, x.shape), {})[shard.device] = shard.data
    received, made = 0, []
    for number, (device, region) in enumerate(_regions(where, x.shape).items()):
        parts = []
        for held, holders in shards.items():
            both = _meet(held, region)
            if not _size(both):
                continue
            here = device in holders
            data = holders[device] if here else [*holders.values()][number % len(holders)]
            part = data if both == held else data[_within(both, held)]
            if not here:
                received += part.nbytes
                part = jax.device_put(part, device)
            parts.append((both, part))
        if parts and parts[0][0] == region:
            made.append(parts[0][1])
            continue
        out = jnp.zeros([b - a for a, b in region], x.dtype, device=device)
        for both, part in parts:
            out = out.at[_within(both, region)].set(part)
        made.append(out)
    return jax.make_array_from_single_device_arrays(x.shape, where, made), received


def _regions(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Region]:
    return {d: _region(index, shape) for d, index in sharding.devices_indices_map(shape).items()}


def _region(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Region:
    index = index or ()
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _meet(a: Region, b: Region) -> Region:
    return tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))


def _within(inner: Region, outer: Region) -> tuple[slice, ...]:
    return tuple(slice(p - r, q - r) for (p, q), (r, _) in zip(inner, outer, strict=True))


def _size(region: Region) -> int:
    return math.prod(max(0, b - a) for a, b in region)


def tree_moved(tree: Any, where: Any) -> tuple[Any, int]:
    """Return `moved` of the arrays of a tree.

    Args:
      tree: the tree.
      where: a tree of shardings.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays, received = moved(leaves, jax.tree.leaves(where))
    return jax.tree.unflatten(structure, arrays), received
