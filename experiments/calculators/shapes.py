"""Whether a run's shapes suit its hardware: padding of tiles, and products and messages that are too small.

For every product of the model, the rules of hardware-aware shapes (Anthony et al. 2024, arXiv 2401.14489; for mixtures
of experts and networks Anthony et al. 2025, arXiv 2511.17127) become two questions: what fraction of the arithmetic,
forward and backward, is padding when a device's shard is split into the hardware's tiles; and is the product bounded by
arithmetic or by memory. A message is too small if the latency of its steps exceeds the time of its bytes.
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
    """Padding and bound of one product of the model.

    Args:
      name: the product's name in `Transformer.products`.
      rows: rows of the left operand on one device (of each expert).
      inner: width that is summed over, on one device.
      outer: width of the result on one device.
      waste: fraction of its arithmetic, forward and backward, that is padding.
      bound: "compute" or "memory", whichever takes longer in the forward pass.
      advice: sizes without padding; "" if there is no padding.
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
    """All products of a run; prints as a table.

    Args:
      topology: the hardware.
      tile: rows, columns and depth of the product that the hardware computes at once.
      rows: the products.
      waste: fraction of all products' arithmetic that is padding.
    """

    topology: str
    tile: tuple[int, int, int]
    rows: tuple[Sizing, ...]
    waste: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
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
    """Compute padding and bound of every product of a run on one device.

    Args:
      config: the run's settings, of a `Transformer` with a layout.
      hardware: a topology or its name.

    Raises:
      ConfigError: the run has no layout, or its model is not a `Transformer`.
      LayoutError: the topology is unknown, the layout does not fit it, or it has no rate for the dtype.
    """
    if config.layout is None:
        raise ConfigError("a run with layout=None is for one local device; give it Layout('data=1') to size it")
    if not isinstance(config.model, TransformerConfig):
        raise ConfigError(f"the products of {type(config.model).__name__} are not known; use a Transformer")
    target = topology(hardware) if isinstance(hardware, str) else hardware
    layout = sized(config.layout, target.devices)
    chip, model = target.chip, model_of(target.chip, config.model.dtype)
    tile = chip.tile if chip.tile != (1, 1, 1) else model.tile
    judged = [
        (count, _judge(name, sizes, whole, tile, model))
        for name, sizes, whole, count in _local(config, config.model, layout)
    ]
    made = [count * 6 * s.rows * s.inner * s.outer for count, s in judged]
    padded = [n / (1 - s.waste) for n, (_, s) in zip(made, judged, strict=True)]
    return Sizings(target.name, tile, tuple(s for _, s in judged), 1 - sum(made) / sum(padded))


_Sizes = tuple[int, int, int]


def _local(config: TrainConfig, model: TransformerConfig, layout: Layout) -> list[tuple[str, _Sizes, str, int]]:
    """Return each product's name, sizes on one device, sharding in words, and number in the model on one device."""
    per_device = []
    tokens = config.micro_batch * config.seq_len
    if layout.stages > 1:
        tokens //= layout.schedule.microbatches_of(layout.stages, config.micro_batch, layout.split("batch"))
    for p in products(model, config.seq_len):
        local = p.local(layout)
        inner, outer = (local, p.outer) if p.side == "inner" else (p.inner, local)
        # With expert parallelism a device has the tokens of its whole group for a few experts.
        spread = ("expert_batch", "expert_seq") if p.weights > 1 else ("batch", "seq")
        rows = p.rows * tokens / math.prod(layout.split(a) for a in spread) / p.weights
        sharding = ", ".join(_in_pieces(part, layout) for part in p.parts)
        weights = max(1, p.weights // layout.split("experts"))
        per_device.append((p.name, (max(1, round(rows)), inner, outer), sharding, weights * p.layers))
    z, heads = model.sizes, max(1, model.sizes.heads // layout.split("heads"))
    seq = config.seq_len // layout.split("seq")
    examples = max(1, tokens // config.seq_len // layout.split("batch"))
    per_device.append(
        ("scores", (seq, z.head_dim, config.seq_len), f"head_dim {z.head_dim}", heads * examples * model.depth)
    )
    return per_device


def _in_pieces(part: Width, layout: Layout) -> str:
    pieces = layout.split(part.axis, size=part.size)
    return f"{part.axis} {part.size * part.columns}" + (f" in {pieces}" if pieces > 1 else "")


def _judge(name: str, sizes: _Sizes, sharding: str, tile: _Sizes, model: GemmModel) -> Sizing:
    rows, inner, outer = sizes
    # The forward pass and the gradients of both operands: each size is once rows, columns and depth.
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
        f"{better} ({sharding})" if better else "",
    )


def _nearest(n: int, step: int) -> int:
    return max(1, round(n / step)) * step


def small_messages(
    collectives: Sequence[Collective], target: Topology, sizes: Mapping[str, int], across: str | None = None
) -> list[tuple[Collective, float]]:
    """Return collectives whose latency exceeds the time of their bytes, with the payload at which both are equal.

    Args:
      collectives: the result of `predict` or `collectives`.
      target: the hardware.
      sizes: number of devices by mesh axis (`Layout.sizes`).
      across: the mesh axis that spans slices (`Layout.across`).

    Returns:
      pairs of such a collective and the payload in bytes at which its bytes take as long as its steps.
    """
    small = []
    for c in collectives:
        link, speed = target.link(sizes, c.axes, across)
        hops, sent = steps(c.kind, c.devices), c.sent / max(1, c.times)
        if sent and hops * link.latency > sent / speed:
            small.append((c, c.payload * hops * link.latency * speed / sent))
    return small
