"""Continue training on the remaining devices without a restart: same batch, same gradient, same dropout.

When devices are lost, the mesh loses slices of its `data` axis. The global batch stays the same: its rows are
distributed again, in enough micro-batches that no device gets more rows at a time than before, and padded with rows of
weight 0 if they do not divide. The loss is a mean over weighted tokens, and dropout depends on a row's number in the
batch, so neither changes. Lost shards are copied from replicas on other devices. Method: ElasWave (arXiv:2510.00606).

JAX cannot remove a process from a running group, so this covers the devices of one process, for study; a run of several
processes restarts from snapshots (`jaxscale.train.snapshots`).
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
from jaxscale.layout import Layout, Rules, moved, nearest
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.prepare import prepare, step_of
from jaxscale.step.step import batch_shardings, jit_step
from jaxscale.train.checkpoints.chunks import region_of
from jaxscale.train.checkpoints.manifest import flatten
from jaxscale.train.snapshots.table import assemble


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the rows of a global batch are distributed.

    Args:
      micro_batches: micro-batches per step.
      shards: shards of a micro-batch, each on its own group of devices.
      rows: rows of the batch, padding included.
    """

    micro_batches: int
    shards: int
    rows: int

    @property
    def at_once(self) -> int:
        """Rows of a micro-batch on one device."""
        return self.rows // (self.micro_batches * self.shards)


def deal(batch_size: int, shards: int, at_once: int) -> Deal:
    """Distribute a batch over `shards` groups of devices, each with at most `at_once` rows of a micro-batch.

    Args:
      batch_size: rows of the global batch.
      shards: groups of devices.
      at_once: most rows of a micro-batch on one device.
    """
    micro_batches = math.ceil(batch_size / (shards * at_once))
    each = math.ceil(batch_size / (shards * micro_batches))
    return Deal(micro_batches, shards, each * shards * micro_batches)


def recut(layout: Layout, devices: Sequence[jax.Device]) -> Layout:
    """Return the layout with its `data` axis shrunk to what `devices` can fill; other axes keep their size.

    Args:
      layout: the layout before devices were lost.
      devices: the remaining devices.

    Raises:
      LayoutError: the devices do not fill one slice of the `data` axis.
    """
    others = {axis: size for axis, size in layout.sizes.items() if axis != "data"}
    slices = len(devices) // math.prod(others.values())
    if slices == 0:
        raise LayoutError(
            f"{len(devices)} devices are left, but one slice of the data axis of the layout {layout} needs "
            f"{math.prod(others.values())}; begin again with a smaller layout"
        )
    mesh = ",".join(f"{axis}={slices if axis == 'data' else size}" for axis, size in layout.sizes.items())
    smaller = dataclasses.replace(layout.specification, mesh=mesh)
    return smaller.on(devices[: slices * math.prod(others.values())])


def move(arrays: Mapping[str, jax.Array], where: Mapping[str, Any], alive: Collection[jax.Device]) -> dict[str, Any]:
    """Copy arrays to other shardings, reading from living devices only.

    Args:
      arrays: the arrays by name, with their old shardings.
      where: the new shardings by name.
      alive: the devices that can be read.

    Raises:
      RunError: a part of an array was on lost devices only.
    """
    return {name: _moved(name, x, where[name], alive) for name, x in arrays.items()}


def _moved(name: str, x: jax.Array, where: jax.sharding.Sharding, alive: Collection[jax.Device]) -> jax.Array:
    living = {region_of(s.index, x.shape): s.data for s in x.addressable_shards if s.device in alive}

    def part(index: Any) -> np.ndarray:
        parts = ((region, functools.partial(np.asarray, data)) for region, data in living.items())
        out = assemble(region_of(index, x.shape), x.dtype, parts)
        if out is None:
            raise RunError(
                f"a part of {name} was on lost devices only; use a layout whose data axis has its slices on different "
                "machines, or restart from a snapshot or a checkpoint"
            )
        return out

    return jax.make_array_from_callback(x.shape, where, part)


class Elastic:
    """Training that continues when devices are lost, and on more or fewer of them.

    Args:
      config: the run's settings; its layout must have a `data` or an `expert` axis.

    Raises:
      ConfigError: the layout has neither axis, the objective needs several rows together, or there is `batching`.
    """

    def __init__(self, config: TrainConfig):
        if config.layout is None or config.layout.sizes["data"] == config.layout.sizes["expert"] == 1:
            raise ConfigError(
                f"Elastic needs a layout with a data axis, such as Layout('data=2'), or an expert axis, not "
                f"{config.layout}"
            )
        if config.objective.group > 1 or not config.objective.additive:
            name = type(config.objective).__name__
            raise ConfigError(f"Elastic distributes single rows, but {name} needs several rows together; use fit")
        if config.batching is not None:
            raise ConfigError("Elastic has one layout for all rows; leave out train.batching, or use fit")
        self.config, self.prepared = config, prepare(config)
        self.alive = list(config.layout.device_mesh.devices.flat)
        self._at_once = 0
        self._cut(config.layout)
        with self.layout:
            self.state = self.blueprint.init(config.seed)

    def step(self) -> dict[str, float]:
        """Take the next step and return its metrics."""
        loader = self.prepared.loader

        def padded(step: int) -> Batch:
            return filled(loader.batch_at(step), self.deal.rows)

        with self.layout:
            batch = to_devices(padded, int(self.state.step), self._batch)
            self.state, metrics = self._step(self.state, batch)
        return {name: float(value) for name, value in metrics.items() if isinstance(value, jax.Array)}

    def lose(self, lost: Collection[jax.Device]) -> None:
        """Continue without these devices.

        Args:
          lost: the lost devices.

        Raises:
          LayoutError: see `recut`; nothing was changed.
          RunError: see `move`; nothing was changed.
        """
        alive = [d for d in self.alive if d not in lost]
        smaller = recut(self.layout, alive)
        self._check_copies(smaller)
        old = flatten(self.state)
        blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=smaller))
        copied = move(old, flatten(blueprint.shardings()), alive)
        copied["rng"] = jax.random.wrap_key_data(copied["rng"])
        self._cut(smaller)
        self.alive = alive
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), [copied[name] for name in old])

    def rescale(self, mesh: str, devices: Sequence[jax.Device] | None = None, rules: str | Rules | None = None) -> int:
        """Continue on another mesh, such as one with more or fewer devices along `expert`, with the same batches.

        Devices take the places in it where they have most already, and receive only what they have not.

        Args:
          mesh: the new mesh.
          devices: those that may be used; by default the present ones and then the process' others.
          rules: new rules; by default the present ones. Those of `experts_as` move nothing on the same mesh.

        Returns:
          the bytes of parameters and optimizer state that devices received.

        Raises:
          LayoutError: the mesh does not fit the devices, the model or the batch; nothing was changed.
        """
        usable = list(dict.fromkeys([*self.alive, *jax.devices()])) if devices is None else list(devices)
        present = self.layout.specification
        new = dataclasses.replace(present, mesh=mesh, rules=present.rules if rules is None else rules)
        arrays, structure = jax.tree.flatten(self.state)

        def where(layout: Layout) -> list[jax.sharding.Sharding]:
            return jax.tree.leaves(blueprint_of(dataclasses.replace(self.config, layout=layout))[0].shardings())

        have, want = self.layout.sizes["replica"], new.specification.sizes["replica"]
        if have != want and self._has_copies():
            raise LayoutError(f"{new} has replica={want}, and the state has {have} replicas that differ; keep replica="
                              f"{have}")  # fmt: skip
        placed = nearest(new, arrays, where, usable)
        self._check_copies(placed)
        state, received = moved(arrays, where(placed))
        self._cut(placed)
        self.alive = list(placed.device_mesh.devices.flat)
        self.state = jax.tree.unflatten(structure, state)
        return received

    def _has_copies(self) -> bool:
        """Return whether replicas have parameters of their own."""
        infos = self.blueprint.algorithm.infos(self.blueprint)["params"]
        return any("replicas" in i.axes for i in jax.tree.leaves(infos))

    def _check_copies(self, layout: Layout) -> None:
        """Check that a layout divides the batch where each replica keeps its own rows."""
        size = self.config.batch_size
        rows = deal(size, _batch_shards(layout, self.config.seq_len), self._at_once).rows
        if rows != size and self._has_copies():
            raise LayoutError(f"{layout} does not divide {size} rows, and each replica keeps its own rows; the layout "
                              "that is left has to divide the batch")  # fmt: skip

    def _cut(self, layout: Layout) -> None:
        config = self.config
        shards = _batch_shards(layout, config.seq_len)
        at_once = self._at_once or config.batch_size // (config.accumulate * shards)
        new = deal(config.batch_size, shards, at_once)
        blueprint, schedule = blueprint_of(dataclasses.replace(config, layout=layout))
        batch = batch_shardings(layout, config.objective.inputs(config), new.rows)
        step = jit_step(step_of(blueprint, config, schedule, accumulate=new.micro_batches), blueprint, batch)
        # nothing above changes the run, so that it goes on where the layout is refused
        self.layout, self.deal, self.blueprint, self._at_once = layout, new, blueprint, at_once
        self._batch, self._step = batch, step


def _batch_shards(layout: Layout, seq_len: int) -> int:
    """Number of shards that a layout cuts the rows of a batch into."""
    many = math.prod(layout.sizes.values())
    sharding = layout.sharding(("batch", "seq"), (many, seq_len), kind="activations", name="the batch")
    return many // sharding.shard_shape((many, seq_len))[0]
