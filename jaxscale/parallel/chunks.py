"""Arrays of several copies of a model, cut so that each device has the same chunk of all of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxscale.layout import Layout, TensorInfo

Tree = Any


def chunks_of(trees: Tree, infos: Tree, layout: Layout | None) -> Tree:
    """Return the same chunk of all copies on each device, by an all-to-all: arrays (copies, [chunks], ...).

    Args:
      trees: arrays (copies, ...), whose first dimension is sharded as "replicas".
      infos: a `TensorInfo` per array of one copy.
      layout: the layout; `None` is one device.
    """

    def of(x: jax.Array, info: TensorInfo) -> jax.Array:
        parts = Parts(info, x.shape[0], 1)
        x = constrain(parts.split(x), layout, parts.spec(layout, before=True))
        return constrain(x, layout, parts.spec(layout, before=False))

    return jax.tree.map(of, trees, infos)


def from_chunks(trees: Tree, infos: Tree, copies: int, layout: Layout | None) -> Tree:
    """Return whole arrays on each device, by an all-gather of what was computed from chunks.

    Args:
      trees: arrays ([chunks], ...), of the shapes of `chunks_of` without the copies.
      infos: a `TensorInfo` per array of one copy.
      copies: the number of copies.
      layout: the layout; `None` is one device.
    """

    def of(x: jax.Array, info: TensorInfo) -> jax.Array:
        parts = Parts(info, copies, 1)
        x = constrain(x, layout, parts.spec_of_mean(layout, chunked=True))
        x = parts.join(constrain(x, layout, parts.spec_of_mean(layout, chunked=False)), lead=0)
        return constrain(x, layout, spec_of(info, layout))

    return jax.tree.map(of, trees, infos)


def chunk_bytes(infos: Tree, copies: int, layout: Layout | None) -> int:
    """Return the bytes that each device sends in `chunks_of` and `from_chunks` of float32 arrays.

    Args:
      infos: a `TensorInfo` per array of one copy.
      copies: the number of copies.
      layout: the layout; `None` is one device.
    """
    devices, total = devices_of_copies(layout), 0.0
    for info in jax.tree.leaves(infos):
        parts = Parts(info, copies, 1)
        size = 4 * math.prod(parts.blocked) // shards(parts.spec(layout, before=True)[1:], layout)
        share = (devices - 1) / devices
        total += share * size * (copies if parts.dim is None else copies // devices + 1)
    return round(total)


class Parts:
    """An array of one copy as blocks along its last dimension, and as chunks along one dimension of blocks.

    Args:
      info: the array.
      copies: the number of copies, which is that of chunks.
      block: largest size of a block.
    """

    def __init__(self, info: TensorInfo, copies: int, block: int):
        self.info, self.copies = info, copies
        *before, last = info.shape or (1,)
        self.size = next(b for b in range(min(block, last), 0, -1) if last % b == 0)
        self.blocked = (*before, last // self.size)
        self.dim = next((d for d, n in enumerate(self.blocked) if n % copies == 0), None)
        axes = info.axes or (None,)
        if self.dim is None:
            self.dims, self.names = self.blocked, tuple(axes)
        else:
            d = self.dim
            self.dims = (copies, *self.blocked[:d], self.blocked[d] // copies, *self.blocked[d + 1 :])
            self.names = ("replicas", *axes)
        self.shape = (*self.dims[:-1], self.dims[-1] * self.size)  # of state, in which blocks are joined

    def axes(self, layout: Layout | None) -> tuple[str | None, ...]:
        """Return the logical axes of state, `None` where the layout does not divide a dimension of a chunk."""

        def axis(name: str | None, size: int) -> str | None:
            whole = name is None or layout is None or size % layout.split(name, "opt_state") == 0
            return name if whole else None

        return tuple(map(axis, self.names, self.shape))

    def blocks(self, x: jax.Array) -> jax.Array:
        """Return chunks of the state's form as blocks."""
        return x.reshape(*self.dims, self.size)

    def split(self, x: jax.Array) -> jax.Array:
        """Return arrays (copies, ...) as (copies, [chunks], ..., block)."""
        lead, d = x.shape[0], self.dim
        x = x.reshape(lead, *self.blocked, self.size)
        if d is None:
            return x
        x = x.reshape(lead, *self.blocked[:d], self.copies, self.blocked[d] // self.copies, *x.shape[d + 2 :])
        return jnp.moveaxis(x, d + 1, 1)

    def join(self, x: jax.Array, lead: int) -> jax.Array:
        """Return blocks, with `lead` dimensions before the chunks, as arrays of the original shape."""
        if self.dim is not None:
            x = jnp.moveaxis(x, lead, lead + self.dim)
        return x.reshape(*x.shape[:lead], *self.info.shape)

    def _inner(self, layout: Layout | None) -> list[Any]:
        """Return the mesh axes of each blocked dimension within a copy, where they divide it."""
        if layout is None or not self.info.shape:
            return [None] * len(self.blocked)
        sizes = self.dims if self.dim is None else self.dims[1:]
        spec = entries(spec_of(self.info, layout), len(self.blocked))
        return [s if n % shards((s,), layout) == 0 else None for s, n in zip(spec, sizes, strict=True)]

    def spec(self, layout: Layout | None, *, before: bool) -> tuple[Any, ...]:
        """Return the mesh axes of (copies, [chunks], ..., block) before and after copies exchange their codes."""
        over, inner = axes_of_copies(layout), self._inner(layout)
        if self.dim is None:
            return (over if before else None, *inner)
        return (over if before else None, None if before else over, *inner)

    def spec_of_mean(self, layout: Layout | None, *, chunked: bool) -> tuple[Any, ...]:
        """Return the mesh axes of ([chunks], ..., block), each device having its chunks or all of them."""
        if self.dim is None:
            return tuple(self._inner(layout))
        return (axes_of_copies(layout) if chunked else None, *self._inner(layout))


def axes_of_copies(layout: Layout | None) -> Any:
    """Return the mesh axes that copies are on, or `None`."""
    axes = () if layout is None else layout.cut("replicas", "params")
    return axes or None


def devices_of_copies(layout: Layout | None) -> int:
    """Return the number of groups of devices that have copies of their own."""
    return 1 if layout is None else layout.split("replicas", "params")


def spec_of(info: TensorInfo, layout: Layout | None) -> PartitionSpec:
    """Return the mesh axes of an array of one copy."""
    return PartitionSpec() if layout is None else layout.spec(info.axes, info.shape, name=info.path)


def entries(spec: PartitionSpec, dims: int) -> tuple[Any, ...]:
    """Return a spec with an entry for each of so many dimensions."""
    return (*spec, *[None] * (dims - len(spec)))


def shards(spec: Any, layout: Layout | None) -> int:
    """Return the number of shards of an array with a spec."""
    if layout is None:
        return 1
    names = [m for s in spec if s is not None for m in ((s,) if isinstance(s, str) else s)]
    return math.prod(layout.sizes[m] for m in names)


def constrain(x: jax.Array, layout: Layout | None, spec: Any) -> jax.Array:
    """Return an array sharded by a spec; as it is on one device."""
    if layout is None or layout.devices == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
