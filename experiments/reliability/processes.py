"""Processes of simulated devices that train together, forked from one that has touched no device."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxscale as js


def together(life: Callable[[int], None], processes: int, devices: int) -> list[int]:
    """Runs `life(number)` in each process, joined to the others where there are several; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                js.simulate_devices(devices)
                if processes > 1:
                    js.init_distributed(address, processes, number)
                life(number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def changed(x: jax.Array, change: Callable[[np.ndarray], None], device: int | None = None) -> jax.Array:
    """An array of which this process's own buffers, or one device's, are changed in place; the others' stay.

    Args:
      x: the array.
      change: writes into a buffer's copy.
      device: its id; `None` is all of this process's.
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
    """`_Loop._take` with faults: each changes the state and the batch of one step (from 1), the first time only."""
    left = dict(faults)

    def faulty(self: Any, state: Any, done: int) -> Any:
        fault = left.pop(done + 1, None)
        if fault is None:
            return take(self, state, done)
        state, batch = fault(state, self._place(done))
        return self.step(state, batch)

    return faulty
