"""Memory and work of a run from its traced step: no compiler, no devices, no formula of a layer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from jaxscale.hardware import Topology
from jaxscale.plan.communication import partition, sized
from jaxscale.plan.covered import NotCovered, check_attention, covered
from jaxscale.plan.error_bars import regime
from jaxscale.plan.heap import Buffer
from jaxscale.plan.liveness import allocation
from jaxscale.plan.memory import Estimate, estimate, held_bytes
from jaxscale.plan.partition import Partitioned
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
    traced = partition(config, hardware)
    memory, moved = traced_memory(config, hardware, traced)
    layout = sized(config.layout, hardware.devices)  # type: ignore[arg-type]
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
    ops.append(Op("everything that is read and written", "memory", 0.0, moved, dtype))
    work = Work(
        tuple(ops),
        tuple(as_compiled(traced.collectives, hardware)),
        layout.sizes,
        model_flops(config) or sum(totals.values()) * layout.devices,
        examples(config)[1],
        dtype,
        host=2.0 * memory.host,
        crosses=layout.across,
        uncounted=traced.without_rule,
    )
    return memory, work


def traced_memory(config: TrainConfig, hardware: Topology, traced: Partitioned) -> tuple[Estimate, float]:
    """Memory of a traced step, activations in host memory not counted; and the bytes that it reads and writes.

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: what it is planned for.
      traced: `partition` of both.
    """
    assert config.layout is not None
    layout = sized(config.layout, hardware.devices)
    blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
    host = held_bytes(blueprint, blueprint.algorithm.infos(blueprint), layout)[2]
    memory = allocation(traced.program, hardware)
    modules: dict[str, int] = defaultdict(int)
    for buffer in memory.at_peak:
        modules[_module(buffer.what)] += buffer.size
    at_peak = tuple(Buffer(what, 0, size) for what, size in sorted(modules.items(), key=lambda item: -item[1]))
    # what is in host memory is an argument of the traced step, too
    return Estimate(memory.arguments - host, 0, 0, 0, memory.temporaries, host, 0.0, at_peak), memory.moved


def better_traced(config: TrainConfig, hardware: Topology) -> bool:
    """Whether memory of a run that formulas cover is predicted better from its traced step.

    Formulas were made for TPUs and runs with AdamW, one micro-batch, and neither packing, adapters nor stored attention
    scores, and are off by a median of 2% there; the traced step is closer for others
    (`experiments/planner_accuracy/MEMORY.md`).
    """
    return regime(config, hardware) != "usual"


def with_traced_memory(
    formulas: Estimate, config: TrainConfig, hardware: Topology, traced: Partitioned
) -> tuple[Estimate, str]:
    """Memory by the method that is closer for a run that formulas cover, and which one that is.

    Args:
      formulas: `jaxscale.plan.estimate` of the run.
      config, hardware, traced: as of `traced_memory`.
    """
    if not better_traced(config, hardware):
        return formulas, "formulas"
    memory, _ = traced_memory(config, hardware, traced)
    return dataclasses.replace(memory, host=formulas.host, extra_flops=formulas.extra_flops), "traced"


def memory_of(config: TrainConfig, hardware: Topology) -> tuple[Estimate, str]:
    """Memory of any run as `plan_for` predicts it, and how: "formulas" or "traced".

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: what it is planned for.

    Raises:
      LayoutError, ConfigError: what training refuses.
    """
    try:
        check_attention(covered(config), config.layout)  # type: ignore[arg-type]
        formulas = estimate(config, hardware)
    except NotCovered:
        return traced_plan(config, hardware)[0], "traced"
    if not better_traced(config, hardware):
        return formulas, "formulas"
    return with_traced_memory(formulas, config, hardware, partition(config, hardware))


def _module(what: str) -> str:
    """The module that makes a buffer, from the buffer's named scopes and operation."""
    path, _, primitive = what.rpartition("/")
    return f"temporaries of {scopes_of(path) or primitive}"
