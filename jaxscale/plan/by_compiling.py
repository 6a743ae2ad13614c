"""Plans a run whose model or objective the formulas do not cover, from the step compiled for the hardware."""

from __future__ import annotations

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology
from jaxscale.models import TransformerConfig
from jaxscale.plan.collectives import collectives
from jaxscale.plan.compile import bytes_of, compile_step
from jaxscale.plan.covered import not_covered
from jaxscale.plan.flops import of_step
from jaxscale.plan.heap import Buffer
from jaxscale.plan.memory import Estimate
from jaxscale.plan.remedies import out_of_memory_said
from jaxscale.plan.roofline import Op, Work
from jaxscale.step import NextToken, TrainConfig
from jaxscale.step.rates import examples, model_flops


def unknown(config: TrainConfig) -> str | None:
    """Which part of a run the formulas do not cover, as a sentence; `None` where they cover it."""
    for part, kind in ((config.objective, NextToken), (config.model, TransformerConfig)):
        if not isinstance(part, kind):
            return f"no formula knows the arithmetic and memory of {type(part).__name__}"
    if not config.algorithm.formulas_hold:
        return f"no formula knows the arithmetic and memory of {config.algorithm.describe()}"
    if config.adapters is not None and config.adapters.base is not None:
        return f"no formula knows the arithmetic and memory of {type(config.adapters.base).__name__}"
    if not config.model.causal:  # type: ignore[attr-defined]
        return "no formula knows the arithmetic and memory of Bidirectional"
    return not_covered(config.model)


def compiled_plan(config: TrainConfig, there: Topology, why: str, why_not: str | None) -> tuple[Estimate, Work, int]:
    """Memory and work of a step from its compiled program, and its bytes on a device.

    Args:
      config: the run's settings, every size of its mesh known.
      there: the hardware.
      why: what no formula knows (see `unknown`).
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
