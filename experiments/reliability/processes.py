"""Run processes that train together, and put faults into their live buffers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.reliability import lives


def together(life: Callable[[], None], processes: int, devices: int) -> None:
    """Run `life` in each of several processes, joined by `init_distributed`, and wait for them all.

    Raises:
      AssertionError: one failed; has what they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        codes = lives.wait(lives.start(life, processes, devices, log))
        assert not any(codes), f"exit codes {codes}:\n{log.read_text()[-4000:]}"


def changed(x: jax.Array, change: Callable[[np.ndarray], None], device: int | None = None) -> jax.Array:
    """Return a copy of an array whose shards in this process, or on one of its devices, are changed.

    Args:
      x: the array.
      change: writes into a copy of a shard.
      device: id of the device; `None` for all devices of this process.
    """
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if device is None or shard.device.id == device:
            change(data)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def at_step(
    take: Any, faults: dict[int, Callable[[Any, dict[str, jax.Array]], tuple[Any, dict[str, jax.Array]]]]
) -> Any:
    """Return `Loop._take` with faults: each changes state and batch of one step (from 1), the first time only."""
    left = dict(faults)

    def faulty(self: Any, state: Any, done: int) -> Any:
        fault = left.pop(done + 1, None)
        if fault is None:
            return take(self, state, done)
        state, batch = fault(state, self._place(done))
        return self.step(state, batch)

    return faulty
