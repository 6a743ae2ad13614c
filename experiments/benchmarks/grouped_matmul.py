"""Products of experts and their tokens: ours beside `lax.ragged_dot`, JAX's megablox and torch's grouped_mm.

    python experiments/benchmarks/grouped_matmul.py                    on the present device
    python experiments/benchmarks/grouped_matmul.py --only qwen3       only rows whose name contains a word

A round calls a product by every implementation in turns, and a matrix product of as many operations, so that other load
slows all of them alike. The rate counts the rows of groups and nothing that a tile adds; the target is 0.75 of the
matrix product's rate. Groups are even, or drawn so that a few have most rows. On a CPU sizes are small and ours is
"xla".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import record
import rivals

from pallas_kernels import chosen, forget
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_matmul.examples import MODELS, PRODUCTS

CALLS = 4
"""Calls in a timing."""
TARGET = 0.75
"""The least share of a matrix product's rate."""


def sizes_of(m: int, groups: int, skewed: bool) -> np.ndarray:
    """Return the rows of each group, int32.

    Args:
      m: rows of all groups.
      groups: number of groups.
      skewed: whether a few groups have most rows.
    """
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.full(groups, 0.3)) if skewed else np.full(groups, 1 / groups)
    return random.multinomial(m, shares).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
      name: name of the row.
      product: one of `PRODUCTS`.
      m: rows of all groups.
      groups: number of groups.
      k: inputs of the layer.
      n: outputs of the layer.
      skewed: whether a few groups have most rows.
    """

    name: str
    product: str
    m: int
    groups: int
    k: int
    n: int
    skewed: bool


def cases(small: bool) -> Iterator[Case]:
    """Yield every row, those with even groups first; small ones for a CPU."""
    for skewed, (name, (m, groups, k, n)) in itertools.product((False, True), MODELS.items()):
        sizes = (m // 128, groups, k // 16, n // 16) if small else (m, groups, k, n)
        for product in PRODUCTS:
            yield Case(f"{name} {product}{' skewed' if skewed else ''}", product, *sizes, skewed)


def ours(case: Case, implementation: str | None = None) -> Callable[..., Any]:
    """Return our op as a function of both operands and sizes."""
    if case.product == "kernel gradient":
        return jax.jit(functools.partial(grouped_outer, implementation=implementation))
    transposed = case.product == "input gradient"
    return jax.jit(functools.partial(grouped_matmul, transposed=transposed, implementation=implementation))


def megablox(case: Case, left: jax.Array, right: jax.Array, sizes: jax.Array) -> rivals.Call:
    """Return the same product by the kernels that come with JAX, in tiles of 512 x 1024 x 1024."""
    if jax.devices()[0].platform != "tpu":
        raise RuntimeError("megablox is for TPUs")
    gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    tile = (512, 1024, 1024)
    if case.product == "kernel gradient":
        f = lambda a, b, s: gmm.tgmm(a.T, b, s, a.dtype, tile)  # noqa: E731
    else:
        f = lambda a, b, s: gmm.gmm(a, b, s, a.dtype, tile, transpose_rhs=case.product == "input gradient")  # noqa: E731
    return functools.partial(jax.jit(f), left, right, sizes)


def torch_grouped(case: Case, left: jax.Array, right: jax.Array, sizes: jax.Array) -> rivals.Call:
    """Return the same product by torch's grouped_mm."""
    torch = rivals.torch_here()
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    a, b = rivals.tensor(left), rivals.tensor(right)
    ends = rivals.tensor(jnp.cumsum(sizes).astype(jnp.int32))
    if case.product == "kernel gradient":
        return lambda: grouped(a.t(), b, offs=ends)
    b = b.transpose(1, 2) if case.product == "input gradient" else b
    return lambda: grouped(a, b, offs=ends)


def measure_row(dtype: Any, rounds: int, device: str, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure a row: TFLOP/s of every implementation, and ours over the matrix product's."""
    keys = jax.random.split(jax.random.key(0))
    gradient = case.product == "kernel gradient"
    left = jax.random.normal(keys[0], (case.m, case.n if case.product == "input gradient" else case.k), dtype)
    shape = (case.m, case.n) if gradient else (case.groups, case.k, case.n)
    right = jax.random.normal(keys[1], shape, dtype)
    sizes = jnp.asarray(sizes_of(case.m, case.groups, case.skewed))
    forget()
    makers: dict[str, Callable[[], rivals.Call]] = {
        "ours": lambda: functools.partial(ours(case), left, right, sizes),
        "ragged_dot": lambda: functools.partial(ours(case, "xla"), left, right, sizes),
        "megablox": lambda: megablox(case, left, right, sizes),
        "torch": lambda: torch_grouped(case, left, right, sizes),
    }
    timed, refused = rivals.agreeing(makers, 0.02)
    runs = chosen("grouped_matmul")[0]
    x, w = jnp.ones((case.m, case.k), dtype), jnp.ones((case.k, case.n), dtype)
    timed["matmul"] = functools.partial(jax.jit(jnp.dot), x, w)
    several = {name: rivals.several(call, CALLS) for name, call in timed.items()}
    wall = {name: [t / CALLS for t in one.wall] for name, one in measure.interleaved(several, rounds).items()}
    flops = 2 * case.m * case.k * case.n
    rate = {name: flops / statistics.median(w) / 1e12 for name, w in wall.items()}
    share = dataclasses.asdict(measure.ratio(wall["matmul"], wall["ours"]))
    line = record.Line(
        case.name, runs=runs.implementation, unit="TFLOP/s", ours=rate.pop("ours"), matmul=rate.pop("matmul"),
        others=rate, refused=refused, ratio=share, against="matmul", target=TARGET,
        verdict=record.judge(share, TARGET, None, device),
    )  # fmt: skip
    jax.clear_caches()
    return {**dataclasses.asdict(case), "why": [list(x) for x in runs.why_not], "timings": wall}, [line]


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    args = parser.parse_args()
    device = jax.devices()[0]
    dtype = jnp.dtype(jnp.bfloat16)
    results = record.Results("grouped_matmul", device.device_kind, args, dtype=dtype.name)
    run = functools.partial(measure_row, dtype, args.rounds, device.device_kind)
    results.each(((case.name, case) for case in cases(device.platform == "cpu")), run)
    results.show()


if __name__ == "__main__":
    main()
