"""Memory and work of a run from its traced step, without a compiler, devices or formulas for layers."""

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
    """Return memory and work of a training step, from its traced program.

    This works for any model, objective, algorithm and optimizer. Matrix products and kernels are timed at the chip's
    rate of matrix products, attention at the rate of attention, and the bytes that operations read and write at memory
    bandwidth. Activations in host memory and pipeline bubbles are not counted.

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: the topology that it is planned for.

    Raises:
      LayoutError, ConfigError: training refuses the run.
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
    """Return memory of a traced step and the bytes that it reads and writes; activations in host memory do not count.

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: the topology that it is planned for.
      traced: `partition(config, hardware)`.
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
    # arrays in host memory are arguments of the traced step, too
    return Estimate(memory.arguments - host, 0, 0, 0, memory.temporaries, host, 0.0, at_peak), memory.moved


def better_traced(config: TrainConfig, hardware: Topology) -> bool:
    """Return whether the traced step predicts a run's memory better than the formulas that cover the run.

    The formulas are made for TPUs and for runs with AdamW, one micro-batch, and neither packing, adapters nor stored
    attention scores. There their median error is 2%; for other runs the traced step is closer
    (`experiments/planner_accuracy/MEMORY.md`).

    Args:
      config: the run's settings.
      hardware: the topology that it is planned for.
    """
    return regime(config, hardware) != "usual"


def with_traced_memory(
    formulas: Estimate, config: TrainConfig, hardware: Topology, traced: Partitioned
) -> tuple[Estimate, str]:
    """Return memory of a run that formulas cover by the better method, and the method: "formulas" or "traced".

    Args:
      formulas: `jaxscale.plan.estimate` of the run.
      config: the run's settings, every size of its mesh known.
      hardware: the topology that it is planned for.
      traced: `partition(config, hardware)`.
    """
    if not better_traced(config, hardware):
        return formulas, "formulas"
    memory, _ = traced_memory(config, hardware, traced)
    return dataclasses.replace(memory, host=formulas.host, extra_flops=formulas.extra_flops), "traced"


def memory_of(config: TrainConfig, hardware: Topology) -> tuple[Estimate, str]:
    """Return memory of any run as `plan_for` predicts it, and the method: "formulas" or "traced".

    Args:
      config: the run's settings, every size of its mesh known.
      hardware: the topology that it is planned for.

    Raises:
      LayoutError, ConfigError: training refuses the run.
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
    """Return a label with the module that makes a buffer, from the buffer's named scopes and operation."""
    path, _, primitive = what.rpartition("/")
    return f"temporaries of {scopes_of(path) or primitive}"
