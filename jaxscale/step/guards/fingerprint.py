"""Compares replicated arrays between devices, to detect silent corruption such as a flipped bit in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.layout.tensors import path_name
from jaxscale.step.guards.base import Guard, RollBack, Watch, Watched

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.state import TrainState

Tree = Any


class Difference(NamedTuple):
    """Copies of one shard of a tensor that are not equal.

    Args:
      tensor: name of the tensor in a checkpoint, such as "params/embed/weight".
      odd: ids of the devices whose copies differ from the majority's; all devices if there is no majority.
      processes: the processes of those devices.
      copies: number of copies.
    """

    tensor: str
    odd: tuple[int, ...]
    processes: tuple[int, ...]
    copies: int

    def __str__(self) -> str:
        devices = f"device{'s' * (len(self.odd) > 1)} {', '.join(map(str, self.odd))}"
        where = f"{devices} of process{'es' * (len(self.processes) > 1)} {', '.join(map(str, self.processes))}"
        rest = self.copies - len(self.odd)
        return f"{self.tensor} on {where}" + (f" (of {self.copies} copies, {rest} agree)" if rest else "")


@register
@dataclasses.dataclass(frozen=True)
class FingerprintGuard(Guard):
    """Checks that replicated arrays are equal on all devices, every few steps and before each checkpoint.

    Each device computes fingerprints of its own memory. If copies differ in any bit, the run goes back to its newest
    checkpoint, before which the copies were equal. Arrays of which a layout has one copy only (FSDP's shards without
    `data`) cannot be compared.

    Args:
      every: steps between comparisons.

    Raises:
      ConfigError: `every` is below 1.
    """

    every: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ConfigError(f"FingerprintGuard.every = {self.every!r}: must be a whole number of at least 1")

    def idle(self, config: TrainConfig) -> str | None:
        """Return a reason if there is only one device."""
        return None if _devices(config.layout) > 1 else "one device holds no second copy of anything"

    def watch(self, run: Watched) -> Watch:
        """Return callbacks that compare copies, or none on a single device."""
        return Watch() if run.layout is None or _devices(run.layout) == 1 else _FingerprintWatch(self, run.layout)


class _FingerprintWatch(Watch):
    def __init__(self, guard: FingerprintGuard, layout: Layout):
        self.guard, self.layout = guard, layout
        self.compare: Callable[[Tree], list[Difference]] | None = None

    def before(self, step: int, state: TrainState) -> None:
        if (step - 1) % self.guard.every == 0:
            self._check(state)

    def before_save(self, state: TrainState) -> None:
        self._check(state)

    def _check(self, state: TrainState) -> None:
        if self.compare is None:
            self.compare = comparer(state, self.layout)
        differences = self.compare(state)
        if differences:
            more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
            listed = "; ".join(map(str, differences[:3]))
            raise RollBack(f"after step {int(state.step)} replicas hold different bits: {listed}{more}")


def comparer(like: Tree, layout: Layout) -> Callable[[Tree], list[Difference]]:
    """Return a function that compares the copies of a tree's arrays; a call is one small program and one transfer.

    Args:
      like: a tree of arrays with the shapes and shardings of those to compare.
      layout: their layout.
    """
    mesh = layout.device_mesh
    leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(like) if _copies(x) > 1]
    names = [path_name(path) for path, _ in leaves]
    specs = [x.sharding.spec for _, x in leaves]  # a random key's data has one more dimension, which is not sharded
    axes = mesh.axis_names
    groups = [list(_groups(x, list(mesh.devices.flat))) for _, x in leaves]

    def own(*shards: Array) -> UInt32[Array, "1 n"]:
        return jnp.stack([fingerprint(x) for x in shards])[None]

    # Manual over the whole mesh, so that each device reads its own memory; GSPMD would assume that copies are equal.
    each = jax.shard_map(own, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(axes), check_vma=False)
    prints = jax.jit(lambda *xs: each(*map(_bits, xs)), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def compare(tree: Tree) -> list[Difference]:
        if not leaves:
            return []
        arrays = [x for _, x in jax.tree_util.tree_leaves_with_path(tree) if _copies(x) > 1]
        table = np.asarray(prints(*arrays))
        return [
            _difference(name, table[:, i], group, list(mesh.devices.flat))
            for i, name in enumerate(names)
            for group in groups[i]
            if (table[group, i] != table[group[0], i]).any()
        ]

    return compare


def fingerprint(x: Array) -> UInt32[Array, ""]:
    """Return a 32-bit hash of an array.

    It differs whenever a single 32-bit word differs; other changes go unnoticed with probability 2**-32. It is the
    sum, modulo 2**32, of all words, each mixed with its index by the finalizer of MurmurHash3 (Appleby, public
    domain), which is a bijection.

    Args:
      x: an array of any shape; 64-bit numbers count as two words.
    """
    words = _words(x).reshape(-1)
    mixed = words ^ (jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, "..."]:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    size = x.dtype.itemsize
    as_ints = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(size, 4)}"))  # 64 bits are two words
    return as_ints.astype(jnp.uint32)


def _bits(x: Array) -> Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _difference(name: str, prints: np.ndarray, group: list[int], devices: Sequence[jax.Device]) -> Difference:
    values, counts = np.unique(prints[group], return_counts=True)
    majority = values[counts > len(group) / 2]
    odd = [i for i in group if majority.size == 0 or prints[i] != majority[0]]
    processes = sorted({devices[i].process_index for i in odd})
    return Difference(name, tuple(devices[i].id for i in odd), tuple(processes), len(group))


def _groups(x: Array, devices: list[jax.Device]) -> Iterator[list[int]]:
    """Yield for each shard the indices of the devices that hold it."""
    shards: dict[Any, list[int]] = {}
    for device, slices in x.sharding.devices_indices_map(x.shape).items():
        shards.setdefault(tuple((s.start, s.stop) for s in slices), []).append(devices.index(device))
    yield from map(sorted, shards.values())


def _copies(x: Array) -> int:
    """Return how many devices hold each shard of an array; 1 if it is not on a mesh or not in device memory."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or x.size == 0 or jax.typeof(x).memory_space != jax.memory.Space.Device:
        return 1
    return int(np.prod(sharding.mesh.devices.shape)) * int(np.prod(sharding.shard_shape(x.shape))) // x.size


def _devices(layout: Layout | None) -> int:
    return 1 if layout is None else layout.devices
