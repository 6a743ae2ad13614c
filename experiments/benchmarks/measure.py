"""Shared parts of all benchmarks: interleaved timing, subprocesses, facts about the machine, JSON result files.

A ratio is the median over pairs of calls that are adjacent in time: `interleaved` calls its rows in turns, A B then
B A, so that other load on the machine slows all of them alike. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "results"


@dataclasses.dataclass
class Timed:
    """Seconds of every call of a row: wall-clock time, and processor time of all threads of this process.

    Processor time varies less where other processes share the machine.
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


def interleaved(rows: Mapping[str, Callable[[], Any]], rounds: int, *, warmup: int = 2) -> dict[str, Timed]:
    """Call all rows in turns and time each call; the i-th entries of all rows are adjacent in time.

    Args:
      rows: callables that return only when their work is done.
      rounds: timed calls of each row.
      warmup: untimed calls of each row before the first timed one.
    """
    names = list(rows)
    for _ in range(warmup):
        for name in names:
            rows[name]()
    timed = {name: Timed() for name in names}
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            cpu, wall = time.process_time(), time.perf_counter()
            rows[name]()
            timed[name].wall.append(time.perf_counter() - wall)
            timed[name].cpu.append(time.process_time() - cpu)
    return timed


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the ratios of adjacent timings."""

    median: float
    low: float
    high: float
    rounds: int


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median of `ours / theirs`, computed pair by pair so that noise common to a pair cancels."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    return Ratio(statistics.median(each), low, high, len(each))


@dataclasses.dataclass(frozen=True)
class Start:
    """Seconds until a process wrote the first line of a file, and its peak resident memory in bytes until then."""

    seconds: float
    peak_rss: int | None


def first_line(command: Sequence[str], file: Path, *, folder: Path, limit: float = 600.0) -> Start:
    """Start a command, wait for the first line in a file that it writes, then kill it.

    Args:
      command: program and arguments; its output is used for the error message only.
      file: the file that it writes.
      folder: its working directory.
      limit: seconds to wait.

    Raises:
      RuntimeError: the command ended, or the limit passed, before a line was written; has the last of its output.
    """
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                ended = process.poll() is not None
                if file.exists() and b"\n" in file.read_bytes():
                    return Start(time.perf_counter() - start, _peak_rss(process.pid))
                if ended or time.perf_counter() - start > limit:
                    output.seek(0)
                    printed = output.read().decode(errors="replace")
                    raise RuntimeError(f"no first line from {' '.join(command)}:\n{printed[-4000:]}")
                time.sleep(0.002)
        finally:
            process.kill()
            process.wait()


def in_subprocess(script: str | Path, arguments: Sequence[str], *, limit: float | None = None) -> Any:
    """Run `python script arguments... --into FILE` and return the JSON in that file; its output is displayed.

    For what a process can do only once, such as choosing its number of devices or running out of memory. The file is
    used even if the process fails after writing it.

    Args:
      script: path of the script.
      arguments: its command line, without `--into`.
      limit: seconds after which it is killed, or `None`.

    Raises:
      RuntimeError: it failed, or was killed, before it wrote the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "out.json"
        command = [sys.executable, str(script), *arguments, "--into", str(into)]
        what = f"{Path(script).name} {' '.join(arguments)}"
        try:
            outcome = f"failed (exit code {subprocess.run(command, env=environment(), timeout=limit).returncode})"
        except subprocess.TimeoutExpired:
            outcome = f"was ended after {limit:.0f} seconds"
        if not into.exists():
            raise RuntimeError(f"{what} {outcome}")
        return json.loads(into.read_text())


def environment() -> dict[str, str]:
    """Return this process's environment with the repository importable and without a compilation cache."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return env


def facts(device: str) -> dict[str, Any]:
    """Return commit, command, date, machine and versions, which every result file has.

    Args:
      device: JAX's name of the device, from the process that measured; this process need not start a backend.
    """
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return {
        "commit": commit(),
        "command": " ".join(["python", name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "host": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": versions,
    }


def commit() -> str:
    """Return the value of `BENCHMARK_COMMIT`, or the repository's commit, with "-dirty" when tracked files differ.

    The variable is for copies without the repository's history; "uncommitted" where such a copy has no value.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if named := os.environ.get("BENCHMARK_COMMIT"):
        return named
    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "uncommitted"
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", "jaxscale", "pallas_kernels")
    return f"{head}-dirty" if dirty else head


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Write `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(rounded(result), indent=2) + "\n")
    return path


def fill(name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table into the benchmarks' README, between `<!-- name -->` and `<!-- end name -->`.

    Raises:
      ValueError: the README has no such markers.
    """
    put(name, table(header, rows), FOLDER / "README.md")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def put(name: str, text: str, readme: Path) -> None:
    """Write text into a README, between `<!-- name -->` and `<!-- end name -->`.

    Raises:
      ValueError: the README has no such markers.
    """
    start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    above, marker, rest = readme.read_text().partition(start)
    after = rest.partition(end)[2]
    if not marker or not after:
        raise ValueError(f"{readme.name} has no markers for '{name}': {start} ... {end}")
    readme.write_text("\n".join([above + start, text, end + after]))


def rounded(x: Any) -> Any:
    """Return `x` with floats rounded to five significant digits, which is all that a timing is worth."""
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else str(x)
    if isinstance(x, Mapping):
        return {k: rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else x


def _peak_rss(pid: int) -> int | None:
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # not Linux, or it has ended
        return None
    return int(match[1]) * 1024 if match else None


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()
