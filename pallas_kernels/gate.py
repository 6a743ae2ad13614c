"""`python -m pallas_kernels.gate`: compiles every shipped kernel configuration for hardware that is not here.

A GPU kernel fails when registers spill, when wgmma is serialised or when shared memory does not suffice; a TPU kernel
when Mosaic refuses it. Exit status 1 says that one did.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pallas_kernels.aot import SMALLEST, Report, compile_kernel, kernel_reports, why_no_gpu, why_no_tpu
from pallas_kernels.dispatch import KernelError

Configuration = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, a function of local arrays, and their `jax.ShapeDtypeStruct`s."""

TPUS = ("v5e", "v5p", "v6e", "tpu7x")
"""The TPU generations that every kernel compiles for."""


def operations() -> tuple[str, ...]:
    """The ops that have kernels: folders with a `gpu.py` or a `tpu.py`."""
    root = Path(__file__).parent
    return tuple(sorted({p.parent.name for name in ("gpu.py", "tpu.py") for p in root.glob(f"*/{name}")}))


def configurations(op: str, backend: str) -> Iterator[Configuration]:
    """What an op ships for a backend: `configurations(package)` of its `gpu.py` or `tpu.py`.

    Args:
      op: an op's folder.
      backend: "gpu" or "tpu".
    """
    package = importlib.import_module(f"pallas_kernels.{op}")
    yield from importlib.import_module(f"{package.__name__}.{backend}").configurations(package)


def gate_gpu(fn: Callable[..., Any], shapes: tuple[Any, ...], topology: str) -> tuple[list[Report], str | None]:
    """Reports of a function's kernels, and what is wrong with them or `None`."""
    try:
        reports = kernel_reports(fn, *shapes, topology=topology)
    except KernelError:
        raise
    except Exception as e:  # what the compiler refuses comes as many types
        return [], f"does not compile: {str(e).strip().splitlines()[0][:200]}"
    if not reports:
        return [], "no kernel was compiled: it holds none, or this process has compiled the very same one before"
    return reports, next((r.problem for r in reports if r.problem), None)


def gate_tpu(fn: Callable[..., Any], shapes: tuple[Any, ...], topology: str) -> str | None:
    """Why a function does not compile for a TPU generation, or `None`."""
    try:
        text = compile_kernel(fn, *shapes, topology=topology).as_text()
    except KernelError:
        raise
    except Exception as e:
        return f"does not compile: {str(e).strip().splitlines()[0][:200]}"
    return None if "tpu_custom_call" in text else "no kernel was compiled: the function holds none"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.gate", description=__doc__)
    parser.add_argument("op", nargs="*", help="ops to compile; all by default")
    parser.add_argument("--backend", choices=("gpu", "tpu"), default="gpu")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="how many processes compile (default %(default)s)")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    unknown = set(args.op) - set(operations())
    if unknown:
        parser.error(f"no kernels of '{min(unknown)}'; there are {', '.join(operations())}")
    if why := (why_no_gpu() if args.backend == "gpu" else why_no_tpu()):
        print(f"gate: {why}", file=sys.stderr)
        return 2
    ops = tuple(args.op or operations())
    # a spawned process has no part in this one's JAX
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(_gate, ops, args.backend, i, args.jobs) for i in range(args.jobs)]
        counts = [one.result() for one in started]
    passed, failed = (sum(column) for column in zip(*counts, strict=True))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def _gate(ops: tuple[str, ...], backend: str, first: int, stride: int) -> tuple[int, int]:
    """Compiles every `stride`-th configuration from the `first` on; how many passed and failed."""
    passed = failed = 0
    every = [(op, *configuration) for op in ops for configuration in configurations(op, backend)]
    for op, name, fn, shapes in every[first::stride]:
        for what, problem, seconds in _results(backend, fn, shapes):
            passed, failed = passed + (problem is None), failed + (problem is not None)
            # in one write, so that lines of several processes stay whole
            print(f"{op:10s} {name:44s} {what} {seconds:5.1f}s  {problem or 'ok'}\n", end="", flush=True)
    return passed, failed


def _results(
    backend: str, fn: Callable[..., Any], shapes: tuple[Any, ...]
) -> Iterator[tuple[str, str | None, float]]:  # fmt: skip
    for topology in ("h200",) if backend == "gpu" else TPUS:
        start = time.perf_counter()
        if backend == "gpu":
            reports, problem = gate_gpu(fn, shapes, topology)
            what = "; ".join(
                f"regs={r.registers} spill={r.spill_bytes} smem={r.shared_memory} ptx={r.instructions}" for r in reports
            )
        else:
            problem, what = gate_tpu(fn, shapes, topology), f"{topology:6s}"
        yield what, problem, time.perf_counter() - start


assert set(TPUS) <= set(SMALLEST)

if __name__ == "__main__":
    sys.exit(main())
