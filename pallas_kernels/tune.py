"""`python -m pallas_kernels.tune OP`: finds an op's tiles for a device and writes them into its `tiles.json`.

Every candidate passes the compile gate first; those that do are timed where the device is here, the fastest is
"measured". Where it is not, the first to pass, in the op's own order of preference, is "compiled".
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.aot import GPUS, SMALLEST, devices_of
from pallas_kernels.dispatch import KernelError
from pallas_kernels.gate import gate_gpu, gate_tpu, operations

ROUNDS = 30


def tune(
    op: str, topology: str, *, limit: int | None = None, say: Callable[[str], Any] = print
) -> list[dict[str, Any]]:
    """The best tile of every key of an op on a device.

    Args:
      op: a folder of `pallas_kernels` with a `tuning.py`: `keys(platform)`, `candidates(platform, key)`, best first,
        and `build(platform, key, tile)`, which gives a function and its `jax.ShapeDtypeStruct`s.
      topology: "h200", "v5e", ...: what to compile for.
      limit: candidates to try of each key.
      say: takes a line of progress.

    Returns:
      entries for `tiles.write`; a key none of whose candidates passes is left out, and said.

    Raises:
      KernelError: no compiler for the device is installed.
    """
    platform = "gpu" if topology in GPUS else "tpu"
    kind = devices_of(topology)[0].device_kind
    here = jax.devices()[0].device_kind == kind
    found, room = [], tuning(op)
    for key in room.keys(platform):
        passed: list[tuple[float, dict[str, Any]]] = []
        for tile in list(room.candidates(platform, key))[:limit]:
            fn, shapes = room.build(platform, key, tile)
            problem = gate_gpu(fn, shapes, topology)[1] if platform == "gpu" else gate_tpu(fn, shapes, topology)
            seconds = _seconds(fn, shapes) if here and problem is None else 0.0
            say(f"{op} {key} {tile}: {problem or (f'{seconds * 1e6:.1f} us' if here else 'compiles')}")
            if problem is None:
                passed.append((seconds, tile))
                if not here:
                    break  # nothing to compare: the op's first choice that compiles
        if not passed:
            say(f"{op} {key}: no candidate passes")
            continue
        how = f"measured {datetime.date.today()}, jax {jax.__version__}" if here else "compiled"
        best = min(passed, key=lambda p: p[0])[1] if here else passed[0][1]
        found.append({"device": kind, "key": key, "tile": best, "from": how})
    return found


def tuning(op: str) -> Any:
    """An op's `tuning.py`."""
    return importlib.import_module(f"pallas_kernels.{op}.tuning")


def _seconds(fn: Callable[..., Any], shapes: tuple[Any, ...]) -> float:
    """The median time of a call on random data, after a warm-up."""

    def fill(s: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        return jax.random.normal(jax.random.key(0), s.shape).astype(s.dtype)

    args = jax.tree.map(fill, shapes)
    jitted = jax.jit(fn)
    jax.block_until_ready(jitted(*args))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(jitted(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("op", choices=operations())
    parser.add_argument("--device", default="h200", choices=sorted({*GPUS, *SMALLEST}))
    parser.add_argument("--limit", type=int, help="candidates to try of each key")
    parser.add_argument("--write", action="store_true", help="into the op's tiles.json")
    args = parser.parse_args(argv)
    try:
        found = tune(args.op, args.device, limit=args.limit)
    except KernelError as e:
        print(f"tune: {e}", file=sys.stderr)
        return 2
    if args.write:
        print(f"{len(found)} entries into {tiles.write(args.op, found)}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
