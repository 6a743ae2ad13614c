"""Whether a run's shapes suit its hardware: tiles that are left half empty, products and messages that are too small.

The rules of hardware-aware shapes (Anthony et al. 2024, arXiv 2401.14489; for mixtures of experts and networks row 160,
Anthony et al. 2025, arXiv 2511.17127) as one question asked of every product of the model: how much of the arithmetic
is padding, forward and backward, once a device's piece is cut into the hardware's tiles; and is there enough of it to
be bounded by arithmetic and not by memory. A message is too small where its steps take longer than its bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import Width
from jaxscale.plan.collective_bench import steps
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import sized
from jaxscale.plan.gemm import GemmModel, model_of, padded_flops
from jaxscale.plan.work import products
from jaxscale.step import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True)
class Sizing:
    """How a product of the model suits the hardware.

    Args:
      name: of the product, as `Transformer.products` has it.
      rows, inner, outer: its sizes on one device: of each expert, where there are several.
      waste: the share of its arithmetic, forward and backward, that is padding.
      bound: "compute" or "memory", whichever takes longer, forward.
      advice: what would waste nothing; "" where nothing is wasted.
    """

    name: str
    rows: int
    inner: int
    outer: int
    waste: float
    bound: str
    advice: str


@dataclasses.dataclass(frozen=True)
class Sizings:
    """Every product of a run; prints as a table.

    Args:
      topology: the hardware.
      tile: what it works on at once: rows, columns, depth.
      rows: a line per product.
      waste: the share of all products' arithmetic that is padding.
    """

    topology: str
    tile: tuple[int, int, int]
    rows: tuple[Sizing, ...]
    waste: float

    def to_json(self) -> dict[str, Any]:
        """Its fields."""
        return dataclasses.asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        title = f"products of one device of {self.topology}, in tiles of {' x '.join(map(str, self.tile))}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for name in ("product", "rows", "inner", "outer", "padding", "bound by", "better"):
            table.add_column(name, justify="right" if name in ("rows", "inner", "outer", "padding") else "left")
        for r in self.rows:
            table.add_row(r.name, *map(str, (r.rows, r.inner, r.outer)), f"{r.waste:.1%}", r.bound, r.advice)
        yield table
        yield f"{self.waste:.1%} of the products' arithmetic is padding"


def sizing(config: TrainConfig, hardware: str | Topology) -> Sizings:
    """Asks of every product whether its sizes on one device suit the hardware.

    Args:
      config: the run's settings, of a `Transformer` with a layout.
      hardware: a topology or its name.

    Raises:
      ConfigError: a run without a layout, or another model.
      LayoutError: an unknown topology, a layout that does not fit it, or a dtype whose rate is not known there.
    """
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to size it")
    if not isinstance(config.model, TransformerConfig):
        raise ConfigError(f"the products of {type(config.model).__name__} are not known here; those of Transformer are")
    there = topology(hardware) if isinstance(hardware, str) else hardware
    layout = sized(config.layout, there.devices)
    chip, model = there.chip, model_of(there.chip, config.model.dtype)
    tile = chip.tile if chip.tile != (1, 1, 1) else model.tile
    judged = [
        (count, _judge(name, sizes, whole, tile, model))
        for name, sizes, whole, count in _local(config, config.model, layout)
    ]
    made = [count * 6 * s.rows * s.inner * s.outer for count, s in judged]
    padded = [n / (1 - s.waste) for n, (_, s) in zip(made, judged, strict=True)]
    return Sizings(there.name, tile, tuple(s for _, s in judged), 1 - sum(made) / sum(padded))


_Sizes = tuple[int, int, int]


def _local(config: TrainConfig, model: TransformerConfig, layout: Layout) -> list[tuple[str, _Sizes, str, int]]:
    """Each product's name and sizes on one device, what cuts it in words, and how often a layer has it."""
    found = []
    tokens = config.micro_batch * config.seq_len
    if layout.stages > 1:
        tokens //= layout.schedule.microbatches_of(layout.stages, config.micro_batch, layout.split("batch"))
    for p in products(model, config.seq_len):
        local = p.local(layout)
        inner, outer = (local, p.outer) if p.side == "inner" else (p.inner, local)
        # of routed experts, each device has all of its group's tokens for a few, in place of a few tokens for all
        spread = ("expert_batch", "expert_seq") if p.weights > 1 else ("batch", "seq")
        rows = p.rows * tokens / math.prod(layout.split(a) for a in spread) / p.weights
        said = ", ".join(_in_pieces(part, layout) for part in p.parts)
        weights = max(1, p.weights // layout.split("experts"))
        found.append((p.name, (max(1, round(rows)), inner, outer), said, weights * p.layers))
    z, heads = model.sizes, max(1, model.sizes.heads // layout.split("heads"))
    seq = config.seq_len // layout.split("seq")
    examples = max(1, tokens // config.seq_len // layout.split("batch"))
    found.append(
        ("scores", (seq, z.head_dim, config.seq_len), f"head_dim {z.head_dim}", heads * examples * model.depth)
    )
    return found


def _in_pieces(part: Width, layout: Layout) -> str:
    pieces = layout.split(part.axis, size=part.size)
    return f"{part.axis} {part.size * part.columns}" + (f" in {pieces}" if pieces > 1 else "")


def _judge(name: str, sizes: _Sizes, said: str, tile: _Sizes, model: GemmModel) -> Sizing:
    rows, inner, outer = sizes
    # forward, and the gradients of both operands: each size is a row, a column and a depth in turn
    passes = ((rows, outer, inner), (rows, inner, outer), (inner, outer, rows))
    padded = sum(padded_flops(*p, tile) for p in passes)
    memory = model.width * (rows * inner + inner * outer + rows * outer) / model.bandwidth
    compute = padded_flops(rows, outer, inner, tile) / model.rate
    step = math.lcm(*tile)
    odd = {what: n for what, n in (("rows", rows), ("inner", inner), ("outer", outer)) if n % step}
    better = ", ".join(f"{what} {n} -> {_nearest(n, step)}" for what, n in odd.items())
    return Sizing(
        name,
        *sizes,
        1 - 6 * rows * inner * outer / padded,
        "compute" if compute >= memory else "memory",
        f"{better} ({said})" if better else "",
    )


def _nearest(n: int, step: int) -> int:
    return max(1, round(n / step)) * step


def small_messages(
    found: Sequence[Collective], there: Topology, sizes: Mapping[str, int], across: str | None = None
) -> list[tuple[Collective, float]]:
    """Collectives whose steps take longer than their bytes, and how large a payload would be even.

    Args:
      found: as `predict` or `collectives` give them.
      there: the hardware.
      sizes, across: of the layout, as `Topology.link` takes them.

    Returns:
      each such collective, with the payload in bytes at which its bytes take as long as its steps.
    """
    small = []
    for c in found:
        link, speed = there.link(sizes, c.axes, across)
        hops, sent = steps(c.kind, c.devices), c.sent / max(1, c.times)
        if sent and hops * link.latency > sent / speed:
            small.append((c, c.payload * hops * link.latency * speed / sent))
    return small
