"""Costs of sequences by their length and the degree of their group, for the batch planner, from the planner's clock."""

from __future__ import annotations

import dataclasses
import math

from jaxscale.data.batching import SequenceCosts
from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout
from jaxscale.layout.mesh import parse_mesh
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import sized
from jaxscale.plan.memory import estimate
from jaxscale.plan.planner import on_hardware, traced_work
from jaxscale.plan.roofline import collective_time, op_times
from jaxscale.step import TrainConfig


def sequence_costs(config: TrainConfig, hardware: str | Topology, degrees: tuple[int, ...]) -> SequenceCosts:
    """Predict the costs of a run's sequences on named hardware.

    Seconds are those of the planner's roofline for a step with one row of `seq_len` tokens for each group: attention's
    products are quadratic in a row's length, all other operations of layers and loss linear. The optimizer's update,
    and the weights' collectives, take the same time in every plan and are left out. Capacity is the memory that state
    and gradients leave free, over the bytes that a token adds.

    Args:
      config: the run's settings, whose model's attention shards sequences, such as `RingAttention()`, and whose mesh
        has no `context`; its `fsdp` or `data` axis is divided between rows and `context`.
      hardware: a topology or its name, such as "h100:8x8".
      degrees: degrees to predict, which divide that axis.

    Raises:
      ConfigError: the mesh has no axis to divide, a degree does not divide it, or state and gradients fill the memory.
      LayoutError: see `plan_for`.
    """
    target = topology(hardware) if isinstance(hardware, str) else hardware
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('fsdp=-1') to plan it")
    base: Layout = config.layout
    mesh = parse_mesh(sized(base, target.devices).mesh)
    axis = "fsdp" if mesh.get("fsdp", 1) > 1 else "data"
    whole = mesh.get(axis, 1)
    for d in degrees:
        if whole % d or mesh.get("context", 1) > 1:
            raise ConfigError(
                f"degree {d} does not divide {axis}={whole} of the mesh '{base.mesh}' without context; use "
                f"degrees of {', '.join(str(n) for n in range(1, min(whole, 64) + 1) if whole % n == 0)}"
            )

    def at(degree: int, seq_len: int) -> TrainConfig:
        sizes = mesh | {axis: whole // degree, "context": degree}
        layout = dataclasses.replace(base, mesh=",".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "data=1")
        rows = whole // degree
        return on_hardware(
            dataclasses.replace(config, layout=layout, batch_size=rows, seq_len=seq_len, accumulate=1), target
        )

    seq_len = config.seq_len
    alone, longer = at(1, seq_len), at(1, 2 * seq_len)
    memory, twice = estimate(alone, target), estimate(longer, target)
    each = (twice.device - memory.device) / seq_len
    free = target.chip.capacity - (memory.device - each * seq_len)
    if free < each:
        raise ConfigError(
            f"parameters, gradients and optimizer state of {axis}={whole} leave no memory of {target.name} for a "
            "token; use more devices"
        )
    work, _ = traced_work(alone, target, memory)
    seconds = {True: 0.0, False: 0.0}
    for op, compute, moved in op_times(work, target):
        if not op.optimizer and op.name != "update":
            seconds[op.kind == "attention"] += compute + moved
    exchange: dict[int, float] = {}
    latency: dict[int, float] = {}
    rings = True
    for d in degrees:
        row = at(d, seq_len * d)  # each device has as many tokens as at degree 1
        sent = traced_work(row, target, estimate(row, target))[0] if d > 1 else None
        parts = [c for c in sent.collectives if _of_sequences(c)] if sent is not None else []
        sizes = {} if sent is None else sent.sizes
        waits = [collective_time(dataclasses.replace(c, payload=0), target, sizes) for c in parts]
        exchange[d] = (sum(collective_time(c, target, sizes) for c in parts) - math.fsum(waits)) / (seq_len * d)
        latency[d] = math.fsum(waits)
        rings = rings and all(c.kind == "collective-permute" for c in parts)
    moved = (twice.saved - memory.saved) / seq_len
    return SequenceCosts(
        linear=seconds[False] / seq_len,
        quadratic=seconds[True] / seq_len**2,
        exchange=exchange,
        capacity=int(free / each),
        latency=latency,
        overlap=target.chip.efficiency.get("overlap", 1.0) if rings else 0.0,
        offload=2 * moved / target.chip.host_bandwidth,
    )


def _of_sequences(c: Collective) -> bool:
    """Whether a collective exchanges tokens within a sequence, and not gradients of weights."""
    return c.axes == ("context",) and c.kind in ("collective-permute", "all-to-all")
