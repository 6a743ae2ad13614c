"""Compile for TPU slices and GPUs by name, on a machine that has none (ahead-of-time compilation)."""

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
from jaxscale.layout.tensors import Tree
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
from jaxscale.step.stage_order import by_stage
from pallas_kernels.aot import compile_lowered, devices_of
from pallas_kernels.dispatch import KernelError


def topology_devices(topology: str) -> tuple[jax.Device, ...]:
    """Return compile-only devices of named hardware, for `Layout.on`.

    Args:
      topology: a TPU slice ("v5e:4x4", "v5p:8x8x8", "v6e:16x16", "tpu7x:4x4x8") or a number of GPUs ("h200:8").

    Raises:
      LayoutError: the name is unknown, or the compiler is not installed; the message tells what to install.
    """
    try:
        return devices_of(topology)
    except KernelError as e:
        raise LayoutError(str(e)) from e


def compile_for(
    fn: Callable[..., Any], topology: str, *args: Tree, layout: Layout | None = None, donate_argnums: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compile a function for hardware that this machine does not have; the result can be read but not run.

    This is the compiler of the hardware, so that memory (`.memory_analysis()`), FLOPs (`.cost_analysis()`) and
    collectives (`.as_text()`) are those of the program that would run. No array is allocated.

    Args:
      fn: a function, or the result of `jax.jit` (which keeps its options).
      topology: as for `topology_devices`.
      *args: trees of `jax.ShapeDtypeStruct` or arrays; only shape, dtype and partition spec are read. An array
        without a sharding, or with one that names no mesh axes, is replicated.
      layout: the mesh and rules in force while tracing; one device of the topology by default.
      donate_argnums: positions of arguments whose memory the outputs may reuse.

    Returns:
      a `jax.stages.Compiled`.

    Raises:
      LayoutError: an unknown topology, a compiler that is not installed, or a mesh larger than the topology.
      ConfigError: `donate_argnums` for a function that is already jitted.
      jax.errors.JaxRuntimeError: the program does not fit the hardware's memory.
    """
    devices = topology_devices(topology)
    placed = Layout("data=1", rules="replicated").on(devices[:1]) if layout is None else layout.on(devices)
    used = tuple(placed.device_mesh.devices.flat)

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype, sharding=NamedSharding(placed.device_mesh, spec))

    if hasattr(fn, "lower") and donate_argnums:
        raise ConfigError("a jitted function has its own donate_argnums; pass donate_argnums to jax.jit instead")
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=tuple(donate_argnums))
    with placed:
        return compile_lowered(jitted.lower(*jax.tree.map(abstract, args)), used)


def compile_step(config: TrainConfig, topology: str | None, *, guards: Sequence[Guard] = ()) -> jax.stages.Compiled:
    """Compile the training step of a run, for named hardware or for this machine.

    The step is the one that `fit` would run there with these guards.

    Args:
      config: the run's settings; its mesh is made of the topology's devices. Its data is not opened.
      topology: as for `topology_devices`; `None` is this machine.
      guards: guards that are part of the step; none by default. Pass `config.guards` to compile what `fit` runs.

    Returns:
      a `jax.stages.Compiled` of `(state, batch) -> (state, metrics)`.

    Raises:
      ConfigError: a topology for a run without a layout.
      LayoutError: as for `compile_for`, or a tensor cannot be laid out.
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


def lower_step(config: TrainConfig) -> jax.stages.Lowered:
    """Trace and lower the training step that `fit` runs, for a mesh of any size.

    This finds errors in shapes, dtypes, kernels and the layout within a second or two at any size. Nothing is compiled
    or allocated, and the data is not opened. A mesh size of -1 is filled with this machine's devices.

    Args:
      config: the run's settings.

    Returns:
      a `jax.stages.Lowered` of `(state, batch) -> (state, metrics)` on an abstract mesh, for this machine's platform.

    Raises:
      LayoutError, ConfigError: `jaxscale.step.check` refuses the run, and names what does not fit.
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
) -> jax.stages.Lowered:
    """Return the lowered step of a run on its layout; `platform` is needed for a layout without devices."""
    inputs = config.objective.inputs(config)
    sharding = None if config.layout is None else batch_shardings(config.layout, inputs, config.batch_size)
    blueprint = by_stage(blueprint)
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
    """Return shapes, dtypes and shardings of a step's batch."""
    inputs, rows = config.objective.inputs(config), config.batch_size
    where = batch_shardings(config.layout, inputs, rows)
    return {
        name: jax.ShapeDtypeStruct((rows, *i.shape), jnp.dtype(i.dtype), sharding=where[name])
        for name, i in inputs.items()
    }


def bytes_of(program: jax.stages.Compiled) -> int:
    """Return the bytes per device of a compiled program: arguments, outputs that do not alias them, temporaries.

    For TPUs, jax 0.10.2 reports more temporaries than it allocates (10.9 GiB instead of 7.4 in one case); jax 0.12
    reports what it allocates.
    """
    m: Any = program.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def bytes_needed(error: jax.errors.JaxRuntimeError) -> int:
    """Return the bytes per device that a program needs, from the compiler's out-of-memory error.

    Raises:
      jax.errors.JaxRuntimeError: the error is not about memory.
    """
    size = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", str(error))
    if size is None:
        raise error
    return int(float(size[1]) * 1024 ** (1 + "KMGT".index(size[2])))
