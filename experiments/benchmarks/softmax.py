"""Softmax, forward and backward, against `jax.nn.softmax` compiled by XLA, and against the speed of a copy.

    python experiments/benchmarks/softmax.py                      on the device there is; on a GPU a few minutes
    python experiments/benchmarks/softmax.py --json softmax.json  and every timing into a file

Rows differ in their columns and hold the same number of bytes. A round calls a copy, ours and theirs in turns, so that
a clock that drops drops for all of them; a call is several dispatches of arrays far larger than the L2 cache, after a
buffer that is larger than it has been written. A ratio is the median over rounds of theirs / ours. On a CPU sizes are
small, "ours" is `jax.nn.softmax` behind our interface, and no target applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

from pallas_kernels.dispatch import chosen
from pallas_kernels.softmax import softmax

COLUMNS = (1024, 4096, 16384, 32768, 50304, 65536, 110592, 131072, 262144, 1048576)
COPY_SHARE = 0.92
"""Of the copy's bandwidth, wanted where XLA reads a row once too."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is measured where.

    Args:
      array_bytes: of the input.
      calls: dispatches in a timing.
      rounds: timings of each.
      columns: of the rows.
    """

    array_bytes: int
    calls: int
    rounds: int
    columns: tuple[int, ...] = COLUMNS


MACHINES = {"gpu": Machine(2**30, 4, 30), "tpu": Machine(2**28, 4, 30), "cpu": Machine(2**22, 1, 30, (1024, 1048576))}


def target(columns: int) -> float:
    """How many times as fast as XLA: it reads a row once up to 16384 columns and three times beyond."""
    if columns <= 16384:
        return 1.0
    return 1.7 if columns <= 110592 else 1.25


def measure_row(machine: Machine, columns: int, dtype: Any, direction: str, cool: Callable[[], None]) -> dict[str, Any]:
    """Seconds of each, what ran, and the ratios, of one number of columns.

    Args:
      machine: sizes.
      columns, dtype: of the array.
      direction: "forward" or "backward".
      cool: leaves nothing of ours in the L2 cache.
    """
    rows = max(1, machine.array_bytes // (columns * jnp.dtype(dtype).itemsize))
    x, g = (jax.random.normal(jax.random.key(i), (rows, columns), dtype) for i in (0, 1))
    ours, ours_out = _call(softmax, x, g, direction)
    theirs, theirs_out = _call(jax.nn.softmax, x, g, direction)
    apart = float(jnp.max(jnp.abs(ours_out.astype(jnp.float32) - theirs_out.astype(jnp.float32))))
    if not apart < 0.1:
        raise SystemExit(f"{rows} x {columns} {direction}: ours and jax.nn.softmax's are {apart} apart")
    del ours_out, theirs_out
    copy = functools.partial(jax.jit(jnp.negative), x)
    calls = {"copy": copy, "ours": ours, "theirs": theirs}
    timed = measure.interleaved({n: _timing(c, machine.calls, cool) for n, c in calls.items()}, machine.rounds)
    # the same cooling precedes each, so it cancels only when it is taken off
    cooling = statistics.median(measure.interleaved({"cool": cool}, machine.rounds)["cool"].wall)
    seconds = {n: [max(1e-9, w - cooling) / machine.calls for w in t.wall] for n, t in timed.items()}
    touched = 2 if direction == "forward" else 3
    least = [touched / 2 * c for c in seconds["copy"]]  # moving what has to be moved, at the copy's speed
    ratio = measure.ratio(seconds["theirs"], seconds["ours"])
    share = measure.ratio(least, seconds["ours"])
    return {
        "columns": columns,
        "rows": rows,
        "dtype": jnp.dtype(dtype).name,
        "direction": direction,
        "implementation": _what_ran(columns, direction),
        "copy_gb_per_second": 2 * x.nbytes / statistics.median(seconds["copy"]) / 1e9,
        "seconds": {n: statistics.median(s) for n, s in seconds.items()},
        "ratio": dataclasses.asdict(ratio),
        "share_of_copy": dataclasses.asdict(share),
        "apart": apart,
        "target": target(columns),
        "timings": seconds,
    }


def _call(f: Callable[..., Any], x: jax.Array, g: jax.Array, direction: str) -> tuple[Callable[[], Any], jax.Array]:
    """A call of the forward or of the backward pass alone, compiled, and its result."""
    if direction == "forward":
        call = functools.partial(jax.jit(f), x)
    else:
        pull = jax.jit(lambda x: jax.vjp(f, x)[1])(x)
        call = functools.partial(jax.jit(lambda pull, g: pull(g)[0]), pull, g)
    return call, call()


def _timing(call: Callable[[], Any], calls: int, cool: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        cool()
        out = None
        for _ in range(calls):
            out = call()  # the one before may go while this one is on its way
        jax.block_until_ready(out)

    return run


def _what_ran(columns: int, direction: str) -> str:
    op = "softmax" if direction == "forward" else "softmax_backward"
    kind = jax.devices()[0].device_kind
    found = [c for c in chosen(op) if c.kind == kind and dict(c.case)["columns"] == columns]
    return found[-1].implementation if found else "?"


def verdict(row: dict[str, Any]) -> str:
    """Whether a row meets its target: "met", "missed"."""
    good = row["ratio"]["median"] >= row["target"]
    if row["columns"] <= 16384:
        good = good and row["share_of_copy"]["median"] >= COPY_SHARE
    return "met" if good else "missed"


HEADER = ("direction", "columns", "rows", "runs", "copy GB/s", "ours µs", "XLA µs", "of copy", "ratio", "target", "")


def line(row: dict[str, Any], judged: bool) -> tuple[str, ...]:
    """A row of the table."""
    spread = f"{row['ratio']['median']:.2f} ({row['ratio']['low']:.2f}–{row['ratio']['high']:.2f})"
    aim = f"≥ {row['target']}" + (f", ≥ {COPY_SHARE} of copy" if row["columns"] <= 16384 else "")
    return (
        row["direction"],
        f"{row['columns']:,}",
        f"{row['rows']:,}",
        row["implementation"],
        f"{row['copy_gb_per_second']:,.0f}",
        f"{row['seconds']['ours'] * 1e6:,.0f}",
        f"{row['seconds']['theirs'] * 1e6:,.0f}",
        f"{row['share_of_copy']['median']:.2f}",
        spread,
        aim if judged else "none",
        verdict(row) if judged else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every timing there")
    parser.add_argument("--dtype", default=None, help="bfloat16 (float32 on a CPU)")
    parser.add_argument("--columns", type=int, action="append", help="these alone")
    parser.add_argument("--rounds", type=int, help="timings of each (default 30)")
    args = parser.parse_args()
    device = jax.devices()[0]
    machine = MACHINES.get(device.platform, MACHINES["cpu"])
    machine = dataclasses.replace(
        machine, rounds=args.rounds or machine.rounds, columns=args.columns or machine.columns
    )
    dtype = jnp.dtype(args.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    judged = device.platform == "gpu" and "H200" in device.device_kind
    if not judged:
        print(f"on {device.device_kind}: sizes are {'small, ' if device.platform == 'cpu' else ''}no target applies")
    # four times an H200's L2; written, not read, so that no line of it is wanted again
    buffer = jnp.zeros((2**28 if device.platform == "gpu" else 2**20) // 4, jnp.float32)
    wipe = jax.jit(lambda b: b + 1)
    cool = lambda: jax.block_until_ready(wipe(buffer))  # noqa: E731
    rows = []
    for direction in ("forward", "backward"):
        for columns in machine.columns:
            rows.append(measure_row(machine, columns, dtype, direction, cool))
            print("  ".join(line(rows[-1], judged)), flush=True)
    result = {**measure.facts(device.device_kind), "judged": judged, "rows": rows}
    show(result, judged)
    if args.json:
        args.json.write_text(json.dumps(measure._rounded(result), indent=2) + "\n")


def show(result: dict[str, Any], judged: bool) -> None:
    """The table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    mean = np.exp(np.mean([np.log(r["ratio"]["median"]) for r in result["rows"]]))
    title = f"softmax {result['rows'][0]['dtype']} on {result['device']} · geometric mean ratio {mean:.2f}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("direction", "runs") else "right")
    for row in result["rows"]:
        table.add_row(*line(row, judged))
    console = Console(highlight=False)
    Console(highlight=False, width=None if console.is_terminal else 140).print(table)


if __name__ == "__main__":
    main()
