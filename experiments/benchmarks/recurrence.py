"""Linear recurrences in chunks, forward and backward: against the same token by token, and flash-linear-attention.

    python experiments/benchmarks/recurrence.py                     on the present device
    python experiments/benchmarks/recurrence.py --only "Mamba-2"    only rows whose name contains a word

A round calls ours and the others in turns, so that other load slows all of them alike; a ratio is the median over
rounds of theirs / ours. "xla" is XLA's form of the chunks, "tokens" a scan of one token a step, "fla" the Triton
kernels of flash-linear-attention, where it and torch are installed. On a CPU sizes are small, dtype is float32, ours is
"xla", times are processor seconds, which other processes change less, and no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for torch

import jax
import jax.numpy as jnp
import measure
import record
import rivals

from pallas_kernels import chosen, forget
from pallas_kernels.chunked_recurrence import chunked_recurrence
from pallas_kernels.chunked_recurrence.examples import MIXERS, shapes
from pallas_kernels.chunked_recurrence.inputs import Inputs
from pallas_kernels.chunked_recurrence.reference import tokens

FLA = {
    "Gated DeltaNet": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "Kimi Delta Attention": ("kda", "chunk_kda"),
    "Mamba-2": ("simple_gla", "chunk_simple_gla"),
    "GLA": ("gla", "chunk_gla"),
}
"""A row's mixer, of `MIXERS` -> module of `fla.ops` and its function; most informative first."""
APART = {"forward": 0.03, "backward": 0.1}
"""Largest difference of two results; the gradient of a decay is a small difference of large sums."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
      mixer: a name of `MIXERS`.
      direction: "forward" or "backward".
      seq: tokens of the one batch row.
      heads: number of heads.
    """

    mixer: str
    direction: str
    seq: int
    heads: int

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.mixer} {self.direction} {self.seq}×{self.heads}"


def arrays_of(case: Case, dtype: Any) -> tuple[list[jax.Array], list[str]]:
    """Return random arrays of a recurrence without restarts, and their names in `Inputs`."""
    like = shapes(case.seq, case.heads, **MIXERS[case.mixer], dtype=str(dtype))._replace(starts=None)
    made: dict[str, jax.Array] = {}
    for i, (name, shape) in enumerate(like._asdict().items()):
        if shape is None:
            continue
        x = jax.random.normal(jax.random.key(i), shape.shape, jnp.float32)
        if name in ("q", "k"):
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        elif name != "v":
            x = jax.nn.sigmoid(x) if name == "beta" else -0.1 * jax.nn.softplus(x)
        made[name] = x.astype(shape.dtype)
    return list(made.values()), list(made)


def call(f: Callable[[Inputs], Any], case: Case, dtype: Any) -> rivals.Call:
    """Return a call of the forward or the backward pass of a function of `Inputs`, whose first result is the output."""
    arrays, names = arrays_of(case, dtype)
    nothing = Inputs(*(None,) * len(Inputs._fields))  # type: ignore[arg-type]
    run = lambda *x: f(nothing._replace(**dict(zip(names, x, strict=True))))[0]  # noqa: E731
    return rivals.of_jax(run, tuple(arrays), jnp.ones_like(arrays[2]), case.direction)


def measure_row(dtype: Any, rounds: int, calls: int, case: Case) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure a row: milliseconds of each, and how many times longer the others take."""
    forget()
    arrays, names = arrays_of(case, dtype)
    makers: dict[str, Callable[[], rivals.Call]] = {
        "ours": lambda: call(lambda x: chunked_recurrence(*x), case, dtype),
        "xla": lambda: call(lambda x: chunked_recurrence(*x, implementation="xla"), case, dtype),
        "tokens": lambda: call(tokens, case, dtype),
        "fla": lambda: rivals.flash_linear_attention(
            *FLA[case.mixer], dict(zip(names, arrays, strict=True)), jnp.ones_like(arrays[2]), case.direction
        ),
    }
    timed, refused = rivals.agreeing(makers, APART[case.direction])
    runs = chosen("chunked_recurrence")[0]
    several = {name: rivals.several(one, calls) for name, one in timed.items()}
    both = measure.interleaved(several, rounds)
    kind = jax.devices()[0].platform
    times = {name: [s / calls for s in (t.cpu if kind == "cpu" else t.wall)] for name, t in both.items()}
    speed = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    common: dict[str, Any] = dict(
        runs=runs.implementation, unit="ms", ours=speed.pop("ours"), others=speed, refused=refused
    )
    lines = []
    for against, target in (("tokens", None), ("fla", 1.0)):
        ratio = dataclasses.asdict(measure.ratio(times[against], times["ours"])) if against in times else None
        if ratio or target:
            verdict = record.judge(ratio, target, None, jax.devices()[0].device_kind)
            lines.append(
                record.Line(case.name, ratio=ratio, against=against, target=target, verdict=verdict, **common)
            )  # fmt: skip
    jax.clear_caches()
    wall = {name: t.wall for name, t in both.items()}
    return {**dataclasses.asdict(case), "why": [list(x) for x in runs.why_not], "timings": times, "wall": wall}, lines


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    args = parser.parse_args()
    device = jax.devices()[0]
    small = device.platform == "cpu"
    dtype = jnp.dtype(jnp.float32 if small else jnp.bfloat16)
    lengths, heads = ((2048,), 2) if small else ((16384, 65536), 16)
    every = itertools.product(lengths, FLA, ("forward", "backward"))
    cases = [Case(mixer, direction, seq, heads) for seq, mixer, direction in every]
    results = record.Results("recurrence", device.device_kind, args, dtype=dtype.name)
    run = functools.partial(measure_row, dtype, args.rounds, 1 if small else 4)
    results.each(((case.name, case) for case in cases), run)
    results.show()


if __name__ == "__main__":
    main()
