"""Count floating-point operations of a program by module, dtype and pass, from its jaxpr."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from jaxscale.layout import Layout
from jaxscale.layout.tensors import Tree
from jaxscale.plan.compile import abstract_batch
from jaxscale.plan.flop_walk import FlopRow, operations
from jaxscale.plan.scopes import PASSES
from jaxscale.step import TrainConfig, blueprint_of, step_of
from pallas_kernels.dispatch import device

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of a program, over all devices; prints as a table.

    Args:
      rows: operations by module, primitive, dtype and pass.
    """

    rows: tuple[FlopRow, ...]

    @property
    def total(self) -> int:
        """All floating-point operations."""
        return sum(r.flops for r in self.rows)

    @property
    def matmul(self) -> int:
        """FLOPs of matrix products, decompositions and kernels."""
        return sum(r.flops for r in self.rows if r.matmul)

    @property
    def elementwise(self) -> int:
        """All other FLOPs: one for each element of an operation's output, or of a reduction's input."""
        return self.total - self.matmul

    @property
    def certain(self) -> bool:
        """Whether no count depends on data."""
        return all(r.certain for r in self.rows)

    def by(self, field: str, *, matmul: bool | None = None) -> dict[str, int]:
        """Return FLOPs by the values of a field, most first.

        Args:
          field: "module", "dtype", "stage" or "what" (see `FlopRow`).
          matmul: whether to count products only (`True`) or all other operations only (`False`); all by default.
        """
        total: dict[str, int] = defaultdict(int)
        for r in self.rows:
            if matmul in (None, r.matmul):
                total[getattr(r, field)] += r.flops
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @property
    def by_module(self) -> dict[str, int]:
        """FLOPs by module, most first."""
        return self.by("module")

    def to_json(self) -> dict[str, Any]:
        """Return totals, breakdowns and rows as plain values."""
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


def count(fn: Callable[..., Any], *args: Tree, platform: str | None = None) -> Flops:
    """Count a function's operations from shapes; nothing is computed.

    Args:
      fn: a function of trees of arrays.
      *args: trees of arrays or `jax.ShapeDtypeStruct`.
      platform: as for `of_jaxpr`.
    """
    return of_jaxpr(jax.make_jaxpr(fn)(*args), platform=platform)


def of_jaxpr(closed: core.ClosedJaxpr, *, platform: str | None = None) -> Flops:
    """Count a jaxpr's operations.

    All iterations of scans are counted, and all devices of a `shard_map`; of several branches the longest counts, and
    a Pallas kernel counts as it declares. Operations that move or compare (gathers, casts, collectives) count nothing.
    Neither do operations that no result depends on, which compilers remove, such as gradients of frozen weights
    (except for kernels, which JAX 0.10 keeps).

    Args:
      closed: a `jax.core.ClosedJaxpr`.
      platform: "tpu", "cuda" or "cpu", for functions with a branch for each; by default that of the device in scope.
    """
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return Flops(tuple(operations(jaxpr, platform or device().platform)))


def of_step(config: TrainConfig, devices: int | None = None, *, kind: str | None = None) -> Flops:
    """Count the operations of a run's training step over all devices, without devices or a compiler.

    Attention counts as it is computed. `dot_product_attention` computes all scores, masked or not. A flash kernel
    declares the tiles that it may visit: about half of them with a causal mask, of packed documents as of one (data
    decides how many less), and all of them where columns are in another order. The XLA implementation of flash
    attention visits all tiles. Padding rows of a dropless all-to-all between experts count, since they are multiplied.
    Layers of a pipeline stage run again before its backward pass, from saved inputs, which counts as recomputed;
    bubbles count nothing.

    Args:
      config: the run's settings.
      devices: number of devices, for a mesh with a size of -1.
      kind: the device kind ("TPU v5", "NVIDIA H200") whose kernels are counted; by default XLA's implementations.

    Raises:
      LayoutError: a tensor cannot be laid out.
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
    """Count the operations of a step traced under its own layout; of a pipeline, every phase at every tick.

    Args:
      config: the run's settings; a mesh of any number of devices, without a size of -1.
    """
    layout = config.layout
    blueprint, schedule = blueprint_of(config)
    with layout if layout is not None else contextlib.nullcontext():
        step = step_of(blueprint, dataclasses.replace(config, guards=()), schedule)
        return count(step, blueprint.abstract_state(), abstract_batch(config), platform=_platform(layout))


def _platform(layout: Layout | None) -> str:
    with layout if layout is not None else contextlib.nullcontext():
        return device().platform


def flops_table(flops: Flops, *, rows: int = 24) -> Table:
    """Return a rich table with a line per module: products by pass, and elementwise operations.

    Args:
      flops: counted operations.
      rows: number of modules that are listed; the others are summed in one line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    products = f"{flops.matmul / max(1, flops.total):.1%} of it products"
    most = "" if flops.certain else "at most "
    title = f"FLOPs of a step, whole machine: {most}{short_flops(flops.total)}, {products}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("module", *PASSES[:3], "elementwise", "share"):
        table.add_column(name, justify="left" if name == "module" else "right", no_wrap=name == "module")
    order = flops.by_module
    for module in list(order)[:rows]:
        mine = [r for r in flops.rows if r.module == module]
        passes = [sum(r.flops for r in mine if r.matmul and r.stage == s) for s in PASSES[:3]]
        passes[0] += sum(r.flops for r in mine if r.matmul and r.stage == "other")
        rest = sum(r.flops for r in mine if not r.matmul)
        share = f"{order[module] / max(1, flops.total):.1%}"
        table.add_row(module, *(short_flops(n) if n else "-" for n in (*passes, rest)), share)
    if len(order) > rows:
        rest = sum(list(order.values())[rows:])
        table.add_row(f"{len(order) - rows} more", "", "", "", short_flops(rest), f"{rest / max(1, flops.total):.1%}")
    return table


def short_flops(n: float) -> str:
    """Return a number of operations with an SI prefix, as "1.2 T"."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.3g} {letter}"
    return f"{n:.0f}"
