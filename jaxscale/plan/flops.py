"""What a program computes: its floating-point operations by module, dtype and pass, counted from its jaxpr."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxscale.layout import Layout
from jaxscale.plan.compile import abstract_batch
from jaxscale.plan.flop_walk import FlopRow, operations
from jaxscale.plan.scopes import PASSES
from jaxscale.step import TrainConfig, blueprint_of, step_of
from pallas_kernels.dispatch import device

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True)
class Flops:
    """A program's operations; of a sharded one, the whole machine's. Prints as a table."""

    rows: tuple[FlopRow, ...]

    @property
    def total(self) -> int:
        """All floating-point operations."""
        return sum(r.flops for r in self.rows)

    @property
    def matmul(self) -> int:
        """Those of matrix products and kernels."""
        return sum(r.flops for r in self.rows if r.matmul)

    @property
    def elementwise(self) -> int:
        """All others, one for each element an operation makes (or a reduction takes)."""
        return self.total - self.matmul

    @property
    def certain(self) -> bool:
        """Whether nothing of it depends on data."""
        return all(r.certain for r in self.rows)

    def by(self, field: str, *, matmul: bool | None = None) -> dict[str, int]:
        """FLOPs by "module", "dtype", "stage" or "what", most first; of products alone, of the others, or of all."""
        found: dict[str, int] = defaultdict(int)
        for r in self.rows:
            if matmul in (None, r.matmul):
                found[getattr(r, field)] += r.flops
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def by_module(self) -> dict[str, int]:
        """FLOPs by module, most first."""
        return self.by("module")

    @property
    def by_dtype(self) -> dict[str, int]:
        """FLOPs by the operands' dtype, most first."""
        return self.by("dtype")

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "total": self.total,
            "matmul": self.matmul,
            "elementwise": self.elementwise,
            "certain": self.certain,
            **{f"by_{field}": self.by(field) for field in ("module", "dtype", "stage")},
            "rows": [dataclasses.asdict(r) for r in self.rows],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield flops_table(self)


def count(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> Flops:
    """Counts a function's operations from shapes; nothing is computed.

    Args:
      fn: a function of arrays.
      *args: trees of arrays or `jax.ShapeDtypeStruct`.
      platform: as for `of_jaxpr`.
    """
    return of_jaxpr(jax.make_jaxpr(fn)(*args), platform=platform)


def of_jaxpr(closed: Any, *, platform: str | None = None) -> Flops:
    """Counts a jaxpr's operations.

    Scans are multiplied out, a body under `shard_map` runs on every device of its mesh axes, of branches the longest is
    counted, a Pallas kernel by the cost it declares. What moves or compares (gathers, casts, collectives) is none, nor
    what no result depends on, which compilers leave out (the gradients of frozen weights; JAX 0.10 keeps kernels).

    Args:
      closed: a `jax.core.ClosedJaxpr`.
      platform: "tpu", "cuda" or "cpu", where a function has a branch for each; by default that of the device in scope.
    """
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return Flops(tuple(operations(jaxpr, platform or device().platform)))


def of_step(config: TrainConfig, devices: int | None = None, *, kind: str | None = None) -> Flops:
    """Counts a run's training step, over the whole machine. Needs no devices and no compiler.

    Attention counts as what runs: `dot_product_attention` multiplies the whole square of scores, masked or not; a flash
    kernel declares the tiles it may visit, about half of it when causal, and all where documents are packed
    (`config.segments`), since then data says which; XLA's form of flash visits the whole square in tiles. Rows that a
    dropless exchange between devices pads are counted, since they are multiplied. A pipeline's stages run their layers
    again before they go backwards, from inputs they kept, which counts as recomputed; where they idle counts nothing.

    Args:
      config: the run's settings.
      devices: how many there are, for a mesh with a -1; else the mesh says.
      kind: a device kind ("TPU v5", "NVIDIA H200") whose kernels are counted; by default what XLA makes of them.

    Raises:
      LayoutError: naming a tensor that cannot be laid out.
    """
    layout = None if config.layout is None else config.layout.abstract(devices, kind=kind)
    if layout is not None and layout.stages > 1:
        mesh = ",".join(f"{a}={n}" for a, n in layout.sizes.items() if n > 1 and a != "pipeline") or "data=1"
        flat = dataclasses.replace(config, layout=dataclasses.replace(layout.specification, mesh=mesh, pipeline=None))
        rows = of_step(flat, kind=kind).rows
        again = [r for r in rows if r.stage == "forward" and r.module.startswith("runs/")]
        return Flops((*rows, *(dataclasses.replace(r, stage="recomputed") for r in again)))
    config = dataclasses.replace(config, layout=layout)
    return traced_step(config)


def traced_step(config: TrainConfig) -> Flops:
    """As `of_step`, as the step is traced under its own layout; of a pipeline, every phase at every tick."""
    layout = config.layout
    blueprint, schedule = blueprint_of(config)
    with layout if layout is not None else contextlib.nullcontext():
        step = step_of(blueprint, dataclasses.replace(config, guards=()), schedule)
        return count(step, blueprint.abstract_state(), abstract_batch(config), platform=_platform(layout))


def _platform(layout: Layout | None) -> str:
    with layout if layout is not None else contextlib.nullcontext():
        return device().platform


def flops_table(found: Flops, *, rows: int = 24) -> Any:
    """A rich table: a line per module, products by pass, the rest in one column."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    products = f"{found.matmul / max(1, found.total):.1%} of it products"
    most = "" if found.certain else "at most "
    title = f"FLOPs of a step, whole machine: {most}{short_flops(found.total)}, {products}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("module", *PASSES[:3], "elementwise", "share"):
        table.add_column(name, justify="left" if name == "module" else "right", no_wrap=name == "module")
    order = found.by_module
    for module in list(order)[:rows]:
        mine = [r for r in found.rows if r.module == module]
        passes = [sum(r.flops for r in mine if r.matmul and r.stage == s) for s in PASSES[:3]]
        passes[0] += sum(r.flops for r in mine if r.matmul and r.stage == "other")
        rest = sum(r.flops for r in mine if not r.matmul)
        share = f"{order[module] / max(1, found.total):.1%}"
        table.add_row(module, *(short_flops(n) if n else "-" for n in (*passes, rest)), share)
    if len(order) > rows:
        left = sum(list(order.values())[rows:])
        table.add_row(f"{len(order) - rows} more", "", "", "", short_flops(left), f"{left / max(1, found.total):.1%}")
    return table


def short_flops(n: float) -> str:
    """`n` operations with a prefix."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.3g} {letter}"
    return f"{n:.0f}"
