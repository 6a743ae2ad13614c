"""Plans a run that the formulas do not cover, from its traced step: no compiler, no devices."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from jaxscale.hardware import Topology
from jaxscale.plan.communication import partition, sized
from jaxscale.plan.heap import Buffer
from jaxscale.plan.liveness import allocation
from jaxscale.plan.memory import Estimate, held_bytes
from jaxscale.plan.roofline import Op, Work
from jaxscale.plan.scopes import scopes_of
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.step import TrainConfig, blueprint_of
from jaxscale.step.rates import examples, model_flops


def traced_plan(config: TrainConfig, hardware: Topology) -> tuple[Estimate, Work]:
    """Memory and work of a step of any model, objective, algorithm and optimizer, from its traced program.

    Products and kernels are timed at the rates of matrix products, those of attention at its own, and everything that
    operations read and write at the memory's. Not counted: activations in host memory, and the time that a pipeline's
    stages wait.

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: what it is planned for.

    Raises:
      LayoutError, ConfigError: what training refuses.
    """
    assert config.layout is not None
    layout = sized(config.layout, hardware.devices)
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    host = held_bytes(blueprint, blueprint.algorithm.infos(blueprint), layout)[2]
    traced = partition(config, hardware)
    memory = allocation(traced.program, hardware)
    modules: dict[str, int] = defaultdict(int)
    for buffer in memory.at_peak:
        modules[_module(buffer.what)] += buffer.size
    at_peak = tuple(Buffer(what, 0, size) for what, size in sorted(modules.items(), key=lambda item: -item[1]))
    # what is in host memory is an argument of the traced step, too
    estimate = Estimate(memory.arguments - host, 0, 0, 0, memory.temporaries, host, 0.0, at_peak)
    flops: dict[tuple[str, str, str, bool], float] = defaultdict(float)
    for (path, dtype), count in traced.flops.items():
        scopes = path.split("/")
        kind = "attention" if "mix" in scopes else "matmul"  # `nn.Attention` calls its kernel in this scope
        optimizer = "optimizer" in scopes
        flops["update's products" if optimizer else scopes_of(path), kind, dtype, optimizer] += count
    totals: dict[str, float] = defaultdict(float)
    for (_, _, dtype, _), count in flops.items():
        totals[dtype] += count
    dtype = max(totals, key=lambda d: totals[d], default="float32")
    ops = [
        Op(name, kind, count, 0.0, dtype, staged=not optimizer, optimizer=optimizer)
        for (name, kind, dtype, optimizer), count in flops.items()
    ]
    ops.append(Op("everything that is read and written", "memory", 0.0, memory.moved, dtype))
    work = Work(
        tuple(ops),
        tuple(as_compiled(traced.collectives, hardware)),
        layout.sizes,
        model_flops(config) or sum(totals.values()) * layout.devices,
        examples(config)[1],
        dtype,
        host=2.0 * host,
        crosses=layout.across,
        uncounted=traced.without_rule,
    )
    return estimate, work


def _module(what: str) -> str:
    """The module that makes a buffer, from the buffer's named scopes and operation."""
    path, _, primitive = what.rpartition("/")
    return f"temporaries of {scopes_of(path) or primitive}"
