"""A step as Megatron-LM goes about it, made of the planner's own parts: what is published was not run by us."""

from __future__ import annotations

import dataclasses

from jaxscale.hardware import Topology
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import predict, sized
from jaxscale.plan.memory import estimate
from jaxscale.plan.roofline import Work
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig


def work(config: TrainConfig, there: Topology) -> Work:
    """A step as we go about it: `jaxscale plan`'s arithmetic, nothing compiled."""
    assert config.layout is not None
    layout = sized(config.layout, there.devices)
    found = work_of(config, layout, estimate(config, there), predict(config, there))
    return dataclasses.replace(found, crosses=layout.across)


def work_of_stage(config: TrainConfig, there: Topology, *, overlap: bool = True) -> Work:
    """A step of Megatron's, as long as its fullest stage takes: the one with the head.

    Unlike ours, a stage keeps what its forward pass made, takes its turns without waiting for the others', has one end
    of the vocabulary to itself, and sums gradients over replicas once a step (Narayanan et al. 2021).

    Args:
      config: the run, with its pipeline in the layout and as many micro-batches as that has, or `accumulate`.
      there: the hardware.
      overlap: whether products run beside the sums over `tensor` (--tp-comm-overlap).
    """
    assert config.layout is not None
    layout = sized(config.layout, there.devices)
    stages, chunks = layout.stages, layout.schedule.chunks_per_stage
    parts = (layout.schedule.microbatches if stages > 1 else None) or config.accumulate
    model = dataclasses.replace(config.model, depth=config.model.depth // stages)  # type: ignore[type-var]
    mesh = ",".join(part for part in layout.mesh.split(",") if not part.startswith("pipeline"))
    alone = dataclasses.replace(layout, mesh=mesh, pipeline=None)
    one = dataclasses.replace(config, model=model, layout=alone, accumulate=parts)
    found = work(one, dataclasses.replace(there, shape=(there.shape[0], there.shape[1] // stages or 1)))
    once = [
        dataclasses.replace(c, times=c.times // parts)
        if c.name.startswith("gradient of") and set(c.axes) <= {"data", "context"}
        else c
        for c in found.collectives
    ]
    sizes = layout.sizes
    rows = config.batch_size // parts // sizes["data"]
    cut = sizes["context"] * (sizes["tensor"] if layout.sequence_sharded else 1)
    stream = 2 * rows * config.seq_len * model.sizes.width // cut  # type: ignore[attr-defined]
    sent = Collective("collective-permute", ("pipeline",), stages, stream, 2 * parts * chunks)
    idle = (stages - 1) / (chunks * parts)
    return dataclasses.replace(
        found,
        collectives=(*once, *([sent] if stages > 1 else [])),
        sizes=sizes,
        flops=config.model.flops(config.batch_size, config.seq_len),
        bubble=idle / (1 + idle),
        hidden=("tensor",) if overlap else (),
    )
