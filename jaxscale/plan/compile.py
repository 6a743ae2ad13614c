"""Compiling for hardware that nobody has switched on: TPU slices and GPUs by name, on any CPU machine."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout
from jaxscale.optim.base import Schedule
from jaxscale.step import (
    Blueprint,
    TrainConfig,
    batch_shardings,
    blueprint_of,
    check,
    jit_step,
    step_of,
)
from jaxscale.step.guards import Guard
from pallas_kernels.aot import compile_lowered, devices_of
from pallas_kernels.dispatch import KernelError


def topology_devices(topology: str) -> tuple[Any, ...]:
    """The devices of named hardware that is not here, for `Layout.on`.

    Args:
      topology: a TPU slice ("v5e:4x4", "v5p:8x8x8", "v6e:16x16", "tpu7x:4x4x8") or a number of GPUs ("h200:8").

    Raises:
      LayoutError: an unknown name, or its compiler is not installed; says what to install.
    """
    try:
        return devices_of(topology)
    except KernelError as e:
        raise LayoutError(str(e)) from e


def compile_for(
    fn: Callable[..., Any], topology: str, *args: Any, layout: Layout | None = None, donate_argnums: Sequence[int] = ()
) -> Any:
    """Compiles a function for hardware that is not here; what comes back can be read and not run.

    The real compiler makes the real program, so memory (`.memory_analysis()`), arithmetic (`.cost_analysis()`) and
    communication (`.as_text()`) are those of the hardware. Nothing is allocated.

    Args:
      fn: a function, or one that `jax.jit` made (then with its own options).
      topology: as for `topology_devices`.
      *args: trees of `jax.ShapeDtypeStruct` or arrays; only shape, dtype and partition spec are read. An array
        without a sharding, or with one that names no mesh axes, is whole on every device.
      layout: the mesh and rules in force while tracing; one device of the topology by default.
      donate_argnums: arguments whose memory the outputs may take.

    Returns:
      a `jax.stages.Compiled`.

    Raises:
      LayoutError: an unknown topology, a compiler that is not installed, or a mesh larger than the topology.
      ConfigError: `donate_argnums` for a function that is jitted already.
      jax.errors.JaxRuntimeError: the program does not fit the hardware's memory.
    """
    devices = topology_devices(topology)
    there = Layout("data=1", rules="replicated").on(devices[:1]) if layout is None else layout.on(devices)
    used = tuple(there.device_mesh.devices.flat)

    def place(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype, sharding=NamedSharding(there.device_mesh, spec))

    if hasattr(fn, "lower") and donate_argnums:
        raise ConfigError("a function that jax.jit made has its own donate_argnums; give them there")
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=tuple(donate_argnums))
    with there:
        return compile_lowered(jitted.lower(*jax.tree.map(place, args)), used)


def compile_step(config: TrainConfig, topology: str | None, *, guards: Sequence[Guard] = ()) -> Any:
    """Compiles the training step of a run for hardware that is not here, as `fit` would there with these guards.

    Args:
      config: the run's settings; its layout is laid over the topology. Its data is not opened.
      topology: as for `topology_devices`; `None` is this machine.
      guards: that are part of the step; `config.guards` are those of `fit`.

    Returns:
      a `jax.stages.Compiled` of `(state, batch) -> (state, metrics)`.

    Raises:
      ConfigError: the run has no layout, and hardware that is not here.
      LayoutError: as `compile_for`, or naming a tensor that cannot be laid out.
      jax.errors.JaxRuntimeError: the step does not fit the hardware's memory.
    """
    if topology is not None and config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to compile it")
    devices = None if topology is None else topology_devices(topology)
    if devices is not None and config.layout is not None:
        config = dataclasses.replace(config, layout=config.layout.on(devices))
    blueprint, schedule = blueprint_of(config)
    lowered = _lowered(config, blueprint, schedule, tuple(guards), None)
    return lowered.compile() if devices is None else compile_lowered(lowered, devices)


def lower_step(config: TrainConfig) -> Any:
    """Traces and lowers the training step of a run as `fit` makes it, for devices that need not be here.

    Whatever is wrong with shapes, dtypes, kernels or the layout shows, at any size, within a second or two; nothing is
    compiled or allocated, and the data is not opened. A mesh with a -1 takes the devices that are here.

    Args:
      config: the run's settings.

    Returns:
      a `jax.stages.Lowered` of `(state, batch) -> (state, metrics)` on an abstract mesh, for this machine's platform.

    Raises:
      LayoutError, ConfigError: naming what does not fit, as `jaxscale.step.check`.
    """
    if config.layout is not None:
        config = dataclasses.replace(config, layout=config.layout.abstract())
    return _lowered(config, *check(config), config.guards, jax.default_backend())


def _lowered(
    config: TrainConfig,
    blueprint: Blueprint,
    schedule: Schedule | None,
    guards: tuple[Guard, ...],
    platform: str | None,
) -> Any:
    """The lowered step of a run on its own layout; `platform` is needed where that has no devices."""
    inputs = config.objective.inputs(config)
    sharding = None if config.layout is None else batch_shardings(config.layout, inputs, config.batch_size)
    plain = step_of(blueprint, dataclasses.replace(config, guards=guards), schedule)
    step: Any = jit_step(plain, blueprint, sharding)
    with config.layout if config.layout is not None else contextlib.nullcontext():
        state: Any = blueprint.abstract_state()
        if config.layout is not None:
            state = jax.tree.map(
                lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), state, blueprint.shardings()
            )
        traced = step.trace(state, abstract_batch(config))
        return traced.lower(lowering_platforms=None if platform is None else (platform,))


def abstract_batch(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of what a step is given, laid out as the run says."""
    inputs, rows = config.objective.inputs(config), config.batch_size
    where = batch_shardings(config.layout, inputs, rows)
    return {
        name: jax.ShapeDtypeStruct((rows, *i.shape), jnp.dtype(i.dtype), sharding=where[name])
        for name, i in inputs.items()
    }


def bytes_of(program: Any) -> int:
    """Bytes on a device of a compiled program: arguments, outputs that are not theirs, temporaries.

    Of a TPU, jax 0.10.2 reports more temporaries than it allocates (10.9 GiB for 7.4 in one case), and jax 0.12 what it
    allocates.
    """
    m = program.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def bytes_wanted(error: jax.errors.JaxRuntimeError) -> int:
    """Bytes that a compiler wanted on giving up.

    Raises:
      jax.errors.JaxRuntimeError: it gave up for another reason.
    """
    size = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", str(error))
    if size is None:
        raise error
    return int(float(size[1]) * 1024 ** (1 + "KMGT".index(size[2])))
