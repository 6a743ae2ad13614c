"""Going on with the devices that are left, without a restart: same batch, same gradient, same randomness.

Where machines are lost, the mesh loses slices of its `data` axis. The global batch stays: its rows are dealt anew, in
as many micro-batches as keep a device's rows at most what they were, and filled up with rows of weight 0 where they do
not divide. The loss is a mean over weighted tokens and a row's dropout depends on its number, so neither notices. What
the lost devices held comes from replicas on the others. Method: ElasWave (arXiv:2510.00606). JAX cannot take a process
out of a running group, so this is for devices of one process, and for studying; a run of several goes on by a restart
from snapshots (`jaxscale.train.snapshots`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxscale.data import to_devices
from jaxscale.data.batch import Batch
from jaxscale.data.loader import filled
from jaxscale.errors import ConfigError, LayoutError, RunError
from jaxscale.layout import Layout
from jaxscale.step.config import TrainConfig
from jaxscale.step.prepare import blueprint_of, prepare, step_of
from jaxscale.step.step import batch_shardings, jit_step
from jaxscale.train.checkpoints.chunks import region_of
from jaxscale.train.checkpoints.manifest import flatten
from jaxscale.train.snapshots.table import assemble


@dataclasses.dataclass(frozen=True)
class Deal:
    """How a global batch is dealt.

    Args:
      micro_batches: one after the other.
      shards: parts of a micro-batch, which are on devices at the same time.
      rows: of the batch, with those of weight 0 that fill it up.
    """

    micro_batches: int
    shards: int
    rows: int

    @property
    def at_once(self) -> int:
        """Rows that a device works on at the same time."""
        return self.rows // (self.micro_batches * self.shards)


def deal(batch_size: int, shards: int, at_once: int) -> Deal:
    """Deals a batch to `shards` groups of devices, of which none works on more than `at_once` rows at a time."""
    micro_batches = math.ceil(batch_size / (shards * at_once))
    each = math.ceil(batch_size / (shards * micro_batches))
    return Deal(micro_batches, shards, each * shards * micro_batches)


def recut(layout: Layout, devices: Sequence[jax.Device]) -> Layout:
    """The layout with as many slices of its `data` axis as these devices make; every other axis is as it was.

    Raises:
      LayoutError: they do not make one.
    """
    others = {axis: size for axis, size in layout.sizes.items() if axis != "data"}
    slices = len(devices) // math.prod(others.values())
    if slices == 0:
        raise LayoutError(
            f"{len(devices)} devices are left, and a slice of the layout {layout} without its data axis needs "
            f"{math.prod(others.values())}; begin again with a smaller layout"
        )
    mesh = ",".join(f"{axis}={slices if axis == 'data' else size}" for axis, size in layout.sizes.items())
    smaller = dataclasses.replace(layout.specification, mesh=mesh)
    return smaller.on(devices[: slices * math.prod(others.values())])


def move(arrays: Mapping[str, jax.Array], where: Mapping[str, Any], alive: Collection[jax.Device]) -> dict[str, Any]:
    """Arrays onto other devices, read from living ones alone.

    Args:
      arrays: by name, as they were laid out.
      where: by name, the shardings they shall have.
      alive: devices.

    Raises:
      RunError: a part of an array was on lost devices only.
    """
    return {name: _moved(name, x, where[name], alive) for name, x in arrays.items()}


def _moved(name: str, x: jax.Array, where: jax.sharding.Sharding, alive: Collection[jax.Device]) -> jax.Array:
    living = {region_of(s.index, x.shape): s.data for s in x.addressable_shards if s.device in alive}

    def part(index: Any) -> np.ndarray:
        parts = ((there, functools.partial(np.asarray, data)) for there, data in living.items())
        out = assemble(region_of(index, x.shape), x.dtype, parts)
        if out is None:
            raise RunError(
                f"a part of {name} was on lost devices only; give the layout a data axis whose slices are on different "
                "machines, or begin again from a snapshot or a checkpoint"
            )
        return out

    return jax.make_array_from_callback(x.shape, where, part)


class Elastic:
    """Training steps that go on when devices are lost.

    Args:
      config: of the run; its layout has a `data` axis.

    Raises:
      ConfigError: there is no layout with a data axis.
    """

    def __init__(self, config: TrainConfig):
        if config.layout is None or config.layout.sizes["data"] == 1:
            raise ConfigError(
                f"going on with fewer devices needs a layout with a data axis, as Layout('data=2'), not {config.layout}"
            )
        if config.objective.group > 1 or not config.objective.additive:
            name = type(config.objective).__name__
            raise ConfigError(f"Elastic deals single rows to devices, and {name} takes rows together; use fit")
        self.config, self.prepared = config, prepare(config)
        self.alive = list(config.layout.device_mesh.devices.flat)
        self._at_once = 0
        self._cut(config.layout)
        with self.layout:
            self.state = self.blueprint.init(config.seed)

    def step(self) -> dict[str, float]:
        """Takes the next step; its metrics."""
        loader = self.prepared.loader

        def dealt(step: int) -> Batch:
            return filled(loader.batch_at(step), self.deal.rows)

        with self.layout:
            batch = to_devices(dealt, int(self.state.step), self._batch)
            self.state, metrics = self._step(self.state, batch)
        return {name: float(value) for name, value in metrics.items()}

    def lose(self, lost: Collection[jax.Device]) -> None:
        """Goes on without these devices.

        Raises:
          LayoutError, RunError: see `recut` and `move`; nothing was changed.
        """
        alive = [d for d in self.alive if d not in lost]
        smaller = recut(self.layout, alive)
        infos, size = self.blueprint.algorithm.infos(self.blueprint)["params"], self.config.batch_size
        dealt = deal(size, _batch_shards(smaller, self.config.seq_len), self._at_once)
        if dealt.rows != size and any("replicas" in i.axes for i in jax.tree.leaves(infos)):
            raise LayoutError(f"{smaller} does not divide {size} rows, and a replica's rows stay its own; lose as many "
                              "devices as leave a layout that divides them")  # fmt: skip
        old = flatten(self.state)
        blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=smaller))
        moved = move(old, flatten(blueprint.shardings()), alive)
        moved["rng"] = jax.random.wrap_key_data(moved["rng"])
        self.alive = alive
        self._cut(smaller)
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), [moved[name] for name in old])

    def _cut(self, layout: Layout) -> None:
        config, self.layout = self.config, layout
        shards = _batch_shards(layout, config.seq_len)
        self._at_once = self._at_once or config.batch_size // (config.accumulate * shards)
        self.deal = deal(config.batch_size, shards, self._at_once)
        self.blueprint, schedule = blueprint_of(dataclasses.replace(config, layout=layout))
        self._batch = batch_shardings(layout, config.objective.inputs(config), self.deal.rows)
        step = step_of(self.blueprint, config, schedule, accumulate=self.deal.micro_batches)
        self._step = jit_step(step, self.blueprint, self._batch)


def _batch_shards(layout: Layout, seq_len: int) -> int:
    """Into how many parts a layout cuts the rows of a batch."""
    many = math.prod(layout.sizes.values())
    sharding = layout.sharding(("batch", "seq"), (many, seq_len), kind="activations", name="the batch")
    return many // sharding.shard_shape((many, seq_len))[0]
