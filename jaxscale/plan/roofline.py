"""How long a step takes: what it computes, reads and sends, against what the hardware can do in a second.

A roofline (Williams, Waterman & Patterson 2009): an operation takes the longer of its arithmetic at the peak rate and
its bytes at the memory's. Communication is latency and bandwidth, by the ring algorithms (Patarasuk & Yuan 2009) and
level by level where a group spans several levels of the network. What may run beside arithmetic is hidden behind it as
far as that lasts; the rest is exposed. A pipeline's idle time is its schedule's, simulated.

Peaks are the data sheet's times the shares of them in `Chip.efficiency` (see `EFFICIENCIES`); where a chip has none,
the peak itself, and the time is one that no program can beat.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping

from jaxscale.hardware import Chip, Link, Topology
from jaxscale.plan.collectives import Collective

EFFICIENCIES: dict[str, str] = {
    "matmul": "share of peak FLOP/s that products with weights reach",
    "attention": "share of peak FLOP/s that attention's own products reach; 'matmul' where it is not given",
    "experts": "share of peak FLOP/s that products of routed experts reach; 'matmul' where it is not given",
    "memory": "share of HBM bandwidth that what reads and writes reaches",
    "link": "share of a link's bandwidth that collectives reach; a link's own name for one of them",
    "overlap": "share of the arithmetic behind which communication that may be hidden is",
}
"""Names in `Chip.efficiency`, each 1 where it is not given."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One kind of arithmetic, all passes and layers of a step together; of one device.

    Args:
      name: what is made, as "mlp_up", "scores", "update".
      kind: "matmul", "attention", "experts" or "memory" (of `EFFICIENCIES`): what bounds it.
      flops: FLOPs, those made again included.
      bytes: read from and written to the device's memory.
      dtype: of the arithmetic.
      staged: whether a pipeline's stages take turns at it: layers do, the optimizer's update does not.
      width: of attention's products, a head's width, one of the three sizes of each; `None` of other arithmetic.
      optimizer: whether the optimizer's update does it; a waterfall shows these apart.
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
    """What a step is made of.

    Args:
      ops: its arithmetic, of one device.
      collectives: its communication.
      sizes: size by mesh axis, in mesh order (`Layout.sizes`).
      bubble: share of each stage's time that a pipeline's schedule leaves idle.
      flops: the model's own, whole machine: nothing made again is counted.
      tokens: of a step, whole machine.
      dtype: of the arithmetic whose peak MFU is a share of.
      host: bytes that a device moves to and from host memory.
      hidden: mesh axes whose communication is assumed to run beside products, whatever the collectives are.
      crosses: the mesh axis that spans slices, where there are several.
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
    """What travels along some mesh axes in a step, of one device.

    Args:
      axes: the mesh axes.
      link: the slowest level of the network that it crosses.
      bandwidth: bytes/s that a device can send there, by the data sheet.
      sent: bytes that a device sends.
      seconds: how long that takes by itself.
      exposed: how much of that nothing runs beside.
    """

    axes: tuple[str, ...]
    link: str
    bandwidth: float
    sent: int
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they are spent on.

    Args:
      compute: arithmetic.
      memory: reading and writing, beyond the arithmetic it goes along with.
      traffic: communication, by mesh axes.
      host: exposed seconds of moving to and from host memory.
      bubble: idle in a pipeline.
      tokens, flops: of the step, whole machine.
      peak: FLOP/s of the whole machine, by the data sheet.
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
        """Communication that nothing runs beside."""
        return sum(t.exposed for t in self.traffic)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.memory + self.exposed + self.host + self.bubble

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second over the peak (PaLM, Chowdhery et al. 2022)."""
        return self.flops / (self.total * self.peak)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole machine."""
        return self.tokens / self.total

    def to_json(self) -> dict[str, object]:
        """The same as plain values."""
        derived = ("exposed", "total", "mfu", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def step_time(work: Work, topology: Topology) -> StepTime:
    """How long a step takes on some hardware.

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
    shown = sum(t.seconds - t.exposed for t in traffic)  # what is hidden leaves less to hide host transfers behind
    away = work.host / chip.host_bandwidth if work.host else 0.0
    return StepTime(
        sum(c for _, c, _ in each),
        sum(m for _, _, m in each),
        traffic,
        max(0.0, away - max(0.0, busy * _share(chip, "overlap") - shown)),
        busy * work.bubble / (1 - work.bubble),
        work.tokens,
        work.flops,
        chip.rate(work.dtype) * math.prod(work.sizes.values()),
    )


def op_times(work: Work, topology: Topology) -> list[tuple[Op, float, float]]:
    """Each operation of a step, the seconds of its arithmetic, and those of its memory traffic beyond them.

    Args:
      work, topology: as for `step_time`, whose `compute` and `memory` are the sums.

    Raises:
      LayoutError: the chip has no rate for a dtype of the step.
    """
    chip, times = topology.chip, []
    for op in work.ops:
        rate = chip.rate(op.dtype) * _share(chip, op.kind, "matmul")
        compute = op.flops * _filled_up(chip, op.width) / rate
        times.append((op, compute, max(0.0, op.bytes / (chip.bandwidth * _share(chip, "memory")) - compute)))
    return times


def hides_behind(c: Collective, hidden: tuple[str, ...] = ()) -> str | None:
    """What a collective can run beside: "layers", "attention", or `None` where what comes next waits for it.

    Weights are gathered a layer ahead and gradients summed a layer behind: they go over the axes that split a batch. A
    ring's next part, and a stage's next micro-batch, travel while this one is worked on. Sums over `tensor`, gathered
    sequences, and tokens on their way to experts and back are waited for, unless the program makes rings of permutes of
    them (`Transformer.overlap`).

    Args:
      c: the collective.
      hidden: further mesh axes of which it may be assumed.
    """
    if c.ring or set(c.axes) & {"data", "fsdp"} and c.kind != "all-to-all" or set(c.axes) & {*hidden}:
        return "layers"
    if c.kind == "all-reduce" and set(c.axes) <= {"context", "expert"}:
        return "layers"  # gradients of what holds a part of the sequence
    if c.kind == "collective-permute":
        return {"context": "attention", "pipeline": "layers", "tensor": "layers"}.get("+".join(c.axes))
    return None


def collective_time(c: Collective, topology: Topology, sizes: Mapping[str, int], crosses: str | None = None) -> float:
    """Seconds that all `times` of a collective take by themselves.

    Gathers, scatters and sums go round rings: what a device sends (`Collective.sent`) over the speed at which it and
    those beside it send, and a latency for each hop. On a torus both ways round, so that the farthest is half a ring
    away. All-to-alls load a ring's links by how far apart its members are: a quarter of a gather of the same arrays
    (Austin et al. 2025, "How to Scale Your Model"). A permute uses one direction of one dimension. Through a switch,
    each device's own link carries what it sends.

    Args:
      c: the collective.
      topology, sizes, crosses: as for `Topology.link`.
    """
    return _seconds(c, topology.chip, *topology.link(sizes, c.axes, crosses))


def _seconds(c: Collective, chip: Chip, link: Link, speed: float) -> float:
    ways = speed / link.bandwidth  # dimensions of a torus, halves where they do not close; or devices that help
    torus = link.shape == "torus"
    share = _share(chip, link.name, "link")
    dims = max(1, round(ways)) if torus else 1
    side = c.devices ** (1 / dims)
    own = link.bandwidth * share
    if c.kind == "collective-permute":
        return c.times * (c.payload / (own / 2 if torus else own) + link.latency)
    if c.kind == "all-to-all":
        bandwidth = c.payload * side / 4 / (own * min(1.0, ways / dims)) if torus else c.sent / c.times / own
        return c.times * (bandwidth + link.latency * (dims * side / 2 if torus else 1))
    hops = dims * side / 2 if torus else max(1.0, c.devices / ways) - 1
    rounds = 2 if c.kind == "all-reduce" else 1
    return c.sent / (speed * share) + c.times * rounds * hops * link.latency


def _traffic(work: Work, topology: Topology, beside: Mapping[str, float]) -> tuple[Traffic, ...]:
    """Time by axes. Axes along dimensions of their own of a torus do not share links; through a switch all do."""
    seconds: dict[tuple[tuple[str, ...], str | None], float] = defaultdict(float)
    sent: dict[tuple[str, ...], int] = defaultdict(int)
    links = {axes: topology.link(work.sizes, axes, work.crosses) for axes in {c.axes for c in work.collectives}}
    for c in work.collectives:
        if c.devices > 1 or c.kind == "collective-permute":
            seconds[c.axes, hides_behind(c, work.hidden)] += _seconds(c, topology.chip, *links[c.axes])
            sent[c.axes] += c.sent
    left = {name: time * _share(topology.chip, "overlap") for name, time in beside.items()}
    on_link: dict[str, float] = defaultdict(float)  # of links that all axes share, seconds that are hidden already
    rows = []
    for axes in sorted(sent, key=lambda axes: -sum(seconds[axes, h] for h in (None, "attention", "layers"))):
        link, bandwidth = links[axes]
        shown = seconds[axes, None]
        for name in ("attention", "layers"):
            taken = on_link[link.name] if link.shape == "switch" else 0.0
            exposed = max(0.0, seconds[axes, name] - max(0.0, left[name] - taken))
            on_link[link.name] += seconds[axes, name] - exposed
            shown += exposed
        total = sum(seconds[axes, h] for h in (None, "attention", "layers"))
        rows.append(Traffic(axes, link.name, bandwidth, sent[axes], total, shown))
    return tuple(rows)


def _filled_up(chip: Chip, width: int | None) -> float:
    """What a TPU computes of a product, over what is asked of it: rows of its systolic array that a head leaves idle.

    Heads of 128 fill half of the 256 x 256 array of v6e and later (Austin et al. 2025, "How to Scale Your Model"). A
    GPU's matrix units are narrower than any head.
    """
    side = chip.tile[2]
    return 1.0 if width is None or chip.platform != "tpu" else math.ceil(width / side) * side / width


def _share(chip: Chip, *names: str) -> float:
    """The first of these efficiencies that the chip has, else 1."""
    return next((chip.efficiency[name] for name in names if name in chip.efficiency), 1.0)
