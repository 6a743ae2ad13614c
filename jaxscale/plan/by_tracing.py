"""Plans a run that the formulas do not cover, from its traced step: no compiler, no devices."""

from __future__ import annotations

from collections import defaultdict

from jaxscale.hardware import Topology
from jaxscale.plan.communication import partition
from jaxscale.plan.heap import Buffer
from jaxscale.plan.liveness import allocation
from jaxscale.plan.memory import Estimate
from jaxscale.plan.roofline import Op, Work
from jaxscale.plan.scopes import scopes_of
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.step import TrainConfig
from jaxscale.step.rates import examples, model_flops


def traced_plan(config: TrainConfig, there: Topology) -> tuple[Estimate, Work]:
    """Memory and work of a step of any model, objective, algorithm and optimizer, from its traced program.

    Products and kernels are timed at the rates of matrix products, and everything that operations read and write at
    the memory's. What is in host memory is counted nowhere.

    Args:
      config: the run's settings, every size of its mesh known.
      there: the hardware.

    Raises:
      LayoutError, ConfigError: what training refuses.
    """
    layout = config.layout
    assert layout is not None
    traced = partition(config, there)
    memory = allocation(traced.program, there)
    modules: dict[str, int] = defaultdict(int)
    for buffer in memory.at_peak:
        modules[_module(buffer.what)] += buffer.size
    held = tuple(Buffer(what, 0, size) for what, size in sorted(modules.items(), key=lambda item: -item[1]))
    estimate = Estimate(memory.arguments, 0, 0, 0, memory.temporaries, 0, 0.0, held)
    flops: dict[str, float] = defaultdict(float)
    for (_, dtype), count in traced.flops.items():
        flops[dtype] += count
    ops = [Op(f"products, {dtype}", "matmul", count, 0.0, dtype) for dtype, count in flops.items() if count]
    ops.append(Op("everything that is read and written", "memory", 0.0, memory.moved, next(iter(flops), "float32")))
    dtype = max(flops, key=lambda d: flops[d], default="float32")
    model = model_flops(config) or sum(flops.values()) * layout.devices
    sent = tuple(as_compiled(traced.collectives, there))
    work = Work(tuple(ops), sent, layout.sizes, model, examples(config)[1], dtype, crosses=layout.across)
    return estimate, work


def _module(what: str) -> str:
    """Of a buffer's scopes and operation, the module; layers of a stack together."""
    path, _, primitive = what.rpartition("/")
    return f"temporaries of {scopes_of(path) or primitive}"
