"""Walk a jaxpr and the jaxprs inside it, and count floating-point operations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxscale.plan.scopes import iterations_in, scopes_of, share_of_updates, stage_of

KERNELS = ("pallas_call", "mpmd_map")
"""Primitives of Pallas kernels; the second is that of Mosaic GPU."""
_ORDER = ("other", "forward", "backward", "recomputed")


@dataclasses.dataclass(frozen=True)
class FlopRow:
    """One kind of operation in one module, over a whole program.

    Args:
      module: the named scopes around it ("runs/0/blocks/0/attn/qkv"); "file:line" where there are none.
      what: the primitive, the name of a kernel, or "elementwise" for all but products, decompositions and kernels.
      flops: floating-point operations of all `calls`; a multiply-add is two.
      calls: how often it runs, all iterations of loops counted. For periodic work of an optimizer, `flops` and `bytes`
        are averages over updates, and `calls` is their average rounded up.
      bytes: bytes of its operands and results, each read or written once a call (of a kernel, as it declares).
      dtype: the widest floating-point dtype of its operands.
      stage: one of `PASSES`.
      matmul: True for a product, a decomposition or a kernel; False for elementwise operations and reductions.
      certain: False where the length of a loop or a branch depends on data (as many iterations as a named scope
        states, else one, and the longest branch count), and where a kernel declares no cost (it counts 0).
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


def operations(jaxpr: core.Jaxpr, platform: str) -> Iterator[FlopRow]:
    """Yield the operations of a jaxpr in the program's order, summed by module, operation, dtype and pass.

    Args:
      jaxpr: a `jax.core.Jaxpr`.
      platform: "tpu", "cuda" or "cpu", for functions with a branch for each.
    """
    walk = _Walk(platform)
    walk.jaxpr(jaxpr, _Place(), 1, True)
    for (module, what, dtype, stage, matmul, certain), (flops, calls, bytes_) in walk.counts.items():
        yield FlopRow(module, what, flops, calls, bytes_, dtype, stage, matmul, certain)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an equation is: the named scopes around it, and the pass of a step (one of `PASSES`)."""

    scopes: str = ""
    stage: str = "other"

    def at(self, eqn: core.JaxprEqn) -> _Place:
        """Return the place of an equation of a jaxpr that is here."""
        text = str(eqn.source_info.name_stack)
        scopes = "/".join(filter(None, [self.scopes, scopes_of(text)]))
        return _Place(scopes, max((self.stage, stage_of(text)), key=_ORDER.index))


class _Walk:
    """Counts operations by module and kind; methods add an equation's inner jaxprs, which run `times` a step.

    Args:
      platform: "tpu", "cuda" or "cpu".

    Attributes:
      counts: FLOPs, calls and bytes by (module, what, dtype, stage, matmul, certain), as in `FlopRow`.
    """

    def __init__(self, platform: str):
        self.platform = platform
        self.counts: dict[tuple[Any, ...], list[int]] = {}

    def jaxpr(self, jaxpr: core.Jaxpr, place: _Place, times: int, certain: bool) -> None:
        """Count a jaxpr that runs `times` a step; `certain` is whether that is exact."""
        for eqn in jaxpr.eqns:
            name, inner_place = eqn.primitive.name, place.at(eqn)
            if name in _INNER:
                _INNER[name](self, eqn, inner_place, times, certain)
            elif name in _PRODUCTS:
                self._add(eqn, inner_place, name, _PRODUCTS[name](eqn), times, True, certain)
            elif name not in _OF_ELEMENTS and (inner := list(_jaxprs(eqn.params))):
                for one in inner:
                    self.jaxpr(one, inner_place, times, certain)
            elif (flops := _elementwise(eqn)) > 0:
                self._add(eqn, inner_place, "elementwise", flops, times, False, certain)

    def _add(
        self,
        eqn: Any,
        place: _Place,
        what: str,
        flops: int,
        times: int,
        matmul: bool,
        certain: bool,
        bytes_: int = -1,
    ) -> None:
        if bytes_ < 0:
            bytes_ = sum(_nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        floats = [v.aval.dtype for v in eqn.invars if _is_float(v.aval)] or [np.dtype("float32")]
        dtype = max(floats, key=lambda d: d.itemsize).name
        key = place.scopes or _line(eqn), what, dtype, place.stage, matmul, certain
        one = self.counts.setdefault(key, [0, 0, 0])
        for i, n in enumerate((flops * times, times, bytes_ * times)):
            one[i] += n

    def scan(self, eqn: core.JaxprEqn, place: _Place, times: int, certain: bool) -> None:
        """Count all iterations of a scan."""
        self.jaxpr(eqn.params["jaxpr"].jaxpr, place, times * eqn.params["length"], certain)

    def loop(self, eqn: core.JaxprEqn, place: _Place, times: int, certain: bool) -> None:
        """Count a while loop's iterations if a named scope states about how many, else one; neither is certain."""
        about = iterations_in(str(eqn.source_info.name_stack).split("/")) or 1
        self.jaxpr(eqn.params["body_jaxpr"].jaxpr, place, times * about, False)

    def cond(self, eqn: core.JaxprEqn, place: _Place, times: int, certain: bool) -> None:
        """Count the branch of this platform, else the longest branch, or a periodic one by its share of updates."""
        branches = eqn.params["branches"]
        platforms = eqn.params.get("branches_platforms")
        if platforms is not None:
            own = [b for b, p in zip(branches, platforms, strict=True) if p is not None and self.platform in p]
            default = [b for b, p in zip(branches, platforms, strict=True) if p is None]
            self.jaxpr((own or default)[0].jaxpr, place, times, certain)
            return
        walks, shares = [_Walk(self.platform) for _ in branches], [share_of_updates(b.jaxpr) for b in branches]
        for walk, branch in zip(walks, branches, strict=True):
            walk.jaxpr(branch.jaxpr, place, times, certain)
        for walk, share in zip(walks, shares, strict=True):
            for counts in walk.counts.values():
                counts[:] = counts if share is None else [math.ceil(n * share) for n in counts]
        totals = [sum(n for n, *_ in w.counts.values()) for w in walks]
        most = totals.index(max(totals))
        known = min(totals) == max(totals) or shares[most] is not None
        for (*key, sure), counts in walks[most].counts.items():
            one = self.counts.setdefault((*key, sure and known), [0, 0, 0])
            for i, n in enumerate(counts):
                one[i] += n

    def shard_map(self, eqn: core.JaxprEqn, place: _Place, times: int, certain: bool) -> None:
        """Count the body on every device of its mesh axes."""
        mesh, manual = eqn.params["mesh"], manual_axes(eqn)
        self.jaxpr(plain_jaxpr(eqn.params["jaxpr"]), place, times * math.prod(mesh.shape[a] for a in manual), certain)

    def kernel(self, eqn: core.JaxprEqn, place: _Place, times: int, certain: bool) -> None:
        """Count a Pallas kernel by the cost that it declares."""
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
    **dict.fromkeys(KERNELS, _Walk.kernel),
}


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0].aval) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)


def _ragged(eqn: Any) -> int:
    """Count a product of every row with the matrix of its group; for a gradient by group, of every row with its own."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    groups = eqn.invars[2].aval.shape[-1] if set(numbers.lhs_ragged_dimensions) & set(contracted) else 1
    return 2 * _size(out) // groups * math.prod(lhs.shape[i] for i in contracted)


def _convolution(eqn: Any) -> int:
    kernel, at = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    return 2 * _size(eqn.outvars[0].aval) * math.prod(kernel) // kernel[at[0]]


def _eigh(eqn: Any) -> int:
    """Count 9 n^3 for all eigenvalues and vectors of symmetric n x n matrices (Golub & Van Loan 2013, section 8.3)."""
    *stack, n, _ = eqn.invars[0].aval.shape
    return 9 * math.prod(stack) * n**3


def _qr(eqn: Any) -> int:
    """Count Householder QR of m x n matrices with an explicit Q, 8/3 n^3 for m = n.

    Golub & Van Loan 2013, section 5.2; other shapes as LAPACK's geqrf and orgqr (Blackford & Dongarra 1999, LAPACK
    Working Note 41, appendix C).
    """
    *stack, m, n = eqn.invars[0].aval.shape
    k, columns = min(m, n), eqn.outvars[0].aval.shape[-1]
    factor = 2 * k**2 * (max(m, n) - k / 3)
    q = 4 * (m * columns * k - (m + columns) * k**2 / 2 + k**3 / 3)
    return round(math.prod(stack) * (factor + q))


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "eigh": _eigh,
    "qr": _qr,
    "dot_general": _dot,
    "ragged_dot_general": _ragged,
    "ragged_dot": _ragged,
    "conv_general_dilated": _convolution,
}


def product_flops(eqn: core.JaxprEqn) -> int:
    """Return the FLOPs of a matrix product, a decomposition, or a kernel as it declares; 0 for other equations."""
    if eqn.primitive.name in KERNELS:
        cost = eqn.params.get("cost_estimate")
        return 0 if cost is None else int(cost.flops)
    count = _PRODUCTS.get(eqn.primitive.name)
    return 0 if count is None else count(eqn)


_OF_ELEMENTS = ("reduce", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add",
           "scatter_mul", "scatter_min", "scatter_max", "reduce_window", "select_and_scatter", "custom_partitioning",
           "sort")  # fmt: skip
"""Primitives whose inner jaxpr is of single elements."""

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


def _elementwise(eqn: core.JaxprEqn) -> int:
    """Return one FLOP per output element, or per input element of a reduction; 0 for what moves or compares."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if name in _MOVES or out is None or not _is_float(out):
        return 0
    takes = [_size(v.aval) for v in eqn.invars if _is_float(v.aval)]
    if name.startswith(("reduce_", "scatter", "select_and_scatter")):
        return (takes[-1] if name.startswith("scatter") else takes[0]) if takes else 0
    return _size(out)


def _jaxprs(params: Mapping[str, Any] | Sequence[Any]) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs in an equation's parameters."""
    for value in params.values() if isinstance(params, dict) else params:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield plain_jaxpr(value)


def plain_jaxpr(jaxpr: Any) -> core.Jaxpr:
    """Return the jaxpr of a closed jaxpr; a plain one unchanged."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def manual_axes(eqn: core.JaxprEqn) -> Collection[str]:
    """Return the mesh axes that a `shard_map` makes manual, over which it splits its operands."""
    return eqn.params["newly_manual_axes"] if "newly_manual_axes" in eqn.params else eqn.params["manual_axes"]


def _is_float(aval: object) -> bool:
    return hasattr(aval, "dtype") and jax.numpy.issubdtype(aval.dtype, np.inexact)


def _size(aval: object) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _nbytes(aval: object) -> int:
    dtype = getattr(aval, "dtype", None)
    return _size(aval) * getattr(dtype, "itemsize", 0)


def _line(eqn: Any) -> str:
    """Return "file:line" of the innermost frame outside of installed packages; "" where there is none."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    mine = next((f for f in frames if "site-packages" not in f.file_name), None)
    return "" if mine is None else f"{Path(mine.file_name).name}:{mine.line_num}"
