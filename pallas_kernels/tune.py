"""`python -m pallas_kernels.tune OP...`: finds ops' tiles for a device and writes them into their `tiles.json`.

Every candidate passes the compile gate first. Where the device is here, those that do are timed, the fastest is
"measured", and one whose result is another than the first one's is refused. Where it is not, the first to pass, in the
op's own order of preference, is "compiled".

    python -m pallas_kernels.tune --device h200 --jobs 12 --seconds 400 --out tried.jsonl   on the device: every op
    python -m pallas_kernels.tune --take tried.jsonl                                        its best, into the tables

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
from pallas_kernels.aot import GPUS, SMALLEST, kind_of
from pallas_kernels.dispatch import KernelError
from pallas_kernels.gate import operations
from pallas_kernels.trials import Attempt, attempts, best, platform_of, tuning

HANGS = 90.0
"""Seconds after which a candidate hangs."""


@dataclasses.dataclass(frozen=True)
class Log:
    """A file of attempts, a line each; one that was begun and has no result has none yet, or never will."""

    path: Path

    def add(self, one: Attempt | dict[str, Any]) -> None:
        """Appends a line, whole."""
        line = json.dumps(dataclasses.asdict(one) if isinstance(one, Attempt) else one)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> tuple[list[Attempt], list[dict[str, Any]]]:
        """What was tried, and what was begun and not finished."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        tried = [Attempt(**line) for line in lines if "begun" not in line]
        done = {_name(a.op, a.key, a.tile) for a in tried}
        begun = [line for line in lines if "begun" in line]
        return tried, [b for b in begun if _name(b["op"], b["key"], b["tile"]) not in done]

    def give_up(self, one: dict[str, Any], kind: str) -> None:
        """Records that a candidate took its process with it."""
        self.add(Attempt(one["op"], kind, one["key"], one["tile"], None, "its process ended or hung", "measured"))


def _name(op: str, key: dict[str, Any], tile: dict[str, Any]) -> str:
    return json.dumps([op, key, tile], sort_keys=True)


def _work(args: argparse.Namespace, ops: Sequence[str], log: Log, worker: int) -> None:
    """Tries every `jobs`-th key; what takes longer than the time is not begun."""
    end = time.monotonic() + args.seconds if args.seconds else None
    every = [(op, key) for op in ops for key in tuning(op).keys(platform_of(args.device)) if _wanted(key, args.where)]

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        with log.path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    for op, key in every[worker :: args.jobs]:
        tried, begun = log.read()
        known = [a.tile for a in tried if (a.op, a.key) == (op, key)]
        note = lambda tile, op=op, key=key: log.add(  # noqa: E731
            {"begun": time.time(), "worker": worker, "op": op, "key": key, "tile": tile}
        )
        if any(a.problem is None and a.seconds is None for a in tried if (a.op, a.key) == (op, key)):
            continue  # compiled before
        for one in attempts(op, args.device, key, args.limit, known=known, before=note, turn=turn):
            log.add(one)
            if end is not None and time.monotonic() > end:
                return


def _wanted(key: dict[str, Any], where: Sequence[str]) -> bool:
    return all(str(key.get(name)) == value for name, _, value in (w.partition("=") for w in where))


def _several(args: argparse.Namespace, argv: Sequence[str], log: Log) -> None:
    """Keeps `jobs` processes at work until each is through or the time is over."""
    end = time.monotonic() + args.seconds if args.seconds else None
    kind = kind_of(args.device)
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.85 / args.jobs:.3f}"}

    def start(worker: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pallas_kernels.tune", *argv, "--worker", str(worker)]
        return subprocess.Popen(command, env={**os.environ, **share})

    at_work = {worker: start(worker) for worker in range(args.jobs)}
    try:
        while at_work:
            time.sleep(0.3)
            over = end is not None and time.monotonic() > end
            begun = {line["worker"]: line for line in log.read()[1]}
            for worker, process in list(at_work.items()):
                at = begun.get(worker)
                if process.poll() is None and (over or (at and time.time() - at["begun"] > HANGS * args.jobs**0.5)):
                    process.kill()
                    process.wait()
                if process.poll() is not None:
                    del at_work[worker]
                    if at is not None and not over:
                        log.give_up(at, kind)
                        at_work[worker] = start(worker)
    finally:
        for process in at_work.values():
            process.kill()


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("op", nargs="*", help=f"of {', '.join(operations())}; all by default")
    parser.add_argument("--device", default="h200", choices=sorted({*GPUS, *SMALLEST}))
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
    if args.take:
        if not args.take.exists():
            parser.error(f"--take {args.take}: there is no such file; --out makes one")
        return _written(best(Log(args.take).read()[0]))
    try:
        if args.out is None:
            tried = []
            for op in ops:
                keys = [key for key in tuning(op).keys(platform_of(args.device)) if _wanted(key, args.where)]
                tried += [a for key in keys for a in attempts(op, args.device, key, args.limit)]
        else:
            log = Log(args.out)
            if args.worker is not None:
                _work(args, ops, log, args.worker)
                return 0
            for lost in log.read()[1]:
                log.give_up(lost, kind_of(args.device))
            _several(args, argv, log)
            tried = log.read()[0]
    except KernelError as e:
        print(f"tune: {e}", file=sys.stderr)
        return 2
    found = best(tried)
    if args.write:
        return _written(found)
    return 0 if any(found.values()) else 1


def _written(found: dict[str, list[dict[str, Any]]]) -> int:
    for op, entries in found.items():
        if entries:
            print(f"{len(entries)} entries into {tiles.write(op, entries)}")
    return 0 if any(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
