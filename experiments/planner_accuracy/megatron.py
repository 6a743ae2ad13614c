"""Models of other systems' steps, such as Megatron-LM's, from the planner's parts."""

from __future__ import annotations

import dataclasses

from jaxscale.hardware import Topology
from jaxscale.nn import MixtureOfExperts
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import predict, sized
from jaxscale.plan.memory import estimate
from jaxscale.plan.roofline import Work
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig

REPLICAS = {"data", "expert", "context"}
"""Mesh axes over which gradients of weights are summed; the other axes shard the model."""


def work(config: TrainConfig, target: Topology) -> Work:
    """Return the analytic work of our own step, as `jaxscale plan` computes it."""
    assert config.layout is not None
    layout = sized(config.layout, target.devices)
    sent = predict(config, target, repeats=False)  # other systems gather weights once in a backward pass
    result = work_of(config, layout, estimate(config, target), sent)
    return dataclasses.replace(result, crosses=layout.across)


def work_unpadded(config: TrainConfig, target: Topology) -> Work:
    """Return the work of a step in which devices exchange experts' tokens without padding, as NCCL's all-to-all can.

    On GPUs our own program pads the tokens of dropless experts to the worst case (`jaxscale.parallel.dispatch`).
    """
    result = work(config, target)
    experts = config.model.mlp  # type: ignore[attr-defined]
    if not isinstance(experts, MixtureOfExperts) or experts.capacity is not None or target.chip.platform == "tpu":
        return result
    sent = (
        dataclasses.replace(c, payload=c.payload // c.devices) if c.kind == "all-to-all" and "expert" in c.axes else c
        for c in result.collectives
    )
    return dataclasses.replace(result, collectives=tuple(sent))


def work_of_stage(config: TrainConfig, target: Topology, *, overlap: bool = True) -> Work:
    """Return the work of Megatron's step: that of its slowest stage, the one with the output head.

    Unlike ours, a stage saves the activations of its forward pass, does not run in lockstep with the others, holds the
    embedding or the head alone, and sums gradients over replicas once a step (Narayanan et al. 2021).

    Args:
      config: the run, with the pipeline in its layout; micro-batches are those of the schedule, or `accumulate`.
      target: the hardware.
      overlap: whether products overlap with the sums over `tensor` (--tp-comm-overlap).
    """
    assert config.layout is not None
    layout = sized(config.layout, target.devices)
    stages, chunks = layout.stages, layout.schedule.chunks_per_stage
    parts = (layout.schedule.microbatches if stages > 1 else None) or config.accumulate
    model = dataclasses.replace(config.model, depth=config.model.depth // stages)  # type: ignore[type-var]
    mesh = ",".join(part for part in config.layout.mesh.split(",") if not part.startswith("pipeline"))
    alone = dataclasses.replace(config.layout, mesh=mesh, pipeline=None)
    one = dataclasses.replace(config, model=model, layout=alone, accumulate=parts)
    result = work_unpadded(one, dataclasses.replace(target, shape=(target.shape[0], target.shape[1] // stages or 1)))
    once = [
        dataclasses.replace(c, times=c.times // parts)
        if c.kind in ("all-reduce", "reduce-scatter") and "transpose(" in c.name and set(c.axes) <= REPLICAS
        else c
        for c in result.collectives
    ]
    sizes = layout.sizes
    rows = config.batch_size // parts // sizes["data"] // sizes["expert"]
    cut = sizes["context"] * (sizes["tensor"] if layout.sequence_sharded else 1)
    stream = 2 * rows * config.seq_len * model.sizes.width // cut  # type: ignore[attr-defined]
    sent = Collective("collective-permute", ("pipeline",), stages, stream, 2 * parts * chunks)
    idle = (stages - 1) / (chunks * parts)
    return dataclasses.replace(
        result,
        collectives=(*once, *([sent] if stages > 1 else [])),
        sizes=sizes,
        flops=config.model.flops(config.batch_size, config.seq_len),
        bubble=idle / (1 + idle),
        hidden=("tensor",) if overlap else (),
    )
