"""A step as Megatron-LM goes about it, made of the planner's own parts: what is published was not run by us."""

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
"""Mesh axes over which weights' gradients are summed, beside which stages and their tensors are cut."""


def work(config: TrainConfig, there: Topology) -> Work:
    """A step as we go about it: `jaxscale plan`'s arithmetic, nothing compiled."""
    assert config.layout is not None
    layout = sized(config.layout, there.devices)
    sent = predict(config, there, repeats=False)  # other systems gather weights once for a backward pass
    found = work_of(config, layout, estimate(config, there), sent)
    return dataclasses.replace(found, crosses=layout.across)


def work_unpadded(config: TrainConfig, there: Topology) -> Work:
    """As `work`, where devices exchange the tokens that there are, which NCCL's all-to-all of unequal parts does.

    On GPUs our program pads what dropless experts are sent to the worst case (`jaxscale.parallel.experts`).
    """
    found = work(config, there)
    experts = config.model.mlp  # type: ignore[attr-defined]
    if not isinstance(experts, MixtureOfExperts) or experts.capacity is not None or there.chip.platform == "tpu":
        return found
    sent = (
        dataclasses.replace(c, payload=c.payload // c.devices) if c.kind == "all-to-all" and "expert" in c.axes else c
        for c in found.collectives
    )
    return dataclasses.replace(found, collectives=tuple(sent))


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
    mesh = ",".join(part for part in config.layout.mesh.split(",") if not part.startswith("pipeline"))
    alone = dataclasses.replace(config.layout, mesh=mesh, pipeline=None)
    one = dataclasses.replace(config, model=model, layout=alone, accumulate=parts)
    found = work_unpadded(one, dataclasses.replace(there, shape=(there.shape[0], there.shape[1] // stages or 1)))
    once = [
        dataclasses.replace(c, times=c.times // parts)
        if c.kind in ("all-reduce", "reduce-scatter") and "transpose(" in c.name and set(c.axes) <= REPLICAS
        else c
        for c in found.collectives
    ]
    sizes = layout.sizes
    rows = config.batch_size // parts // sizes["data"] // sizes["expert"]
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
