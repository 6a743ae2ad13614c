"""What a program computes: its floating-point operations by module, dtype and pass, counted from its jaxpr."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxscale.layout import Layout
from jaxscale.plan.compile import abstract_batch
from jaxscale.train import TrainConfig, blueprint_of, make_loss_and_grads, make_step
from pallas_kernels.dispatch import device

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PASSES = ("forward", "recomputed", "backward", "other")
"""Where in a step: the last is what is neither differentiated nor a derivative, such as the optimizer's update."""


@dataclasses.dataclass(frozen=True)
class FlopRow:
    """What one module does by one operation, over a whole program.

    Args:
      module: the named scopes it stands in ("runs/0/blocks/0/attn/qkv"), else "file:line".
      what: the primitive, a kernel's name, or "elementwise" for all that is no product.
      flops: floating-point operations of all `calls`; a multiply-add is two.
      calls: how often it runs, loops multiplied out.
      bytes: of all its operands and results, each read or written once a call (of a kernel, as it declares).
      dtype: the widest of its operands'.
      stage: one of `PASSES`.
      matmul: whether it is a product (or a kernel), or elementwise work and reductions.
      certain: False where a loop's length or a branch depends on data (the longest branch is counted, and such a
        loop once), or a kernel declares no cost (then 0).
    """

    module: str
    what: str
    flops: int
    calls: int
    bytes: int
    dtype: str = "float32"
    stage: str = "other"
    matmul: bool = True
    certain: bool = True


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
    walk = _Walk(platform or device().platform)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    walk.jaxpr(jaxpr, _Place(), 1, True)
    return Flops(tuple(walk.rows()))


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
        flat = dataclasses.replace(config, layout=dataclasses.replace(layout, mesh=mesh, pipeline=None))
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
        grads = make_loss_and_grads(blueprint, z_loss=config.z_loss, accumulate=config.accumulate, loss=config.loss)
        step = make_step(grads, blueprint.tx, schedule)
        return count(
            step,
            blueprint.abstract_state(),
            abstract_batch(config),
            *blueprint.abstract_frozen(),
            platform=_platform(layout),
        )


def _platform(layout: Layout | None) -> str:
    with layout if layout is not None else contextlib.nullcontext():
        return device().platform


@dataclasses.dataclass(frozen=True)
class _Place:
    """Named scopes around an equation, and what of a step it is."""

    scopes: str = ""
    stage: str = "other"

    def at(self, eqn: Any) -> _Place:
        """That of an equation here."""
        text = str(eqn.source_info.name_stack)
        scopes = "/".join(filter(None, [self.scopes, scopes_of(text)]))
        return _Place(scopes, max((self.stage, stage_of(text)), key=_ORDER.index))


def stage_of(name: str) -> str:
    """Which of `PASSES` an operation is of, by its name: what is made again within a derivative is that first."""
    marks = ((_AGAIN, "recomputed"), ("transpose(", "backward"), ("jvp(", "forward"))
    return next((stage for mark, stage in marks if mark in name), "other")


def scopes_of(name: str) -> str:
    """The named scopes in what JAX calls an operation, without transformations and control flow around them.

    `jnp.einsum` names its own after its formula, which is no module.
    """
    parts = _WRAPPED.sub("", re.sub(r"\bjit\([^()]*\)", "", name)).split("/")
    return "/".join(p for p in parts if p and "->" not in p and not _CONTROL.fullmatch(p))


_AGAIN = "rematted_computation"
_WRAPPED = re.compile(rf"\w+\(|\)|\b{_AGAIN}\b")  # scopes stand within "transpose(jvp(...))"
_CONTROL = re.compile(r"while|body|cond|closed_call|checkpoint|remat|shard_map|branch_\d+_fun|pjit|eval_jaxpr")
_ORDER = ("other", "forward", "backward", "recomputed")


class _Walk:
    """Counts, by module and operation, while it walks a jaxpr and those within."""

    def __init__(self, platform: str):
        self.platform = platform
        self.found: dict[tuple[Any, ...], list[int]] = {}

    def rows(self) -> Iterator[FlopRow]:
        """What was found, in the program's order."""
        for (module, what, dtype, stage, matmul, certain), (flops, calls, bytes_) in self.found.items():
            yield FlopRow(module, what, flops, calls, bytes_, dtype, stage, matmul, certain)

    def jaxpr(self, jaxpr: Any, place: _Place, times: int, certain: bool) -> None:
        """Adds a jaxpr that runs so often."""
        for eqn in jaxpr.eqns:
            name, here = eqn.primitive.name, place.at(eqn)
            if name in _INNER:
                _INNER[name](self, eqn, here, times, certain)
            elif name in _PRODUCTS:
                self._add(eqn, here, name, _PRODUCTS[name](eqn), times, True, certain)
            elif name not in _WITHIN and (inner := list(_jaxprs(eqn.params))):
                for one in inner:
                    self.jaxpr(one, here, times, certain)
            elif (flops := _elementwise(eqn)) > 0:
                self._add(eqn, here, "elementwise", flops, times, False, certain)

    def _add(
        self, eqn: Any, place: _Place, what: str, flops: int, times: int, matmul: bool, certain: bool, bytes_: int = -1
    ) -> None:
        if bytes_ < 0:
            bytes_ = sum(_nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        floats = [v.aval.dtype for v in eqn.invars if _is_float(v.aval)] or [np.dtype("float32")]
        dtype = max(floats, key=lambda d: d.itemsize).name
        key = place.scopes or _line(eqn), what, dtype, place.stage, matmul, certain
        one = self.found.setdefault(key, [0, 0, 0])
        for i, n in enumerate((flops * times, times, bytes_ * times)):
            one[i] += n

    def scan(self, eqn: Any, place: _Place, times: int, certain: bool) -> None:
        self.jaxpr(eqn.params["jaxpr"].jaxpr, place, times * eqn.params["length"], certain)

    def loop(self, eqn: Any, place: _Place, times: int, certain: bool) -> None:
        self.jaxpr(eqn.params["body_jaxpr"].jaxpr, place, times, False)

    def cond(self, eqn: Any, place: _Place, times: int, certain: bool) -> None:
        branches = eqn.params["branches"]
        platforms = eqn.params.get("branches_platforms")
        if platforms is not None:
            wanted = [b for b, p in zip(branches, platforms, strict=True) if p is not None and self.platform in p]
            default = [b for b, p in zip(branches, platforms, strict=True) if p is None]
            self.jaxpr((wanted or default)[0].jaxpr, place, times, certain)
            return
        walks = [_Walk(self.platform) for _ in branches]
        for walk, branch in zip(walks, branches, strict=True):
            walk.jaxpr(branch.jaxpr, place, times, certain)
        totals = [sum(n for n, *_ in w.found.values()) for w in walks]
        longest = walks[totals.index(max(totals))]
        for (*key, sure), counts in longest.found.items():
            one = self.found.setdefault((*key, sure and min(totals) == max(totals)), [0, 0, 0])
            for i, n in enumerate(counts):
                one[i] += n

    def shard_map(self, eqn: Any, place: _Place, times: int, certain: bool) -> None:
        mesh, manual = eqn.params["mesh"], _manual(eqn)
        self.jaxpr(_plain(eqn.params["jaxpr"]), place, times * math.prod(mesh.shape[a] for a in manual), certain)

    def kernel(self, eqn: Any, place: _Place, times: int, certain: bool) -> None:
        cost = eqn.params.get("cost_estimate")
        name = str(eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", "") or "kernel")
        if cost is None:
            self._add(eqn, place, name, 0, times, True, False)
        else:
            self._add(eqn, place, name, int(cost.flops), times, True, certain, int(cost.bytes_accessed))


_INNER: dict[str, Callable[[_Walk, Any, _Place, int, bool], None]] = {
    "scan": _Walk.scan,
    "while": _Walk.loop,
    "cond": _Walk.cond,
    "shard_map": _Walk.shard_map,
    "pallas_call": _Walk.kernel,
}


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0].aval) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)


def _ragged(eqn: Any) -> int:
    """Each row meets one group's matrix; of a gradient, whose groups are its first dimension, each row one of them."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    groups = eqn.invars[2].aval.shape[-1] if set(numbers.lhs_ragged_dimensions) & set(contracted) else 1
    return 2 * _size(out) // groups * math.prod(lhs.shape[i] for i in contracted)


def _convolution(eqn: Any) -> int:
    kernel, at = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    return 2 * _size(eqn.outvars[0].aval) * math.prod(kernel) // kernel[at[0]]


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged,
    "ragged_dot": _ragged,
    "conv_general_dilated": _convolution,
}

_WITHIN = ("reduce", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add",
           "scatter_mul", "scatter_min", "scatter_max", "reduce_window", "select_and_scatter", "custom_partitioning",
           "sort")  # fmt: skip
"""Their inner jaxprs say what is done to two elements."""

_MOVES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice gather concatenate
    pad rev split convert_element_type bitcast_convert_type reduce_precision copy copy_p select_n iota name get swap
    stop_gradient optimization_barrier device_put sharding_constraint mesh_cast reshard layout_constraint scatter sort
    top_k argmax argmin real imag all_gather all_to_all ragged_all_to_all ppermute pbroadcast pvary reduce_scatter psum
    psum2 psum_invariant all_gather_invariant pmax pmin axis_index random_bits random_wrap random_unwrap random_seed
    random_fold_in threefry2x32 create_token zeros_like empty
    """.split()
)
"""Primitives that compute nothing."""


def _elementwise(eqn: Any) -> int:
    """One for each element that is made, of a reduction for each it takes; 0 of what moves or compares."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if name in _MOVES or out is None or not _is_float(out):
        return 0
    takes = [_size(v.aval) for v in eqn.invars if _is_float(v.aval)]
    if name.startswith(("reduce_", "scatter", "select_and_scatter")):
        return (takes[-1] if name.startswith("scatter") else takes[0]) if takes else 0
    return _size(out)


def _jaxprs(params: Any) -> Iterator[Any]:
    for value in params.values() if isinstance(params, dict) else params:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield _plain(value)


def _plain(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _manual(eqn: Any) -> Any:
    """The mesh axes over which a `shard_map` cuts what was whole before."""
    return eqn.params["newly_manual_axes"] if "newly_manual_axes" in eqn.params else eqn.params["manual_axes"]


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jax.numpy.issubdtype(aval.dtype, np.inexact)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _nbytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return _size(aval) * getattr(dtype, "itemsize", 0)


def _line(eqn: Any) -> str:
    """Where it was written, "file:line"."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    mine = next((f for f in frames if "site-packages" not in f.file_name), None)
    return "" if mine is None else f"{Path(mine.file_name).name}:{mine.line_num}"


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
