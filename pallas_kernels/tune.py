"""`python -m pallas_kernels.tune OP...`: finds ops' tiles for a device and writes them into their `tiles.json`.

Every candidate passes the compile gate first. Where the device is here, those that do are timed, the fastest is
"measured", and one whose result is another than the first one's is refused. Where it is not, the first to pass, in the
op's own order of preference, is "compiled".

    python -m pallas_kernels.tune --jobs 8 --seconds 400 --out tried.jsonl   on the device: every op
    python -m pallas_kernels.tune --take tried.jsonl                            its best, into the tables

With --out each attempt is on disk as soon as it is known, and a second run goes on behind it; with --jobs several
processes compile and take turns to time. One that ends or hangs costs the candidate that it was at.
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
from pallas_kernels.dispatch import KernelError
from pallas_kernels.gate import operations
from pallas_kernels.trials import Attempt, attempts, best, platform_of, topology_here, tuning

LIMITS = {"begun": 180.0, "timing": 30.0}
"""Seconds after which a candidate hangs that is being compiled, or timed; waiting for its turn it may."""
REFUSED = 2
"""The exit status of a process that cannot work on this device: no other could."""


@dataclasses.dataclass(frozen=True)
class Log:
    """A file of attempts, a line each, and between them what each process is at."""

    path: Path

    def add(self, one: Attempt | dict[str, Any]) -> None:
        """Appends a line, whole."""
        line = json.dumps(dataclasses.asdict(one) if isinstance(one, Attempt) else one)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> tuple[list[Attempt], list[dict[str, Any]]]:
        """What was tried, and what is under way or was lost: the last that its process said of it.

        What was under way when a run's time was over is neither.
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
                tried.append(Attempt(**line))
                under_way.pop(name, None)
        return tried, list(under_way.values())

    def _lines(self) -> list[dict[str, Any]]:
        """All that are whole: the last may have been cut by the end of its process.

        Raises:
          KernelError: it is another kind of file.
        """
        text = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        whole = text if not text or text[-1].endswith("\n") else text[:-1]
        try:
            lines = [json.loads(line) for line in whole]
            if not all(isinstance(line, dict) and ("over" in line or "tile" in line) for line in lines):
                raise ValueError("a line is no attempt")
        except ValueError as e:
            raise KernelError(f"{self.path} is no file of attempts, as --out writes one ({e})") from None
        return lines

    def give_up(self, one: dict[str, Any]) -> None:
        """Records that a candidate took its process with it."""
        why = "its process ended or hung"
        self.add(Attempt(one["op"], one["device"], one["key"], one["tile"], None, why, "measured"))


def _work(args: argparse.Namespace, ops: Sequence[str], log: Log, worker: int) -> None:
    """Tries every `jobs`-th key; after the time nothing is begun."""
    end = time.monotonic() + args.seconds if args.seconds else None
    topology = _topology(args)
    kind = kind_of(topology)
    every = [(op, key) for op in ops for key in tuning(op).keys(platform_of(topology)) if _wanted(key, args.where)]
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
            continue  # compiled before

        def begin(tile: dict[str, Any], op: str = op, key: dict[str, Any] = key) -> None:
            at.update(op=op, key=key, tile=tile)
            now("begun")

        known = [a.tile for a in before]
        for one in attempts(op, topology, key, args.limit, known=known, before=begin, turn=turn):
            log.add(one)
            if end is not None and time.monotonic() > end:
                return


def _topology(args: argparse.Namespace) -> str:
    """What to tune for: what was said, else what is here, else an H200."""
    return args.device or topology_here() or "h200"


def _wanted(key: dict[str, Any], where: Sequence[str]) -> bool:
    return all(str(key.get(name)) == value for name, _, value in (w.partition("=") for w in where))


def _several(args: argparse.Namespace, argv: Sequence[str], log: Log) -> bool:
    """Keeps `jobs` processes at work until each is through or the time is over; false where none can work here."""
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
    """The command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("op", nargs="*", help=f"of {', '.join(operations())}; all by default")
    known = sorted({*SMALLEST, "h100", "h200"})  # the kernels for GPUs are Hopper's
    parser.add_argument("--device", choices=known, help="by default what is here, or an H200")
    parser.add_argument("--limit", type=int, help="candidates to try of each key")
    parser.add_argument("--where", action="append", default=[], metavar="NAME=VALUE", help="keys that have this")
    parser.add_argument("--seconds", type=float, help="try nothing after this")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once")
    parser.add_argument("--out", type=Path, help="a file of attempts, to go on with")
    parser.add_argument("--write", action="store_true", help="the best into the ops' tiles.json")
    parser.add_argument("--take", type=Path, metavar="FILE", help="write the best of a file of attempts, try nothing")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.op) - set(operations()):
        parser.error(f"no kernels of '{min(unknown)}'; there are {', '.join(operations())}")
    if args.jobs < 1 or (args.jobs > 1 and args.out is None):
        parser.error(f"--jobs {args.jobs}: at least 1, and more than one write to --out FILE")
    ops = tuple(args.op or operations())
    platform = platform_of(args.device or "h200")
    names = sorted({name for op in ops for key in tuning(op).keys(platform) for name in key})
    if wrong := next((w for w in args.where if w.partition("=")[0] not in names or "=" not in w), None):
        parser.error(f"--where {wrong}: write NAME=VALUE, NAME one of {', '.join(names)}")
    if args.where and not any(_wanted(key, args.where) for op in ops for key in tuning(op).keys(platform)):
        parser.error(f"--where {' --where '.join(args.where)}: no key has that")
    if args.take:
        if not args.take.is_file():
            parser.error(f"--take {args.take}: there is no such file; --out makes one")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    try:
        if args.take:
            return _written(best(Log(args.take).read()[0]))
        if args.out is None:
            tried, topology = [], _topology(args)
            for op in ops:
                keys = [key for key in tuning(op).keys(platform_of(topology)) if _wanted(key, args.where)]
                tried += [a for key in keys for a in attempts(op, topology, key, args.limit)]
        else:
            log = Log(args.out)
            if args.worker is not None:
                _work(args, ops, log, args.worker)
                return 0
            for lost in log.read()[1]:
                if lost["times"] > 1:  # once may have been the end of the run
                    log.give_up(lost)
            if not _several(args, argv, log):
                return REFUSED
            tried = log.read()[0]
    except KernelError as e:
        print(f"tune: {e}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"interrupted{f'; {args.out} has what was tried' if args.out else ''}", file=sys.stderr)
        return 130
    found = best(tried)
    if args.write:
        return _written(found)
    return 0 if any(found.values()) else 1


def _written(found: dict[str, list[dict[str, Any]]]) -> int:
    """Writes entries, none that was only compiled over one that was measured."""
    for op, entries in found.items():
        measured = [(e["device"], e["key"]) for e in tiles.entries(op) if e["from"].startswith("measured")]
        kept = [e for e in entries if e["from"] == "compiled" and (e["device"], e["key"]) in measured]
        if kept:
            print(f"{op}: {len(kept)} that were measured stay, which these were only compiled against")
        if better := [e for e in entries if e not in kept]:
            print(f"{len(better)} entries into {tiles.write(op, better)}")
    return 0 if any(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
