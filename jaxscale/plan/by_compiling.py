"""Plans a run that the formulas do not cover, from its step compiled for the hardware."""

from __future__ import annotations

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology
from jaxscale.plan.collectives import collectives
from jaxscale.plan.compile import bytes_of, compile_step
from jaxscale.plan.flops import of_step
from jaxscale.plan.heap import Buffer
from jaxscale.plan.memory import Estimate
from jaxscale.plan.remedies import out_of_memory_said
from jaxscale.plan.roofline import Op, Work
from jaxscale.step import TrainConfig
from jaxscale.step.rates import examples, model_flops


def compiled_plan(config: TrainConfig, there: Topology, why: str, why_not: str | None) -> tuple[Estimate, Work, int]:
    """Memory and work of a step from its compiled program, and its bytes on a device.

    Args:
      config: the run's settings, every size of its mesh known.
      there: the hardware.
      why: what no formula knows (`NotCovered.why`).
      why_not: why nothing can be compiled for the hardware on this machine, or `None`.

    Raises:
      ConfigError: it cannot be compiled.
      OutOfMemory: it does not fit.
    """
    if why_not is not None:
        raise ConfigError(f"{why}, so its step has to be compiled for {there.name}, and cannot be: {why_not}")
    layout = config.layout
    assert layout is not None
    with out_of_memory_said(config, there.name):
        program = compile_step(config, there.name)
    size, state = bytes_of(program), program.memory_analysis().argument_size_in_bytes
    rest = Buffer("temporaries and outputs of the compiled step", 0, size - state)
    memory = Estimate(state, 0, 0, 0, rest.size, 0, 0.0, (rest,))
    counted = of_step(config, there.devices, kind=there.chip.kinds[0] if there.chip.kinds else None)
    cost = program.cost_analysis()
    moved = float((cost[0] if isinstance(cost, list) else cost)["bytes accessed"])
    ops = (
        Op("products", "matmul", counted.matmul / layout.devices, 0.0, "bfloat16"),
        Op("everything that is read and written", "memory", 0.0, moved, "bfloat16"),
    )
    sent = tuple(collectives(program, layout.sizes, layout.across))
    flops = model_flops(config) or counted.matmul
    return memory, Work(ops, sent, layout.sizes, flops, examples(config)[1], crosses=layout.across), size
