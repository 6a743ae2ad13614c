"""Products of a few rows with a matrix stored in few bits: how much faster than with the same matrix in bfloat16.

    python experiments/benchmarks/stored_matmul.py                     on the present device
    python experiments/benchmarks/stored_matmul.py --only "int4"       only rows whose name contains a word

One program multiplies `MATRICES` different pairs, so that neither the launch of a program (50 us, where a product takes
10 to 40) nor a matrix that stays in the cache decides. A round calls the dense products, ours and XLA's of the same
codes in turns, so that other load slows all of them alike; the ratio is the median over rounds of the dense products'
time over ours. MARLIN (Frantar et al. 2024)
reports about 4 for 4 bits and up to 32 rows on its GPUs. On a CPU sizes are small and ours is "xla".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import record
import rivals

from pallas_kernels import chosen, forget
from pallas_kernels.stored_matmul import Packed, stored_matmul
from pallas_kernels.stored_matmul.examples import FORMATS, shapes
from pallas_kernels.stored_matmul.reference import dense

MATRICES = 8
"""Products in a program, each with a matrix and rows of its own."""
CALLS = 4
"""Calls of a program in a timing."""
NAMES = ("int4, groups of 128", "int8", "nf4", "mxfp4", "int3, groups of 64")


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
      name: name of the row.
      format: a name of `FORMATS`.
      m, k, n: rows of the activations, and the matrix.
    """

    name: str
    format: str
    m: int
    k: int
    n: int


def cases(small: bool) -> Iterator[Case]:
    """Yield every row; small ones for a CPU."""
    k, n = (512, 256) if small else (4096, 14336)
    for format in NAMES:
        for m in (1, 16, 128):
            yield Case(f"{format} × {m} rows", format, m, k, n)


def weight(case: Case, seed: int) -> Packed:
    """Return a matrix of random codes; scales are near 1."""
    key = jax.random.key(seed)

    def draw(like: Any) -> jax.Array:
        if jnp.issubdtype(like.dtype, jnp.integer):
            codes = jax.random.bits(key, like.shape, jnp.uint8).astype(like.dtype)
            return codes if like.shape[0] > case.k // 32 else codes % 8 + 120  # scales of mxfp4 are powers of two
        return jax.random.uniform(key, like.shape, jnp.float32, 0.5, 1.5).astype(like.dtype)

    return jax.tree.map(draw, shapes(case.k, case.n, **FORMATS[case.format]))


def measure_row(dtype: Any, rounds: int, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure a row: milliseconds, the dense product's time over ours, and the implementation that ran."""
    stored = [weight(case, seed) for seed in range(MATRICES)]
    whole = [jax.jit(lambda w: dense(w).astype(dtype))(w) for w in stored]
    x = [jax.random.normal(jax.random.key(MATRICES + i), (case.m, case.k), dtype) for i in range(MATRICES)]
    forget()

    def products(multiply: Callable[..., jax.Array], matrices: list[Any]) -> rivals.Call:
        program = jax.jit(lambda x, w: [multiply(*pair) for pair in zip(x, w, strict=True)])
        return functools.partial(program, x, matrices)

    makers: dict[str, Callable[[], rivals.Call]] = {
        "ours": lambda: products(stored_matmul, stored),
        "dense": lambda: products(jnp.dot, whole),
        "xla": lambda: products(functools.partial(stored_matmul, implementation="xla"), stored),
    }
    timed, refused = rivals.agreeing(makers, 0.03)
    runs = chosen("stored_matmul")[0]
    several = {name: rivals.several(call, CALLS) for name, call in timed.items()}
    wall = {name: [w / (CALLS * MATRICES) for w in t.wall] for name, t in measure.interleaved(several, rounds).items()}
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
    small = device.platform == "cpu"
    dtype = jnp.dtype(jnp.bfloat16)
    results = record.Results("stored_matmul", device.device_kind, args, dtype=dtype.name)
    run = functools.partial(measure_row, dtype, args.rounds)
    results.each(((case.name, case) for case in cases(small)), run)
    results.show()


if __name__ == "__main__":
    main()
