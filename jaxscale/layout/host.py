"""Host memory: the machine's own, beside its accelerators', where arrays can be kept that would not fit there."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh

from jaxscale.layout.layout import Layout, current, say_once

HOST, DEVICE = "pinned_host", "device"
"""JAX's names of the two memories that arrays move between."""


def why_no_host_memory(layout: Layout | None = None) -> str | None:
    """Why nothing can be kept in host memory, or `None` when it can.

    Args:
      layout: whose devices are asked; by default those of the layout in force, or this machine's.
    """
    layout = current() if layout is None else layout
    if layout is not None and isinstance(layout.device_mesh, AbstractMesh):
        return None  # what is traced for accelerators that are not here: they have
    device = jax.devices()[0] if layout is None else layout.device_mesh.devices.flat[0]
    try:
        kinds = [m.kind for m in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # a backend without memory spaces
        kinds = []
    if HOST in kinds:
        return None
    return f"{device.device_kind} has no '{HOST}' memory (it has {', '.join(kinds) or 'none to name'})"


def host_memory_or_say(what: str, instead: str, layout: Layout | None = None) -> bool:
    """Whether there is host memory; where there is none, says once what happens instead.

    Args:
      what: that would be kept there.
      instead: what happens to it.
      layout: as for `why_no_host_memory`.
    """
    why = why_no_host_memory(layout)
    if why is not None:
        say_once(f"{why}, so {what} {instead}")
    return why is None
