"""Device meshes from a line of text, and the devices to lay them on."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxscale.errors import LayoutError
from jaxscale.layout.axes import MESH_AXES, check_mesh_axis
from jaxscale.layout.distributed import compile_anew

log = logging.getLogger("jaxscale")


def parse_mesh(spec: str) -> dict[str, int]:
    """Reads `"data=2,fsdp=-1"` into `{"data": 2, "fsdp": -1}`; at most one size may be -1 (the rest).

    Raises:
      LayoutError: an unknown or repeated axis, a size that is no positive integer, or two sizes of -1.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, re.split(r"[,\s]+", spec.strip())):
        name, eq, size = part.partition("=")
        if not eq or not re.fullmatch(r"-?\d+", size):
            raise LayoutError(f"mesh '{spec}': '{part}' is not of the form axis=size, as 'data=2,fsdp=4'")
        check_mesh_axis(name, f"mesh '{spec}'")
        if name in sizes:
            raise LayoutError(f"mesh '{spec}' names '{name}' twice; give each axis once")
        if int(size) < 1 and int(size) != -1:
            raise LayoutError(f"mesh '{spec}': {name}={size} must be positive, or -1 for the rest of the devices")
        sizes[name] = int(size)
    if list(sizes.values()).count(-1) > 1:
        raise LayoutError(f"mesh '{spec}' has more than one -1; only one axis can take the rest of the devices")
    return sizes


def resolve_sizes(sizes: dict[str, int], devices: int, spec: str) -> dict[str, int]:
    """Fills in -1 from a number of devices, and gives every mesh axis a size (1 where unnamed), in mesh order.

    Raises:
      LayoutError: the devices do not divide, or the mesh is larger than the machine.
    """
    fixed = math.prod(s for s in sizes.values() if s != -1)
    if -1 in sizes.values():
        if devices < fixed or devices % fixed:
            fit = max((n for n in range(1, devices + 1) if devices % n == 0 and n <= fixed), default=1)
            raise LayoutError(
                f"mesh '{spec}' cannot fill its -1: {devices} devices are not a multiple of {fixed}; "
                f"the nearest product that divides them is {fit}"
            )
        sizes = {k: devices // fixed if v == -1 else v for k, v in sizes.items()}
    elif fixed > devices:
        raise LayoutError(
            f"mesh '{spec}' needs {fixed} devices and this machine has {devices}; simulate them with --devices {fixed} "
            f"(in Python: jaxscale.simulate_devices({fixed}) before the first array), or use a smaller mesh"
        )
    return {a: sizes.get(a, 1) for a in MESH_AXES}


def make_mesh(spec: str = "data=-1", devices: Sequence[jax.Device] | None = None, *, across: str | None = None) -> Mesh:
    """A mesh with all axes (size 1 where unnamed), of `Auto` type.

    Args:
      spec: sizes by mesh axis, as `"data=2,fsdp=2,tensor=2"`; one may be -1. The order written does not matter:
        devices are dealt in the order of `MESH_AXES`, so that two spellings are one mesh.
      devices: the devices to use; all of them by default. A smaller mesh takes the first ones and says so.
      across: the axis that goes over several TPU slices, whose other axes stay within one; without effect on one.

    Raises:
      LayoutError: see `parse_mesh` and `resolve_sizes`; several slices and no axis over them, or one that does not
        divide into them.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(parse_mesh(spec), len(devices), spec)
    compile_anew(devices)
    kinds = (AxisType.Auto,) * len(sizes)
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    if slices == 1:
        return Mesh(place(tuple(sizes.values()), devices, f"mesh '{spec}'"), MESH_AXES, axis_types=kinds)
    _check_slices(spec, sizes, slices, len(devices), across)
    outer = {a: slices if a == across else 1 for a in sizes}
    inner = [size // outer[a] for a, size in sizes.items()]
    placed = _split_if_needed(
        lambda split: mesh_utils.create_hybrid_device_mesh(
            inner, list(outer.values()), devices, allow_split_physical_axes=split
        ),
        f"mesh '{spec}'",
    )
    return Mesh(placed, MESH_AXES, axis_types=kinds)


def place(shape: Sequence[int], devices: Sequence[Any], what: str | None = None) -> np.ndarray:
    """Devices laid over the axes of a mesh as a TPU's torus joins them, by JAX's rules; elsewhere in their order.

    Args:
      shape: sizes of the mesh's axes; a mesh of fewer devices takes the first ones.
      devices: of one slice.
      what: the mesh, for warnings; `None` gives none.
    """
    n = math.prod(shape)
    if n < len(devices):
        if what is not None:
            log.warning("%s uses the first %d of %d devices", what, n, len(devices))
        return np.asarray(devices[:n], dtype=object).reshape(shape)
    return _split_if_needed(
        lambda split: mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split), what
    )


def _split_if_needed(make: Callable[[bool], np.ndarray], what: str | None) -> np.ndarray:
    """What `make` places, with dimensions of the torus split only where nothing else will do."""
    try:
        return make(False)
    except NotImplementedError:  # a mesh axis is a part of a torus's, as tensor=4 of 8x8x16
        if what is not None:
            log.warning("%s deals one dimension of the torus to several mesh axes, which share its links", what)
        return make(True)


def _check_slices(spec: str, sizes: dict[str, int], slices: int, devices: int, across: str | None) -> None:
    if math.prod(sizes.values()) != devices:
        raise LayoutError(
            f"mesh '{spec}' has {math.prod(sizes.values())} devices and the {slices} slices have {devices}; a mesh over"
            f" several slices uses all of their devices, as with {across or 'data'}=-1"
        )
    if across is None:
        raise LayoutError(
            f"the devices are in {slices} slices and mesh '{spec}' does not say which axis goes over them; "
            f"{over_slices(sizes, slices)}"
        )
    if sizes[across] % slices:
        raise LayoutError(
            f"mesh '{spec}': {across}={sizes[across]} goes over {slices} slices and does not divide into them; "
            f"{over_slices(sizes, slices)}"
        )


def over_slices(sizes: Mapping[str, int], slices: int) -> str:
    """Words for which axis of a mesh can go over several TPU slices."""
    axis = next((a for a, size in sizes.items() if size % slices == 0), None)
    if axis is not None:
        return f"name one that they divide, as Layout.across = '{axis}'"
    return f"no axis is a multiple of {slices}; use the mesh 'data={slices},fsdp=-1' and Layout.across = 'data'"


def simulate_devices(n: int) -> None:
    """Makes this process's CPU look like `n` devices; call it before anything touches a JAX device.

    Args:
      n: number of devices, at least 1.

    Raises:
      LayoutError: `n` < 1, or JAX has already started with another number of devices.
    """
    if n < 1:
        raise LayoutError(f"cannot simulate {n} devices; ask for at least 1")
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # JAX has started
        if jax.local_device_count() != n or jax.default_backend() != "cpu":
            raise LayoutError(
                f"JAX already runs on {jax.local_device_count()} {jax.default_backend()} device(s); "
                f"call simulate_devices({n}) first thing in a fresh process"
            ) from None
        return
    # Nothing here may start JAX: `init_distributed` has to come before that.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # an XLA_FLAGS setting of the same thing must not win over the call
    flags = os.environ.get("XLA_FLAGS", "")
    kept = [f for f in flags.split() if not f.startswith("--xla_force_host_platform_device_count")]
    os.environ["XLA_FLAGS"] = " ".join(kept)
