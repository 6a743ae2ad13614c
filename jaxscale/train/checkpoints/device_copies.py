"""Copies of the state on its devices, which are fetched to host memory while the next steps run.

A step donates its state, so that its memory may be overwritten as soon as the step is dispatched. A copy on the devices
takes as long as reading and writing their memory once, and the transfer to the host, which is slower by far, then
delays no step. (Maurya et al. 2024, DataStates-LLM, copy the state itself before an update changes it; here forward,
backward and update are one program, so that there is no such time.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np


def device_copies(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Start copying arrays on their devices; on return they may be donated.

    Args:
      arrays: arrays by name, not of random keys. Those in host memory are copied before this returns.

    Returns:
      the copies, with the same shardings, in as much device memory again.
    """
    on_device = {name: x for name, x in arrays.items() if not in_host_memory(x)}
    copy = _copy(tuple(x.sharding for x in on_device.values()))
    copies = dict(zip(on_device, copy(tuple(on_device.values())), strict=True))
    return {name: copies[name] if name in copies else _on_host(x) for name, x in arrays.items()}


def in_host_memory(x: jax.Array) -> bool:
    """Whether an accelerator's array is in its host's memory.

    Args:
      x: the array.
    """
    return x.sharding.memory_kind not in (None, "device") and any(d.platform != "cpu" for d in x.devices())


@functools.cache
def _copy(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    return jax.jit(lambda xs: tuple(jnp.copy(x) for x in xs), out_shardings=shardings)


def _on_host(x: jax.Array) -> jax.Array:
    shards = [jax.device_put(np.array(s.data), s.data.sharding) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
