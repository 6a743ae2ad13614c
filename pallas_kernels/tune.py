"""`python -m pallas_kernels.tune OP...`: find ops' tiles for a device and write them into their `tiles.json`.

Every candidate passes the compile gate first. Where the device is present, those that pass are timed, the fastest is
"measured", and one whose result differs from the first one's is rejected. Where it is not present, the first candidate
to pass, in the op's own order of preference, is "compiled".

    python -m pallas_kernels.tune --jobs 8 --seconds 400 --out tried.jsonl   on the device: every op
    python -m pallas_kernels.tune --take tried.jsonl                            the best tiles into the tables

With --out each attempt is written to disk at once, and a second run continues after it. With --jobs several processes
compile and take turns to time. A process that ends or hangs loses only the candidate that it was trying.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import tiles
from pallas_kernels.aot import SMALLEST, kind_of
from pallas_kernels.command_line import Parser
from pallas_kernels.dispatch import KernelError
from pallas_kernels.errors import did_you_mean
from pallas_kernels.gate import GPUS, operations
from pallas_kernels.trials import Attempt, attempts, best, platform_of, topology_here, tunable, tuning, why_not_tunable

LIMITS = {"begun": 180.0, "timing": 30.0}
"""Seconds after which a candidate counts as hanging, while it is compiled or timed; waiting for a turn has no limit."""
REFUSED = 2
"""Exit status of a process that cannot work on this device, where no other process could either."""


@dataclasses.dataclass(frozen=True)
class Log:
    """A file of attempts, one per line, and between them the state of each process.

    Args:
      path: the file.
    """

    path: Path

    def add(self, one: Attempt | dict[str, Any]) -> None:
        """Append one whole line: an attempt, or the state of a process."""
        line = json.dumps(dataclasses.asdict(one) if isinstance(one, Attempt) else one)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> tuple[list[Attempt], list[dict[str, Any]]]:
        """Return the attempts, and the candidates that are being tried or were lost, each with its process' last state.

        Candidates that were being tried when a run's time was over count as neither.
        """
        lines = self._lines()
        tried: list[Attempt] = []
        under_way: dict[str, dict[str, Any]] = {}
        for line in lines:
            if "over" in line:
                under_way.clear()
                continue
            name = json.dumps([line["op"], line["device"], line["key"], line["tile"]], sort_keys=True)
            if "state" in line:
                times = under_way.get(name, {"times": 0})["times"] + (line["state"] == "begun")
                under_way[name] = line | {"times": times}
            else:
                # Older logs call the field "how".
                tried.append(Attempt(**{"source" if name == "how" else name: value for name, value in line.items()}))
                under_way.pop(name, None)
        return tried, list(under_way.values())

    def _lines(self) -> list[dict[str, Any]]:
        """Return every whole line; the last one may have been cut by the end of its process.

        Raises:
          KernelError: the file is of another kind.
        """
        text = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        whole = text if not text or text[-1].endswith("\n") else text[:-1]
        try:
            lines = [json.loads(line) for line in whole]
            if not all(isinstance(line, dict) and ("over" in line or "tile" in line) for line in lines):
                raise ValueError("a line is not an attempt")
        except ValueError as e:
            raise KernelError(f"{self.path} is not a file of attempts written by --out ({e})") from None
        return lines

    def give_up(self, one: dict[str, Any]) -> None:
        """Record that trying a candidate ended its process."""
        why = "its process ended or hung"
        self.add(Attempt(one["op"], one["device"], one["key"], one["tile"], None, why, "measured"))


def _work(args: argparse.Namespace, log: Log, worker: int) -> None:
    """Try every `jobs`-th key; begin nothing after the time limit."""
    end = time.monotonic() + args.seconds if args.seconds else None
    topology = _topology(args)
    kind = kind_of(topology)
    ops = _ops(args, topology)
    every = [(op, key) for op in ops for key in tuning(op).keys(platform_of(topology)) if _matches(key, args.where)]
    at: dict[str, Any] = {}

    def now(state: str) -> None:
        log.add({"state": state, "at": time.time(), "worker": worker, "device": kind, **at})

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        now("waiting")
        with log.path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            now("timing")
            yield

    for op, key in every[worker :: args.jobs]:
        before = [a for a in log.read()[0] if (a.op, a.device, a.key) == (op, kind, key)]
        if any(a.problem is None and a.seconds is None for a in before):
            continue  # a candidate of this key has compiled before

        def begin(tile: dict[str, Any], op: str = op, key: dict[str, Any] = key) -> None:
            at.update(op=op, key=key, tile=tile)
            now("begun")

        known = [a.tile for a in before]
        for one in attempts(op, topology, key, args.limit, known=known, before=begin, turn=turn):
            log.add(one)
            if end is not None and time.monotonic() > end:
                return


def _topology(args: argparse.Namespace) -> str:
    """Return what to tune for: --device, else the accelerator of this machine, else an H200."""
    return args.device or topology_here() or "h200"


def _ops(args: argparse.Namespace, topology: str) -> Sequence[str]:
    """Return the ops to tune for a device: those named, or all that have a kernel with tiles there."""
    if why := why_not_tunable(args.op, topology):
        raise KernelError(why)
    return args.op or tunable(topology)


def _matches(key: dict[str, Any], where: Sequence[str]) -> bool:
    return all(str(key.get(name)) == value for name, _, value in (w.partition("=") for w in where))


def _several(args: argparse.Namespace, argv: Sequence[str], log: Log) -> bool:
    """Keep `jobs` processes at work until all are done or the time is over; return False where none can work here."""
    end = time.monotonic() + args.seconds if args.seconds else None
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.85 / args.jobs:.3f}"}

    def start(worker: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pallas_kernels.tune", *argv, "--worker", str(worker)]
        return subprocess.Popen(command, env={**os.environ, **share})

    at_work = {worker: start(worker) for worker in range(args.jobs)}
    try:
        while at_work:
            time.sleep(0.3)
            over = end is not None and time.monotonic() > end
            states = {line["worker"]: line for line in log.read()[1]}
            for worker, process in list(at_work.items()):
                at = states.get(worker)
                hangs = at is not None and time.time() - at["at"] > LIMITS.get(at["state"], float("inf"))
                if process.poll() is None and (over or hangs):
                    process.kill()
                    process.wait()
                if process.poll() is None:
                    continue
                del at_work[worker]
                if process.returncode == REFUSED:
                    return False
                if at is not None and not over:
                    log.give_up(at)
                    at_work[worker] = start(worker)
    finally:
        for process in at_work.values():
            process.kill()
        log.add({"over": time.time()})
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
      argv: arguments; those of the process by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        prog="python -m pallas_kernels.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("op", nargs="*", help=f"ops to tune, of {', '.join(operations())}; all by default")
    known = sorted({*SMALLEST, "h100", *GPUS})
    parser.add_argument("--device", choices=known, help="device to tune for; by default this machine's, else an H200")
    parser.add_argument("--limit", type=int, help="candidates to try for each key")
    parser.add_argument(
        "--where", action="append", default=[], metavar="NAME=VALUE", help="tune only keys with this value"
    )
    parser.add_argument("--seconds", type=float, help="begin no attempt after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at the same time")
    parser.add_argument("--out", type=Path, help="file of attempts to write, and to continue from")
    parser.add_argument("--write", action="store_true", help="write the best tiles into the ops' tiles.json")
    parser.add_argument(
        "--take", type=Path, metavar="FILE", help="write the best tiles of a file of attempts; try nothing"
    )
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.op) - set(operations()):
        hint = did_you_mean(min(unknown), operations())
        parser.error(f"'{min(unknown)}' has no kernels; these ops do: {', '.join(operations())}{hint}")
    if args.device and (why := why_not_tunable(args.op, args.device)):  # this machine's device is not asked for here:
        parser.error(why)  # it belongs to the processes of --jobs
    if args.jobs < 1 or (args.jobs > 1 and args.out is None):
        parser.error(f"--jobs {args.jobs}: must be at least 1, and more than one needs --out FILE")
    platform = platform_of(args.device or "h200")
    ops = args.op or operations(platform)
    names = sorted({name for op in ops for key in tuning(op).keys(platform) for name in key})
    if wrong := next((w for w in args.where if w.partition("=")[0] not in names or "=" not in w), None):
        hint = did_you_mean(wrong.partition("=")[0], names)
        parser.error(f"--where {wrong}: write NAME=VALUE, with NAME one of {', '.join(names)}{hint}")
    if args.where and not any(_matches(key, args.where) for op in ops for key in tuning(op).keys(platform)):
        parser.error(f"--where {' --where '.join(args.where)}: no key has these values")
    if args.take:
        if not args.take.is_file():
            parser.error(f"--take {args.take}: no such file; --out writes one")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: the folder {args.out.parent} does not exist")
    try:
        if args.take:
            return _written(best(Log(args.take).read()[0]))
        if args.out is None:
            tried, topology = [], _topology(args)
            for op in _ops(args, topology):
                keys = [key for key in tuning(op).keys(platform_of(topology)) if _matches(key, args.where)]
                tried += [a for key in keys for a in attempts(op, topology, key, args.limit)]
        else:
            log = Log(args.out)
            if args.worker is not None:
                _work(args, log, args.worker)
                return 0
            for lost in log.read()[1]:
                if lost["times"] > 1:  # once may have been due to the end of the run
                    log.give_up(lost)
            if not _several(args, argv, log):
                return REFUSED
            tried = log.read()[0]
    except KernelError as e:
        print(f"tune: {e}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"interrupted{f'; attempts so far are in {args.out}' if args.out else ''}", file=sys.stderr)
        return 130
    by_op = best(tried)
    if args.write:
        return _written(by_op)
    return 0 if any(by_op.values()) else 1


def _written(by_op: dict[str, list[dict[str, Any]]]) -> int:
    """Write entries, but replace no measured one by one that was only compiled; return the exit status."""
    for op, entries in by_op.items():
        measured = [(e["device"], e["key"]) for e in tiles.entries(op) if e["from"].startswith("measured")]
        compiled = [e for e in entries if e["from"] == "compiled" and (e["device"], e["key"]) in measured]
        if compiled:
            print(f"{op}: kept {len(compiled)} measured entries, for which there are now only compiled ones")
        if better := [e for e in entries if e not in compiled]:
            print(f"wrote {len(better)} entries to {tiles.write(op, better)}")
    return 0 if any(by_op.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
