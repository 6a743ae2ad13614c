"""Host memory, where arrays can be stored that do not fit into accelerator memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from jaxscale.layout.layout import Layout, current, say_once

HOST, DEVICE = "pinned_host", "device"
"""JAX's names of the two memory kinds."""


def why_no_host_memory(layout: Layout | None = None) -> str | None:
    """Return why arrays cannot be stored in host memory, or `None` when they can.

    Args:
      layout: the layout whose devices are checked; by default the layout in force, else this machine's devices.
    """
    layout = current() if layout is None else layout
    if layout is not None and isinstance(layout.device_mesh, AbstractMesh):
        return None  # a trace for accelerators elsewhere, which have host memory
    device = jax.devices()[0] if layout is None else layout.device_mesh.devices.flat[0]
    try:
        kinds = [m.kind for m in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # a backend without memory spaces
        kinds = []
    if HOST in kinds:
        return None
    return f"{device.device_kind} has no '{HOST}' memory (its memory kinds: {', '.join(kinds) or 'none'})"


def host_memory_or_say(what: str, instead: str, layout: Layout | None = None) -> bool:
    """Return whether there is host memory; if there is none, warn once what happens instead.

    Args:
      what: what would be stored in host memory, such as "optimizer state".
      instead: what happens to it, such as "stays on the device".
      layout: as for `why_no_host_memory`.
    """
    why = why_no_host_memory(layout)
    if why is not None:
        say_once(f"{why}, so {what} {instead}")
    return why is None


def in_host_memory(x: jax.Array) -> bool:
    """Return whether an array, traced or not, is in host memory.

    Args:
      x: the array.
    """
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def layers_in_host_memory(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Return whether one layer of a stack in host memory can be copied to the device.

    TPU compilers cannot copy one row of a matrix of 16-bit or 8-bit numbers, such as a norm's scale.

    Args:
      shape: the stack's shape, layers first.
      dtype: its dtype.
    """
    return len(shape) > 2 or jnp.dtype(dtype).itemsize >= 4


def fetched(x: jax.Array) -> jax.Array:
    """Return an array on the device.

    Args:
      x: the array, traced.
    """
    return jax.device_put(x, jax.memory.Space.Device)


def on_device(tree: Any) -> Any:
    """Return arrays, not traced, in the devices' memory.

    Args:
      tree: a tree of arrays.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(DEVICE)), tree)


def stored_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array in the memory that another array is in.

    Args:
      x: the array, traced.
      like: the other array.
    """
    return jax.device_put(x, jax.typeof(like).memory_space)


def by_layer(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `fn(x)`; of a stack in host memory, one layer after the other is on the device.

    The result of a stack in host memory is in host memory.

    Args:
      fn: a function of each element, such as a product with a number.
      x: an array, traced; in host memory a stack of layers, whose first dimension is theirs.
    """
    if not in_host_memory(x):
        return fn(x)
    return jax.lax.scan(lambda _, layer: (None, stored_like(fn(fetched(layer)), layer)), None, x)[1]


def sum_by_layer(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `fn(x)`, float32; of a stack in host memory, the sum over its layers, of which one is on the device.

    Args:
      fn: a sum over elements, a scalar.
      x: as for `by_layer`.
    """
    if not in_host_memory(x):
        return fn(x)
    return jax.lax.scan(lambda total, layer: (total + fn(fetched(layer)), None), jnp.float32(0), x)[0]
