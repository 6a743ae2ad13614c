"""Device meshes from a string such as "data=2,fsdp=4"."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxscale.errors import LayoutError
from jaxscale.layout.axes import MESH_AXES, check_mesh_axis
from jaxscale.layout.distributed import compile_anew

log = logging.getLogger("jaxscale")


def parse_mesh(spec: str) -> dict[str, int]:
    """Parse `"data=2,fsdp=-1"` into `{"data": 2, "fsdp": -1}`.

    Args:
      spec: `axis=size` pairs, separated by commas or spaces; at most one size may be -1 (the rest of the devices).

    Returns:
      sizes by mesh axis, of the named axes only.

    Raises:
      LayoutError: an unknown or repeated axis, a size that is no positive integer, or two sizes of -1.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, re.split(r"[,\s]+", spec.strip())):
        name, eq, size = part.partition("=")
        if not eq or not re.fullmatch(r"-?\d+", size):
            raise LayoutError(f"mesh '{spec}': '{part}' is not of the form axis=size, such as 'data=2,fsdp=4'")
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
    """Replace -1 by the number of devices left, and add the axes that are not named, with size 1.

    Args:
      sizes: from `parse_mesh`.
      devices: the number of devices.
      spec: the mesh as written, for messages.

    Returns:
      the size of every mesh axis, in the order of `MESH_AXES`.

    Raises:
      LayoutError: the number of devices is not a multiple of the other sizes, or the mesh needs more devices.
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
    """Make a device mesh that has every mesh axis (size 1 where unnamed), of type `Auto`.

    Args:
      spec: sizes by mesh axis, such as `"data=2,fsdp=2,tensor=2"`; one may be -1. The order does not matter: devices
        are always assigned in the order of `MESH_AXES`.
      devices: the devices to use; all of them by default. A smaller mesh takes the first ones and logs a warning.
      across: the mesh axis that spans several TPU slices; the other axes stay within a slice. Ignored with one slice.

    Raises:
      LayoutError: see `parse_mesh` and `resolve_sizes`; or there are several slices and `across` is missing, or its
        size is not a multiple of their number.
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


def place(shape: Sequence[int], devices: Sequence[jax.Device], what: str | None = None) -> np.ndarray:
    """Arrange devices on a mesh: on TPUs along the links of the torus, as JAX does it, elsewhere in their order.

    Args:
      shape: sizes of the mesh axes; a mesh that needs fewer devices takes the first ones.
      devices: the devices of one slice.
      what: what to call the mesh in warnings; `None` gives no warnings.

    Returns:
      object array of devices, of that shape.
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
    """Call `make(False)`; if no such mesh exists, `make(True)`, which splits a dimension of the torus."""
    try:
        return make(False)
    except NotImplementedError:  # a mesh axis is part of a torus dimension, such as tensor=4 on 8x8x16
        if what is not None:
            log.warning("%s places several mesh axes on one dimension of the torus, so they share its links", what)
        return make(True)


def _check_slices(spec: str, sizes: dict[str, int], slices: int, devices: int, across: str | None) -> None:
    if math.prod(sizes.values()) != devices:
        raise LayoutError(
            f"mesh '{spec}' has {math.prod(sizes.values())} devices and the {slices} slices have {devices}; a mesh over"
            f" several slices must use all of their devices; set {across or 'data'}=-1"
        )
    if across is None:
        raise LayoutError(
            f"the devices are in {slices} slices and mesh '{spec}' does not say which axis spans them; "
            f"{over_slices(sizes, slices)}"
        )
    if sizes[across] % slices:
        raise LayoutError(
            f"mesh '{spec}': {across}={sizes[across]} spans {slices} slices and is not a multiple of {slices}; "
            f"{over_slices(sizes, slices)}"
        )


def over_slices(sizes: Mapping[str, int], slices: int) -> str:
    """Advice for an error message: which mesh axis can span the TPU slices.

    Args:
      sizes: sizes by mesh axis.
      slices: the number of slices.
    """
    axis = next((a for a, size in sizes.items() if size % slices == 0), None)
    if axis is not None:
        return f"set Layout.across = '{axis}', which is a multiple of {slices}"
    return f"no axis is a multiple of {slices}; use the mesh 'data={slices},fsdp=-1' and Layout.across = 'data'"


def simulate_devices(n: int) -> None:
    """Make this process's CPU look like `n` devices; call it before anything uses a JAX device.

    Args:
      n: the number of devices, at least 1.

    Raises:
      LayoutError: `n` < 1, or JAX has already started with another number of devices.
    """
    if n < 1:
        raise LayoutError(f"cannot simulate {n} devices; use at least 1")
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # JAX has started
        if jax.local_device_count() != n or jax.default_backend() != "cpu":
            raise LayoutError(
                f"JAX already runs on {jax.local_device_count()} {jax.default_backend()} device(s); "
                f"call simulate_devices({n}) first thing in a fresh process"
            ) from None
        return
    # This must not start JAX, because `init_distributed` has to run before JAX starts.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # A device may wait in several collectives at once. With a thread per device, XLA's default on few cores, no thread
    # may be left for the device that the others wait for.
    os.environ.setdefault("PJRT_NPROC", str(max(4 * n, os.cpu_count() or 1)))
    # XLA_FLAGS must not override this call
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith("--xla_force_host_platform_device_count"))
