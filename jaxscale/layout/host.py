"""Host memory, where arrays can be stored that do not fit into accelerator memory."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh

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
