"""What every benchmark here needs: interleaved timing, processes of their own, the facts of a machine, a JSON file.

A figure is a median of ratios of neighbours in time: `interleaved` calls its rows in turns, A B then B A, so that
whatever else the machine does falls on all of them alike. Nothing here imports JAX.
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
    """Seconds of every call of a row: on the clock, and of all this process's threads on the processor.

    The second is the steadier one where other processes share the machine.
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


def interleaved(rows: Mapping[str, Callable[[], Any]], rounds: int, *, warmup: int = 2) -> dict[str, Timed]:
    """Calls all rows in turns and times each call; the i-th entries of all rows are neighbours in time.

    Args:
      rows: callables that return only when their work is done.
      rounds: how often each is timed.
      warmup: untimed calls of each before.
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
    """The median of neighbours' ratios, and the quartiles around it."""

    median: float
    low: float
    high: float
    rounds: int


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """`ours / theirs`, pair by pair (so the noise that a pair shares cancels), then the median."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    return Ratio(statistics.median(each), low, high, len(each))


@dataclasses.dataclass(frozen=True)
class Start:
    """A process up to the first line of a file it writes: seconds, and its largest resident memory until then."""

    seconds: float
    peak_rss: int | None


def first_line(command: Sequence[str], file: Path, *, folder: Path, limit: float = 600.0) -> Start:
    """Starts `command` and waits for the first line in `file`; then ends it.

    Args:
      command: what to run; its output is kept for the error only.
      file: what it will write to.
      folder: its working directory.
      limit: seconds to wait.

    Raises:
      RuntimeError: it ended, or the time did, without a line; says what it printed.
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
                    said = output.read().decode(errors="replace")
                    raise RuntimeError(f"no first line from {' '.join(command)}:\n{said[-4000:]}")
                time.sleep(0.002)
        finally:
            process.kill()
            process.wait()


def in_subprocess(script: str | Path, arguments: Sequence[str], *, limit: float | None = None) -> Any:
    """Runs `python script arguments... --into FILE` and returns the JSON it left there; its output is shown.

    For what a process can do only once, such as choosing its number of devices or running out of memory. What it has
    left there is taken even if it ends badly afterwards.

    Args:
      script: what to run.
      arguments: its own.
      limit: seconds after which it is ended.

    Raises:
      RuntimeError: it failed, or was ended, before it left anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "out.json"
        command = [sys.executable, str(script), *arguments, "--into", str(into)]
        what = f"{Path(script).name} {' '.join(arguments)}"
        try:
            how = f"failed (exit code {subprocess.run(command, env=environment(), timeout=limit).returncode})"
        except subprocess.TimeoutExpired:
            how = f"was ended after {limit:.0f} seconds"
        if not into.exists():
            raise RuntimeError(f"{what} {how}")
        return json.loads(into.read_text())


def environment() -> dict[str, str]:
    """This process's environment, with the repository importable and no compile cache (first steps compile)."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return env


def facts(device: str) -> dict[str, Any]:
    """Commit, command, date, machine and versions, as every result file carries them.

    Args:
      device: JAX's name for it, from the process that measured (this one need not start a backend).
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
    """The repository's commit, with "-dirty" when tracked files differ.

    A copy without its history says it in `BENCHMARK_COMMIT`; else it is "uncommitted".
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("BENCHMARK_COMMIT", "uncommitted")
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", "jaxscale", "pallas_kernels")
    return f"{head}-dirty" if dirty else head


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Writes `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(rounded(result), indent=2) + "\n")
    return path


def fill(name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table into the folder's README, between `<!-- name -->` and `<!-- end name -->`.

    Raises:
      ValueError: the README has no such place.
    """
    put(name, table(header, rows), FOLDER / "README.md")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def put(name: str, text: str, readme: Path) -> None:
    """Writes a text into a README, between `<!-- name -->` and `<!-- end name -->`.

    Raises:
      ValueError: the README has no such place.
    """
    start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    above, found, rest = readme.read_text().partition(start)
    after = rest.partition(end)[2]
    if not found or not after:
        raise ValueError(f"{readme.name} has no place for '{name}': {start} ... {end}")
    readme.write_text("\n".join([above + start, text, end + after]))


def rounded(x: Any) -> Any:
    """`x` with floats to five digits: what a timing holds."""
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else str(x)
    if isinstance(x, Mapping):
        return {k: rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else x


def _peak_rss(pid: int) -> int | None:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # not Linux, or it has ended
        return None
    return int(found[1]) * 1024 if found else None


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
