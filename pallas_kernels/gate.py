"""`python -m pallas_kernels.gate`: compile every shipped kernel configuration for hardware that is not present.

A GPU kernel fails when registers spill, when wgmma is serialised or when shared memory does not suffice; a TPU kernel
fails when Mosaic refuses it. The exit status is 1 when a kernel failed.
"""

from __future__ import annotations

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
from pallas_kernels.command_line import Parser
from pallas_kernels.dispatch import KernelError
from pallas_kernels.errors import did_you_mean

Configuration = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, a function of local arrays, and their `jax.ShapeDtypeStruct`s."""

TPUS = ("v5e", "v5p", "v6e", "tpu7x")
"""The TPU generations that every kernel compiles for."""

GPUS = ("h200", "b200")
"""One GPU of each architecture that has kernels."""


def operations(*backends: str) -> tuple[str, ...]:
    """Return the ops that have kernels: folders with a `gpu.py` or a `tpu.py`.

    Args:
      backends: "gpu" or "tpu": only ops with a kernel for one of these; all by default.
    """
    root = Path(__file__).parent
    return tuple(sorted({p.parent.name for name in backends or ("gpu", "tpu") for p in root.glob(f"*/{name}.py")}))


def configurations(op: str, backend: str) -> Iterator[Configuration]:
    """Yield an op's configurations for a backend: `configurations(package)` of its `gpu.py` or `tpu.py`.

    Args:
      op: an op's folder.
      backend: "gpu" or "tpu".
    """
    package = importlib.import_module(f"pallas_kernels.{op}")
    yield from importlib.import_module(f"{package.__name__}.{backend}").configurations(package)


def gpus(op: str) -> tuple[str, ...]:
    """Return the GPUs that an op's kernels are compiled for: `GATED` of its `gpu.py`, or Hopper alone.

    Args:
      op: an op's folder.
    """
    return getattr(importlib.import_module(f"pallas_kernels.{op}.gpu"), "GATED", GPUS[:1])


def gate_gpu(fn: Callable[..., Any], shapes: tuple[Any, ...], topology: str) -> tuple[list[Report], str | None]:
    """Return the reports on a function's kernels, and what is wrong with them or `None`.

    Args:
      fn: the function that one device runs.
      shapes: `jax.ShapeDtypeStruct`s of its arguments.
      topology: a GPU, as for `pallas_kernels.aot.devices_of`.
    """
    try:
        reports = kernel_reports(fn, *shapes, topology=topology)
    except KernelError:
        raise
    except Exception as e:  # the compiler raises many types
        return [], f"does not compile: {str(e).strip().splitlines()[0][:200]}"
    if not reports:
        return [], "no kernel was compiled: the function has none, or it was compiled before without a report"
    return reports, next((r.problem for r in reports if r.problem), None)


def gate_tpu(fn: Callable[..., Any], shapes: tuple[Any, ...], topology: str) -> str | None:
    """Return why a function does not compile for a TPU generation, or `None`.

    Args:
      fn: the function that one device runs.
      shapes: `jax.ShapeDtypeStruct`s of its arguments.
      topology: a TPU, as for `pallas_kernels.aot.devices_of`.
    """
    try:
        text = compile_kernel(fn, *shapes, topology=topology).as_text() or ""
    except KernelError:
        raise
    except Exception as e:
        return f"does not compile: {str(e).strip().splitlines()[0][:200]}"
    return None if "tpu_custom_call" in text else "no kernel was compiled: the function has none"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
      argv: arguments; those of the process by default.
    """
    parser = Parser(prog="python -m pallas_kernels.gate", description=__doc__)
    parser.add_argument("op", nargs="*", help="ops to compile; all by default")
    parser.add_argument("--backend", choices=("gpu", "tpu"), default="gpu", help="default %(default)s")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="number of processes that compile (default %(default)s)")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="compile the Kth of N parts (default: all)")
    args = parser.parse_args(argv)
    part, _, parts = args.share.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        parser.error(f"--share {args.share}: it is K/N with 1 <= K <= N, such as 2/3")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    here = operations(args.backend)
    if unknown := set(args.op) - set(here):
        kernels, hint = f"kernels for a {args.backend.upper()}", did_you_mean(min(unknown), here)
        parser.error(f"'{min(unknown)}' has no {kernels}; these ops do: {', '.join(here)}{hint}")
    if why := (why_no_gpu() if args.backend == "gpu" else why_no_tpu()):
        print(f"gate: {why}", file=sys.stderr)
        return 2
    ops = tuple(args.op or here)
    ended = []
    for gpu in GPUS if args.backend == "gpu" else (None,):  # a process compiles kernels for one architecture (aot.py)
        # spawn, not fork: a forked process would share this one's JAX runtime
        with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            share = slice(int(part) - 1, None, int(parts))
            started = [pool.submit(_gate, ops, gpu, share, i, args.jobs) for i in range(args.jobs)]
            ended += [one.result() for one in started]
    passed, failed = sum(one[0] for one in ended), [line for one in ended for line in one[1]]
    if failed:
        print("\nfailed:\n" + "".join(failed))
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


def _gate(ops: tuple[str, ...], gpu: str | None, share: slice, first: int, stride: int) -> tuple[int, list[str]]:
    """Compile every `stride`-th configuration of a share; return how many passed, and the lines of the others."""
    passed, failed = 0, list[str]()
    here, backend = [op for op in ops if gpu is None or gpu in gpus(op)], "tpu" if gpu is None else "gpu"
    every = [(op, *configuration) for op in here for configuration in configurations(op, backend)]
    for op, name, fn, shapes in every[share][first::stride]:
        for topology in TPUS if gpu is None else (gpu,):
            what, problem, seconds = _result(fn, shapes, topology, gpu is not None)
            line = f"{op:10s} {name:44s} {topology:6s} {what} {seconds:5.1f}s  {problem or 'ok'}\n"
            if problem:
                failed.append(line)
            else:
                passed += 1
            print(line, end="", flush=True)  # a single write, so that lines of several processes do not mix
    return passed, failed


def _result(fn: Callable[..., Any], shapes: tuple[Any, ...], topology: str, gpu: bool) -> tuple[str, str | None, float]:
    start = time.perf_counter()
    if gpu:
        reports, problem = gate_gpu(fn, shapes, topology)
        what = "; ".join(
            f"regs={r.registers} spill={r.spill_bytes} smem={r.shared_memory} ptx={r.instructions}" for r in reports
        )
    else:
        problem, what = gate_tpu(fn, shapes, topology), ""
    return what, problem, time.perf_counter() - start


assert set(TPUS) <= set(SMALLEST)

if __name__ == "__main__":
    sys.exit(main())
