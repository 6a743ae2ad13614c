"""The parity table on the real device: compiled kernels, new data, reruns, and outputs that start as NaN.

    python -m tests.pallas_kernels.on_device --out correctness.jsonl              # on this machine's device
    python -m tests.pallas_kernels.on_device --out again.jsonl --seed 7 --op softmax --backend mosaic_gpu
    python -m tests.pallas_kernels.on_device --withdraw correctness.jsonl         # withdraw what was wrong
    python -m tests.pallas_kernels.on_device --out x.jsonl --interpret mosaic_gpu --op decode_attention    # on a CPU

Runs every case of the table and, on an accelerator, cases at the sizes of the benchmarks, on the device's kernels and
on "xla". A row's verdict is "ok", "WRONG" (the table's rule, or a piece of the result is far off), "NOT THE SAME TWICE"
(reruns of one compiled program differ), "UNWRITTEN" (the result differs after free memory was filled with 0xFF bytes),
"not supported: ...", "crashed: ..." or "no time". The gradient of attention by q may differ between runs on Hopper
unless it is deterministic, and so may cuDNN's gradients; `spread` is then the size of the difference.

Separate processes do the work (`device_check.py`). One that crashes or hangs loses the case that it was running, and
another continues with the rest. Rows are written as they come. The exit status is 1 when a row is none of "ok", "not
supported" and "no time", or none is "ok"; 3 when nothing is wrong and some had "no time"; 2 for a user's mistake; 130
when it was interrupted (143 by SIGTERM), where unfinished cases leave no row. This process does not start JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from experiments.benchmarks.measure import commit
from pallas_kernels.command_line import Parser
from pallas_kernels.errors import did_you_mean
from tests.pallas_kernels.device_rows import FAULTS, counted, name_of, not_reached, report, withdraw

ROOT = Path(__file__).resolve().parents[2]
START = 180.0
"""Seconds that a process may take to import JAX and find its device."""
LARGE_PROCESSES = 2
MEMORY = {"small": 0.25, "large": 0.6}
"""Share of an accelerator's memory for the processes of either size; the rest is for allocations outside pools."""
INTERPRETED = ("mosaic_gpu", "mosaic_tpu", "xla")
"""Choices of --interpret: the table's backends. (Importing the table's module would start JAX.)"""
NOT_REACHED = 3
"""The exit status when nothing is wrong but time ran out."""


# one process -------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """A process has ended, or was killed because it did not answer (`hung`)."""

    def __init__(self, why: str, hung: bool = False):
        super().__init__(why)
        self.hung = hung


class Interrupted(BaseException):
    """A signal (`number`) ended the run; the message tells what was written by then."""

    def __init__(self, number: int, message: str = "before the first row"):
        super().__init__(message)
        self.number = number


STARTING = re.compile(
    r"(?:^.*plugin configuration error.*\n)?^Traceback \(most recent call last\):\n(?:^[ \t].*\n)*"
    r"^RuntimeError: Unable to load .*\n?",
    re.MULTILINE,
)
"""What JAX prints at its start where a CUDA library is missing; JAX continues."""


class Process:
    """A process that receives lines of JSON and answers with lines of JSON.

    Args:
      command: what to run; "--answers FD" is added.
      environment: its environment variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._reader, writer = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._rest = b""
        self._process = subprocess.Popen(
            [*command, "--answers", str(writer)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            cwd=ROOT,
            env=dict(environment),
            start_new_session=True,  # so that compilers which it started end with it
        )
        os.close(writer)

    def tell(self, what: Any) -> None:
        """Send a line; raise `Ended` when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Ended(self._reason_of_end()) from None

    def answer(self, seconds: float) -> Any:
        """Return the next line; raise `Ended` when the process has ended, or does not answer in time."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._reader, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = until - time.monotonic()
                if left <= 0 or not ready.select(left):
                    self.kill()
                    raise Ended(f"hung: no answer in {seconds:.0f} s", hung=True)
                got = os.read(self._reader, 1 << 16)
                if not got:
                    raise Ended(self._reason_of_end())
                self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """Kill it and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)

    def _reason_of_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.poll()
        self.kill()
        reason = "the process does not answer" if code is None else f"the process ended with status {code}"
        if code is not None and code < 0:
            reason = f"the process died of {signal.Signals(-code).name}"
        lines = STARTING.sub("", self.output() + "\n").strip().splitlines()
        return f"{reason}: {lines[-1].strip()[:300]}" if lines else reason

    def output(self) -> str:
        """Return the end of its output, without empty lines."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 8192))
        text = self._log.read().decode(errors="replace")
        return "\n".join(line for line in text.splitlines() if line.strip())


# all of them -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """Work on some backends, one after the other in one process, which computes the truth only once.

    Args:
      index: index of the work in the process.
      names: "op", "feature", "dtype" and "large".
      parts: the parts of its rows.
      backends: in the order to run.
    """

    index: int
    names: Mapping[str, Any]
    parts: tuple[str, ...]
    backends: tuple[str, ...]

    def rows(self, backend: str, verdict: str) -> list[dict[str, Any]]:
        """Return its rows where there are no results."""
        return [{**self.names, "part": part, "backend": backend, "verdict": verdict} for part in self.parts]


class Worker:
    """A thread that runs tasks from a queue until it is empty, in one process at a time.

    Args:
      tasks: the queue, which several threads may share.
      start: starts a process.
      record: receives the rows of a task.
      limit: seconds for one task on one backend.
      deadline: time on the monotonic clock when everything has to end.
      process: a process that has started already.
    """

    def __init__(
        self,
        tasks: queue.SimpleQueue[Task],
        start: Callable[[], Process],
        record: Callable[[list[dict[str, Any]]], None],
        limit: float,
        deadline: float,
        process: Process | None = None,
    ):
        self._tasks, self._start, self._record = tasks, start, record
        self._limit, self._deadline = limit, deadline
        self._process = process
        self._failures = 0  # successive failed starts
        self._stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Kill its process and start no other."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        with contextlib.suppress(queue.Empty):
            while self._failures < 3:
                task = self._tasks.get_nowait()
                for backend in task.backends:
                    self._record(self._rows(task, backend))
        self.stop()

    def _rows(self, task: Task, backend: str) -> list[dict[str, Any]]:
        try:
            if self._left() <= 0:
                return task.rows(backend, "no time")
            if self._process is None:
                self._failures += 1
                self._process = self._start()
                self._process.answer(min(START, self._left()))
                self._failures = 0
            self._process.tell({"work": task.index, "backend": backend})
            answer = self._process.answer(min(self._limit, self._left()))
        except Ended as e:
            self._process = None
            ended = self._stopped or (e.hung and self._left() <= 0)  # killed here, through no fault of the task
            return task.rows(backend, "no time" if ended else f"crashed: {e}")
        if answer["last"]:
            self._process.kill()
            self._process = None
        return list(answer["rows"])

    def _left(self) -> float:
        return 0.0 if self._stopped else self._deadline - time.monotonic()


class Journal:
    """Writes rows to disk as they come, prints those that are not ok, and ignores rows after it is closed."""

    def __init__(self, path: Path, run: Mapping[str, Any]):
        self.rows: list[dict[str, Any]] = []
        self._lock, self._seed = threading.Lock(), run["seed"]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("x")
        self._line({"run": dict(run)})

    def record(self, rows: list[dict[str, Any]]) -> None:
        """Write rows."""
        with self._lock:
            for row in () if self._file.closed else rows:
                self.rows.append(row)
                self._line(row | {"seed": self._seed})
                if row["verdict"] != "ok" and not row["verdict"].startswith("not supported"):
                    print(name_of(row), row["verdict"], flush=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and close the file."""
        with self._lock:
            self._line({"summary": dict(summary)})
            self._file.close()

    def _line(self, what: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()


def interleaved(tasks: Sequence[Task]) -> queue.SimpleQueue[Task]:
    """Return a queue in which ops take turns, so that each has been checked in part when time runs out."""
    by_op: dict[str, list[Task]] = {}
    for task in tasks:
        by_op.setdefault(task.names["op"], []).append(task)
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for turn in itertools.zip_longest(*by_op.values()):
        for task in turn:
            if task is not None:
                waiting.put(task)
    return waiting


@contextlib.contextmanager
def running(workers: list[Worker]) -> Iterator[None]:
    """Stop all workers at the end of the context."""
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM raise `Interrupted` within the context; processes have their own sessions."""

    def stop(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    both = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, stop) for each in both if signal.getsignal(each) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def check(args: argparse.Namespace) -> int:
    """Run all requested cases and return the exit status."""
    deadline = time.monotonic() + (args.seconds or float("inf"))
    seed = args.seed if args.seed is not None else time.time_ns() % 2**31
    command = [sys.executable, "-m", f"{__package__}.device_check", "--seed", str(seed), "--works", args.works]
    command += ["--interpret"] * bool(args.interpret)
    first = Process(command, environment(None))
    try:
        facts = first.answer(min(START, deadline - time.monotonic()))
    except Ended as e:
        print(f"on_device: {e}\n{first.output()}", file=sys.stderr)
        first.kill()
        return 2
    except Interrupted:
        first.kill()
        raise
    if gone := facts["platform"] != "cpu":
        first.kill()  # its memory is for the processes that work
    backends = (args.interpret,) if args.interpret else tuple(facts["backends"])
    if args.backend and args.backend not in backends:
        first.kill()
        hint = did_you_mean(args.backend, backends)
        print(f"on_device: no backend '{args.backend}' here, only {', '.join(backends)}{hint}", file=sys.stderr)
        return 2
    backends = (args.backend,) if args.backend else backends
    tasks = [
        Task(
            i,
            {"op": op, "feature": feature, "dtype": dtype, "large": large},
            tuple(parts),
            serving(op, parts, backends),
        )
        for i, (op, feature, dtype, parts, large) in enumerate(facts["works"])
        if args.op is None or op in args.op.split(",")
    ]
    ops = sorted({w[0] for w in facts["works"]})
    if unknown := [op for op in (args.op or "").split(",") if op not in ("", *ops)] or [args.op] * (not tasks):
        first.kill()
        hint = did_you_mean(unknown[0], ops)
        print(f"on_device: no op '{unknown[0]}', only {', '.join(ops)}{hint}", file=sys.stderr)
        return 2
    jobs = args.jobs or max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    groups = _groups(tasks, facts["platform"], jobs)
    run = {k: facts[k] for k in ("platform", "device", "jax", "memory")} | {
        "commit": commit(), "date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0], "seed": seed,
        "backends": backends, "interpreted": bool(args.interpret), "processes": sum(n for _, n, _ in groups),
        "rows": sum(len(t.parts) * len(t.backends) for t in tasks),
    }  # fmt: skip
    journal = Journal(args.out, run)
    print(
        f"{run['device']}, jax {run['jax']}, {len(tasks)} programs on {', '.join(backends)}, --seed {seed}", flush=True
    )
    start, workers, left = time.monotonic(), [], []
    with running(workers):
        try:
            for mine, processes, memory in groups:
                waiting = interleaved(mine)
                left.append(waiting)
                make = lambda memory=memory: Process(command, environment(memory))  # noqa: E731
                for _ in range(processes):
                    ready = None if gone or workers else first
                    workers.append(Worker(waiting, make, journal.record, args.limit, deadline, ready))
            for worker in workers:
                while worker.thread.is_alive():
                    worker.thread.join(1)
        except Interrupted as e:  # before workers stop: rows that this kills have not crashed
            journal.close(counted(journal.rows) | {"interrupted": True})
            raise Interrupted(e.number, f"with {len(journal.rows)} of {run['rows']} rows in {args.out}") from None
    for waiting in left:  # tasks left where every worker gave up
        with contextlib.suppress(queue.Empty):
            while True:
                task = waiting.get_nowait()
                for backend in task.backends:
                    journal.record(task.rows(backend, "crashed: no process starts"))
    counts = counted(journal.rows)
    journal.close(counts | {"seconds": round(time.monotonic() - start, 1)})
    print(report(journal.rows))
    print(f"{sum(counts.values())} rows in {time.monotonic() - start:.0f} s, --seed {seed}: {args.out}")
    if "no time" in counts:
        print(f"{not_reached(journal.rows, run)} (give it more --seconds)")
    if not {"crashed", *FAULTS}.isdisjoint(counts):
        return 1
    return NOT_REACHED if "no time" in counts else 0 if "ok" in counts else 1


def serving(op: str, parts: Sequence[str], backends: Sequence[str]) -> tuple[str, ...]:
    """Return the backends that may have the op: cuDNN has only attention, and returns no log-sum-exp."""
    served = op == "flash_attention" and "lse" not in parts
    return tuple(backend for backend in backends if served or backend != "cudnn")


def _groups(tasks: list[Task], platform: str, jobs: int) -> list[tuple[list[Task], int, float | None]]:
    """Return tasks, the number of processes that share them, and each process' share of an accelerator's memory."""
    if platform == "cpu":
        return [(tasks, jobs, None)]
    if platform == "tpu":  # only one process can use it
        return [(tasks, 1, None)]
    groups = []
    for name, processes in (("small", jobs), ("large", LARGE_PROCESSES)):
        mine = [t for t in tasks if t.names["large"] == (name == "large")]
        processes = min(processes, len(mine))
        if mine:
            groups.append((mine, processes, MEMORY[name] / processes))
    return groups


def environment(memory: float | None) -> dict[str, str]:
    """Return the environment of a process that reserves a share of an accelerator's memory, or none."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_PYTHON_CLIENT_", "XLA_CLIENT_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of several processes compete
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a kernel runs on one device and refuses several
    # On a GPU, float32 matrix products would have 10 bits, and those that XLA turns into sums 24: no rule fits both.
    environment.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false" if memory is None else "true"
    if memory is not None:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{memory:.4f}"
    return environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE.jsonl", help="check, and write rows to this file")
    what.add_argument("--withdraw", type=Path, metavar="FILE.jsonl", help="withdraw what is wrong in a run's rows")
    parser.add_argument("--crashed", action="store_true", help="with --withdraw: also what crashed")
    parser.add_argument("--seed", type=int, help="seed of all data (default: from the clock)")
    parser.add_argument("--op", help="check only these ops, comma-separated")
    parser.add_argument("--backend", help="check only this backend, such as mosaic_gpu")
    parser.add_argument("--jobs", type=int, help="processes (default: half the cores, 8 at most); on a GPU 2 more")
    parser.add_argument("--seconds", type=float, help="end after this time; the remaining rows have 'no time'")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="SECONDS_PER_PART",
        help="for one program on one backend (default %(default)s); then its process is killed",
    )  # fmt: skip
    parser.add_argument("--interpret", metavar="BACKEND", help="on a CPU, run this backend's kernels interpreted")
    parser.add_argument("--works", default=f"{__package__}.device_check", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    if args.out is not None and args.out.exists():
        parser.error(f"--out {args.out}: the file exists, with the rows of another run; name a new file")
    if args.withdraw:
        return withdraw(args.withdraw, args.crashed)
    if args.interpret is not None and args.interpret not in INTERPRETED:
        hint = did_you_mean(args.interpret, INTERPRETED)
        print(f"on_device: no backend '{args.interpret}', only {', '.join(INTERPRETED)}{hint}", file=sys.stderr)
        return 2
    try:
        with interruptible():
            return check(args)
    except Interrupted as e:
        print(f"on_device: interrupted, {e}", file=sys.stderr)
        return 128 + e.number


if __name__ == "__main__":
    sys.exit(main())
