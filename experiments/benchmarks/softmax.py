"""Softmax, forward and backward, compared with XLA, torch, JAX's Triton kernel, and the speed of a copy.

    python experiments/benchmarks/softmax.py                      on the present device; a few minutes on a GPU
    python experiments/benchmarks/softmax.py --json softmax.json  write every timing to a file
    python experiments/benchmarks/softmax.py --only 32768         only rows whose name contains a word

Rows differ in the number of columns and have the same number of bytes. A round calls a copy, ours and the others in
turns, so that a change of the clock frequency affects all of them; a call is several dispatches of arrays far larger
than the L2 cache, after a buffer larger than the cache has been written. A ratio is the median over rounds of theirs /
ours. On a CPU sizes are small, "ours" is `jax.nn.softmax` behind our interface, and no target applies.
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

from pallas_kernels.dispatch import chosen
from pallas_kernels.softmax import softmax

COLUMNS = (32768, 4096, 131072, 16384, 1024, 65536, 1048576, 110592, 50304, 262144)
"""Most informative first."""

COPY_SHARE = 0.92
"""Target share of the copy's bandwidth, where XLA reads a row only once too."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Sizes for a kind of device.

    Args:
      array_bytes: bytes of the input.
      calls: dispatches in a timing.
      columns: numbers of columns, one row of the table each.
    """

    array_bytes: int
    calls: int
    columns: tuple[int, ...] = COLUMNS


MACHINES = {"gpu": Machine(2**30, 4), "tpu": Machine(2**28, 4), "cpu": Machine(2**22, 1, (1024, 1048576))}


def target(columns: int) -> float:
    """Return the target speed relative to XLA, which reads a row once up to 16384 columns and three times beyond."""
    if columns <= 16384:
        return 1.0
    return 1.7 if columns <= 110592 else 1.25


def measure_row(
    machine: Machine, dtype: Any, rounds: int, cool: Callable[[], None], case: tuple[str, int]
) -> tuple[dict[str, Any], list[record.Line]]:
    """Measure one number of columns: seconds of each call, the implementation that ran, and the ratios.

    Args:
      machine: sizes.
      dtype: dtype of the array.
      rounds: timed calls of each.
      cool: removes our arrays from the L2 cache.
      case: "forward" or "backward", and the number of columns.
    """
    direction, columns = case
    rows = max(1, machine.array_bytes // (columns * jnp.dtype(dtype).itemsize))
    x, g = (jax.random.normal(jax.random.key(i), (rows, columns), dtype) for i in (0, 1))
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "ours": lambda: _call(softmax, x, g, direction),
        "xla": lambda: _call(jax.nn.softmax, x, g, direction),
        "torch": lambda: rivals.torch_softmax(x, g, direction),
        "triton": lambda: rivals.triton_softmax(x, direction),
    }
    calls, refused = rivals.agreeing(makers, 0.03)
    calls["copy"] = functools.partial(jax.jit(jnp.negative), x)
    timed = measure.interleaved({n: _timing(c, machine.calls, cool) for n, c in calls.items()}, rounds)
    # every timing includes the same cooling, so its time is subtracted
    cooling = statistics.median(measure.interleaved({"cool": cool}, rounds)["cool"].wall)
    seconds = {n: [max(1e-9, w - cooling) / machine.calls for w in t.wall] for n, t in timed.items()}
    touched = 2 if direction == "forward" else 3
    moved = {n: x.nbytes * (2 if n == "copy" else touched) for n in seconds}
    speed = {n: moved[n] / statistics.median(s) / 1e9 for n, s in seconds.items()}
    common: dict[str, Any] = dict(
        runs=_what_ran(columns, direction), unit="GB/s", ours=speed.pop("ours"), copy=speed.pop("copy"),
        others=speed, refused=refused,
    )  # fmt: skip
    lines = []
    least = [touched / 2 * c for c in seconds["copy"]]  # the necessary bytes at the copy's speed
    for against, theirs, aim in (
        ("xla", seconds.get("xla"), target(columns)),
        ("copy", least, COPY_SHARE if columns <= 16384 else None),
    ):
        ratio = None if theirs is None else dataclasses.asdict(measure.ratio(theirs, seconds["ours"]))
        verdict = record.judge(ratio, aim, None, jax.devices()[0].device_kind)
        lines.append(
            record.Line(_name(case), ratio=ratio, against=against, target=aim, verdict=verdict, **common)
        )  # fmt: skip
    return {"rows": rows, "columns": columns, "direction": direction, "timings": seconds}, lines


def _name(case: tuple[str, int]) -> str:
    return f"softmax {case[0]} {case[1]} columns"


def _call(f: Callable[..., Any], x: jax.Array, g: jax.Array, direction: str) -> Callable[[], Any]:
    """Return a call of the forward pass alone or the backward pass alone."""
    if direction == "forward":
        return functools.partial(jax.jit(f), x)
    pull = jax.jit(lambda x: jax.vjp(f, x)[1])(x)
    return functools.partial(jax.jit(lambda pull, g: pull(g)[0]), pull, g)


def _timing(call: Callable[[], Any], calls: int, cool: Callable[[], None]) -> Callable[[], None]:
    several = rivals.several(call, calls)

    def run() -> None:
        cool()
        several()

    return run


def _what_ran(columns: int, direction: str) -> str:
    op = "softmax" if direction == "forward" else "softmax_backward"
    kind = jax.devices()[0].device_kind
    records = [c for c in chosen(op) if c.kind == kind and dict(c.case)["columns"] == columns]
    return records[-1].implementation if records else "?"


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.options(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 (float32 on a CPU)")
    parser.add_argument("--columns", type=int, action="append", help="only this number of columns; may be repeated")
    args = parser.parse_args()
    device = jax.devices()[0]
    machine = MACHINES.get(device.platform, MACHINES["cpu"])
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    # four times the size of an H200's L2 cache
    buffer = jnp.zeros((2**28 if device.platform == "gpu" else 2**20) // 4, jnp.float32)
    wipe = jax.jit(lambda b: b + 1)
    cool = lambda: jax.block_until_ready(wipe(buffer))  # noqa: E731
    results = record.Results("softmax", device.device_kind, args, dtype=dtype.name)
    cases = itertools.product(("forward", "backward"), args.columns or machine.columns)
    run = functools.partial(measure_row, machine, dtype, args.rounds, cool)
    results.each(((_name(case), case) for case in sorted(cases, key=_order)), run)
    results.show()


def _order(case: tuple[str, int]) -> int:
    """Sort key: most informative columns first, both directions of each."""
    return COLUMNS.index(case[1]) if case[1] in COLUMNS else len(COLUMNS)


if __name__ == "__main__":
    main()
