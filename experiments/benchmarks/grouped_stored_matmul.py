"""Products of experts' matrices in few bits and their tokens: how much faster than with the matrices in bfloat16.

    python experiments/benchmarks/grouped_stored_matmul.py                     on the present device
    python experiments/benchmarks/grouped_stored_matmul.py --only mxfp4        only rows whose name contains a word

A round calls our product, XLA's of the same codes, ours of the matrices in bfloat16 (`grouped_matmul`) and XLA's of
those (`lax.ragged_dot`) in turns, so that other load slows all of them alike; the ratio is the median over rounds of
`grouped_matmul`'s time over ours. Groups are even, or drawn so that a few have most rows. On a CPU sizes are small and
ours is "xla".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import record
import rivals
from grouped_matmul import sizes_of

from pallas_kernels import chosen, forget
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_stored_matmul import grouped_stored_matmul
from pallas_kernels.grouped_stored_matmul.examples import MODELS, STORED, weight_of
from pallas_kernels.stored_matmul import Packed
from pallas_kernels.stored_matmul.reference import dense

CALLS = 4
"""Calls in a timing."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
      name: name of the row.
      format: a name of `STORED`.
      m: rows of all groups.
      groups: number of groups.
      k: inputs of the layer.
      n: outputs of the layer.
      skewed: whether a few groups have most rows.
    """

    name: str
    format: str
    m: int
    groups: int
    k: int
    n: int
    skewed: bool


def cases(small: bool) -> Iterator[Case]:
    """Yield every row, those with even groups first; small ones for a CPU."""
    for skewed, (name, (m, groups, k, n)), form in itertools.product((False, True), MODELS.items(), STORED):
        sizes = (m // 16, groups // 4, 256, 128) if small else (m, groups, k, n)
        yield Case(f"{name} {form}{' skewed' if skewed else ''}", form, *sizes, skewed)


def weight(case: Case) -> Packed:
    """Return matrices of random codes; scales are near 1."""
    like = weight_of(case.groups, case.k, case.n, case.format)
    leaves, tree = jax.tree.flatten(like)

    def draw(key: jax.Array, leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.uniform(key, leaf.shape, jnp.float32, 0.5, 1.5).astype(leaf.dtype)
        codes = jax.random.bits(key, leaf.shape, jnp.uint8).astype(leaf.dtype)
        return codes % 8 + 120 if leaf is like.scale else codes  # scales of mxfp4 are powers of two

    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [draw(*pair) for pair in zip(keys, leaves, strict=True)])


def measure_row(dtype: Any, rounds: int, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure a row: milliseconds, `grouped_matmul`'s time over ours, and the implementation that ran."""
    stored, sizes = weight(case), jnp.asarray(sizes_of(case.m, case.groups, case.skewed))
    whole = jax.jit(lambda w: jax.lax.map(lambda one: dense(one).astype(dtype), w))(stored)
    rows = jax.random.normal(jax.random.key(1), (case.m, case.k), dtype)
    forget()

    def product(op: Callable[..., jax.Array], matrices: Any, implementation: str | None = None) -> rivals.Call:
        return functools.partial(jax.jit(functools.partial(op, implementation=implementation)), rows, matrices, sizes)

    makers: dict[str, Callable[[], rivals.Call]] = {
        "ours": lambda: product(grouped_stored_matmul, stored),
        "xla": lambda: product(grouped_stored_matmul, stored, "xla"),
        "dense": lambda: product(grouped_matmul, whole),
        "ragged_dot": lambda: product(grouped_matmul, whole, "xla"),
    }
    timed, refused = rivals.agreeing(makers, 0.03)
    runs = chosen("grouped_stored_matmul")[0]
    several = {name: rivals.several(call, CALLS) for name, call in timed.items()}
    wall = {name: [t / CALLS for t in one.wall] for name, one in measure.interleaved(several, rounds).items()}
    speed = {name: statistics.median(w) * 1e3 for name, w in wall.items()}
    share = dataclasses.asdict(measure.ratio(wall["dense"], wall["ours"]))
    line = record.Line(
        case.name, runs=runs.implementation, unit="ms", ours=speed.pop("ours"), others=speed, refused=refused,
        ratio=share, against="dense",
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
    results = record.Results("grouped_stored_matmul", device.device_kind, args, dtype=dtype.name)
    run = functools.partial(measure_row, dtype, args.rounds)
    results.each(((case.name, case) for case in cases(device.platform == "cpu")), run)
    results.show()


if __name__ == "__main__":
    main()
