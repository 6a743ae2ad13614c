"""Time of a step from its FLOPs, memory traffic and communication, and the rates of the hardware.

A roofline (Williams, Waterman & Patterson 2009): an operation takes the longer of its arithmetic at the peak rate and
its bytes at the memory bandwidth. Communication takes latency and bandwidth of ring algorithms (Patarasuk & Yuan 2009)
on the slowest level of the network that the group spans. Communication that can overlap with arithmetic is hidden as
long as the arithmetic lasts; the rest is exposed. The bubble of a pipeline comes from a simulation of its schedule.

Rates are the data sheet's peaks times the fractions in `Chip.efficiency` (see `EFFICIENCIES`). Without such fractions
the rates are the peaks, and no program can be faster than the predicted time.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping

from jaxscale.hardware import Chip, Link, Topology
from jaxscale.parallel.partial_sums import STAR
from jaxscale.plan.collectives import Collective

EFFICIENCIES: dict[str, str] = {
    "matmul": "fraction of peak FLOP/s of products with weights",
    "attention": "fraction of peak FLOP/s of attention's own products; by default that of 'matmul'",
    "experts": "fraction of peak FLOP/s of routed experts' products; by default that of 'matmul'",
    "memory": "fraction of HBM bandwidth of memory-bound operations",
    "link": "fraction of a link's bandwidth of collectives; the name of a link sets it for that link",
    "overlap": "fraction of the arithmetic that communication can overlap with",
}
"""Names in `Chip.efficiency`; the default is 1."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One kind of operation on one device, all passes and layers of a step together.

    Args:
      name: its result, such as "mlp_up", "scores", "update".
      kind: the rate that bounds it: "matmul", "attention", "experts" or "memory" (of `EFFICIENCIES`).
      flops: FLOPs, recomputation included.
      bytes: bytes read from and written to device memory.
      dtype: dtype of the operands.
      staged: whether pipeline stages execute it by turns, as they do layers but not the optimizer's update.
      width: for attention's products the width of a head, which is one of their three sizes; otherwise `None`.
      optimizer: whether it belongs to the optimizer's update, which a waterfall lists separately.
    """

    name: str
    kind: str
    flops: float
    bytes: float
    dtype: str
    staged: bool = True
    width: int | None = None
    optimizer: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations and communication of a step.

    Args:
      ops: the operations of one device.
      collectives: the collectives of one device.
      sizes: number of devices by mesh axis, in mesh order (`Layout.sizes`).
      flops: the model's FLOPs on all devices, without recomputation.
      tokens: tokens of a step on all devices.
      dtype: dtype whose peak rate MFU refers to.
      bubble: fraction of each stage's time that the pipeline schedule leaves idle.
      host: bytes that a device moves to and from host memory.
      hidden: mesh axes whose communication is assumed to overlap with products, whatever the collectives are.
      crosses: the mesh axis that spans slices; `None` for one slice.
      uncounted: primitives whose communication no rule counts (`jaxscale.plan.partition`).
    """

    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    sizes: Mapping[str, int]
    flops: float
    tokens: int
    dtype: str = "bfloat16"
    bubble: float = 0.0
    host: float = 0.0
    hidden: tuple[str, ...] = ()
    crosses: str | None = None
    uncounted: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Communication of one device along some mesh axes in a step.

    Args:
      axes: the mesh axes.
      link: the slowest level of the network that it crosses.
      bandwidth: bytes/s that a device can send on that level, from the data sheet.
      sent: bytes that a device sends.
      seconds: time of the communication alone.
      exposed: seconds of it that no computation hides.
    """

    axes: tuple[str, ...]
    link: str
    bandwidth: float
    sent: int
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step by term.

    Args:
      compute: seconds of arithmetic.
      memory: seconds of memory traffic beyond the arithmetic of the same operations.
      traffic: communication, by mesh axes.
      host: exposed seconds of transfers to and from host memory.
      bubble: idle seconds of a pipeline stage.
      tokens: tokens of the step on all devices.
      flops: model FLOPs of the step on all devices.
      peak: peak FLOP/s of all devices, from the data sheet.
    """

    compute: float
    memory: float
    traffic: tuple[Traffic, ...]
    host: float
    bubble: float
    tokens: int
    flops: float
    peak: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that no computation hides."""
        return sum(t.exposed for t in self.traffic)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.memory + self.exposed + self.host + self.bubble

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over peak FLOP/s (PaLM, Chowdhery et al. 2022)."""
        return self.flops / (self.total * self.peak)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on all devices."""
        return self.tokens / self.total

    def to_json(self) -> dict[str, object]:
        """Return the times as JSON values."""
        derived = ("exposed", "total", "mfu", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def step_time(work: Work, topology: Topology) -> StepTime:
    """Predict the time of a step on some hardware.

    Args:
      work: the step.
      topology: the hardware.

    Raises:
      LayoutError: the chip has no rate for a dtype of the step, or its mesh does not fit the topology.
    """
    chip = topology.chip
    each = op_times(work, topology)
    busy = sum(c + m for op, c, m in each if op.staged)
    attending = sum(c + m for op, c, m in each if op.kind == "attention")
    traffic = _traffic(work, topology, {"layers": busy, "attention": attending})
    hidden = sum(t.seconds - t.exposed for t in traffic)  # arithmetic that can no longer hide host transfers
    transfers = work.host / chip.host_bandwidth if work.host else 0.0
    return StepTime(
        sum(c for _, c, _ in each),
        sum(m for _, _, m in each),
        traffic,
        max(0.0, transfers - max(0.0, busy * _share(chip, "overlap") - hidden)),
        busy * work.bubble / (1 - work.bubble),
        work.tokens,
        work.flops,
        chip.rate(work.dtype) * math.prod(work.sizes.values()),
    )


def op_times(work: Work, topology: Topology) -> list[tuple[Op, float, float]]:
    """Return each operation of a step, the seconds of its arithmetic, and those of its memory traffic beyond them.

    Args:
      work: as for `step_time`, whose `compute` and `memory` are the sums of these seconds.
      topology: as for `step_time`.

    Raises:
      LayoutError: the chip has no rate for a dtype of the step.
    """
    chip, times = topology.chip, []
    for op in work.ops:
        rate = chip.rate(op.dtype) * _share(chip, op.kind, "matmul")
        compute = op.flops * _padding(chip, op.width) / rate
        times.append((op, compute, max(0.0, op.bytes / (chip.bandwidth * _share(chip, "memory")) - compute)))
    return times


def hides_behind(c: Collective, hidden: tuple[str, ...] = ()) -> str | None:
    """Return what a collective can overlap with: "layers", "attention", or `None` if the next operation waits for it.

    Weights are gathered a layer ahead and gradients are summed a layer behind, over the axes that shard the batch. The
    next shard of a ring and the next micro-batch of a stage are sent while the current one is computed. Operations wait
    for sums over `tensor`, for gathered sequences, and for tokens that are sent to experts and back, unless the program
    replaces these collectives by rings of permutes (`Transformer.overlap`).

    Args:
      c: the collective.
      hidden: further mesh axes whose communication is assumed to overlap with layers.
    """
    if c.ring or set(c.axes) & {"data", "fsdp"} and c.kind != "all-to-all" or set(c.axes) & {*hidden}:
        return "layers"
    if c.kind == "all-reduce" and set(c.axes) <= {"context", "expert"}:
        return "layers"  # gradients of layers that see a shard of the sequence
    if c.kind == "collective-permute" and STAR not in c.name:
        return {"context": "attention", "pipeline": "layers", "tensor": "layers"}.get("+".join(c.axes))
    return None


def collective_time(c: Collective, topology: Topology, sizes: Mapping[str, int], crosses: str | None = None) -> float:
    """Seconds of all `times` executions of a collective without overlap.

    Gathers, scatters and sums use rings: the bytes that a device sends (`Collective.sent`) over its bandwidth, and a
    latency for each hop. On a torus they use both directions, so that the farthest device is half a ring away.
    Half of the bytes of an all-to-all cross the middle of a torus, which is narrowest across its longest side, counted
    double where this does not close into a ring: along one ring, a quarter of the time of a gather of the same arrays
    (Austin et al. 2025, "How to Scale Your Model"). A permute uses one direction of one dimension. Through a switch,
    each device's own link carries the bytes that it sends. Permutes of a `StarSum` share the link of the device in the
    centre, and those to it and those from it have one latency each.

    Args:
      c: the collective.
      topology: the hardware.
      sizes: as for `Topology.link`.
      crosses: as for `Topology.link`.
    """
    sides = topology.sides(sizes, c.axes, crosses)
    return _seconds(c, topology.chip, sides, *topology.link(sizes, c.axes, crosses))


def _seconds(c: Collective, chip: Chip, sides: tuple[tuple[int, float], ...], link: Link, speed: float) -> float:
    torus = link.shape == "torus"
    share = _share(chip, link.name, "link")
    far = sum(side for side, _ in sides) / 2  # hops to the farthest device of a torus
    own, times = link.bandwidth * share, c.times * c.share
    if c.kind == "collective-permute":
        together = c.devices - 1 if STAR in c.name else 1  # permutes that share a link and begin at the same time
        return times * (c.payload / (own / 2 if torus else own) + link.latency / together)
    if c.kind == "all-to-all":
        longest = max((side / of_ring for side, of_ring in sides), default=0.0)
        bandwidth = c.payload * longest / 4 / own if torus else c.sent / max(times, 1e-12) / own
        return times * (bandwidth + link.latency * (far if torus else 1))
    hops = far if torus else max(1.0, c.devices * link.bandwidth / speed) - 1
    rounds = 2 if c.kind == "all-reduce" else 1
    return c.sent / (speed * share) + times * rounds * hops * link.latency


def _traffic(work: Work, topology: Topology, beside: Mapping[str, float]) -> tuple[Traffic, ...]:
    """Communication by mesh axes. Axes on different torus dimensions do not share links; through a switch all do."""
    seconds: dict[tuple[tuple[str, ...], str | None], float] = defaultdict(float)
    sent: dict[tuple[str, ...], int] = defaultdict(int)
    every = {c.axes for c in work.collectives}
    links = {axes: topology.link(work.sizes, axes, work.crosses) for axes in every}
    sides = {axes: topology.sides(work.sizes, axes, work.crosses) for axes in every}
    for c in work.collectives:
        if c.devices > 1 or c.kind == "collective-permute":
            seconds[c.axes, hides_behind(c, work.hidden)] += _seconds(c, topology.chip, sides[c.axes], *links[c.axes])
            sent[c.axes] += c.sent
    left = {name: time * _share(topology.chip, "overlap") for name, time in beside.items()}
    on_link: dict[str, float] = defaultdict(float)  # by shared link, seconds that are already hidden
    rows = []
    for axes in sorted(sent, key=lambda axes: -sum(seconds[axes, h] for h in (None, "attention", "layers"))):
        link, bandwidth = links[axes]
        exposed = seconds[axes, None]
        for name in ("attention", "layers"):
            occupied = on_link[link.name] if link.shape == "switch" else 0.0
            more = max(0.0, seconds[axes, name] - max(0.0, left[name] - occupied))
            on_link[link.name] += seconds[axes, name] - more
            exposed += more
        total = sum(seconds[axes, h] for h in (None, "attention", "layers"))
        rows.append(Traffic(axes, link.name, bandwidth, sent[axes], total, exposed))
    return tuple(rows)


def _padding(chip: Chip, width: int | None) -> float:
    """Factor by which a TPU pads a product: a head narrower than the systolic array leaves rows of it idle.

    Heads of 128 fill half of the 256 x 256 array of v6e and later (Austin et al. 2025, "How to Scale Your Model"). A
    GPU's matrix units are narrower than any head.
    """
    side = chip.tile[2]
    return 1.0 if width is None or chip.platform != "tpu" else math.ceil(width / side) * side / width


def _share(chip: Chip, *names: str) -> float:
    """Return the first of these efficiencies that the chip has, else 1."""
    return next((chip.efficiency[name] for name in names if name in chip.efficiency), 1.0)
