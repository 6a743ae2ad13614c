"""`jaxscale launch`: the processes of a run on this machine, begun again from the last good step when one is lost."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from jaxscale.commands.shared import TEXT
from jaxscale.errors import LOST, MISTAKE, ConfigError
from jaxscale.import_path import python_path
from jaxscale.interrupts import STOPS, handled_signals

GRACE = 15.0
"""Seconds that the other processes have, once one has failed, to say so and to end."""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "launch",
        help="run several processes on this machine; begin again when one is lost",
        description="Runs a command as N processes of this machine that form one run. When one of them is lost, the "
        "others say so and\nend, and all begin again from the last finished checkpoint. On a cluster SLURM or "
        "Kubernetes does this (see docs/start/install.md).",
        epilog="  jaxscale launch --nproc 2 -- train experiments/demo.gin --devices 4 --gin.train.checkpoint_every=50",
        formatter_class=TEXT,
    )
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument("--restarts", type=int, default=3, metavar="R", help="begin again at most R times (default 3)")
    parser.add_argument(
        "--fewer",
        action="store_true",
        help="begin again with as many processes as are left; needs a mesh that fits them, as data=-1",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- train ...", help="the command")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if bindings:
        raise ConfigError(f"what is trained comes after --: jaxscale launch --nproc {args.nproc} -- train ... --gin...")
    if words[:1] != ["train"]:
        raise ConfigError(f"jaxscale launch runs train, not '{' '.join(words[:1])}': launch --nproc 2 -- train CONFIG")
    if any(word.startswith("--distributed") for word in words):
        raise ConfigError("--distributed is what jaxscale launch gives to each process; leave it out")
    for name, least in (("nproc", 1), ("restarts", 0)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be at least {least}")
    train = [sys.executable, "-P", "-m", "jaxscale", *words]
    again = [] if "--resume" in words or "--continue" in words else ["--continue"]

    def command(count: int, process: int, address: str, attempt: int) -> list[str]:
        own = ["--distributed", f"{address},{count},{process}"] if count > 1 else []
        return [*train, *(again if attempt else []), *own]

    return supervise(command, args.nproc, restarts=args.restarts, fewer=args.fewer)


def supervise(
    command: Callable[[int, int, str, int], Sequence[str]],
    processes: int,
    *,
    restarts: int,
    fewer: bool,
    grace: float = GRACE,
) -> int:
    """Runs processes until all have ended well, and begins again when one has not.

    A signal to end is passed on to all of them, and nothing begins again after it, nor after one that only a process
    got and that stopped the run. A mistake (exit code 2) stays one
    when it is made again; but where the last attempt had fewer processes than the one before, still fewer are tried.

    Args:
      command: (processes, process, address of process 0, attempt) -> what one process runs.
      processes: how many at first.
      restarts: how often to begin again.
      fewer: whether to begin again without those that were lost.
      grace: seconds between the first failure and the end of all.

    Returns:
      0, or the exit code of a process that failed.
    """
    count, attempt, reduced = processes, 0, False
    with _Signals() as signals:
        while True:
            address = f"127.0.0.1:{_free_port()}"
            commands = [command(count, i, address, attempt) for i in range(count)]
            failure = _Group(commands, signals).wait(grace)
            if failure is None or signals.asked or failure.stopped:
                return 0 if failure is None else failure.code
            if failure.code == MISTAKE and not (reduced and count > 1):
                return MISTAKE
            if failure.code == MISTAKE:
                _say(f"{count} processes do not fit this run; {count - 1} are tried")
                count -= 1
                continue
            if attempt == restarts:
                _say(f"{failure.text}; it was begun again {restarts} times, which is as often as --restarts allows")
                return failure.code
            attempt += 1
            left = max(count - failure.lost, 1) if fewer else count
            count, reduced = left, left < count
            _say(f"{failure.text}; beginning again ({attempt} of {restarts}) with {_processes(count)}")


class Failure(NamedTuple):
    """Of an attempt.

    Args:
      text: which process failed first, and how.
      code: its exit code, above 0.
      lost: how many did not end by themselves, at least one.
      stopped: whether a signal asked the run to stop, and it did so with a checkpoint.
    """

    text: str
    code: int
    lost: int
    stopped: bool = False


class _Group:
    """The processes of one attempt."""

    def __init__(self, commands: Sequence[Sequence[str]], signals: _Signals):
        # a group of their own: a Ctrl-C of the terminal reaches them through us, and once
        environment = {**os.environ, "PYTHONPATH": python_path()}
        begin = lambda c: subprocess.Popen(c, stderr=subprocess.PIPE, process_group=0, env=environment)  # noqa: E731
        self.all = [begin(c) for c in commands]
        relay = lambda i, p: threading.Thread(target=_relay, args=(i, p.stderr), daemon=True)  # noqa: E731
        self.relays = [relay(i, p) for i, p in enumerate(self.all)]
        for thread in self.relays:
            thread.start()
        signals.reach(self.all)

    def wait(self, grace: float) -> Failure | None:
        """What failed first, once none is running any more."""
        first, until = None, float("inf")
        while None in (codes := [p.poll() for p in self.all]):
            if first is None:
                first = next(((i, code) for i, code in enumerate(codes) if code), None)
                until = until if first is None else time.monotonic() + grace
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        stuck = [p for p in self.all if p.poll() is None]
        for p in stuck:
            p.kill()
            p.wait()
        for thread in self.relays:
            thread.join(1.0)
        failed = [(i, p.returncode) for i, p in enumerate(self.all) if p.returncode and p not in stuck]
        if not failed:
            return None
        # who was lost says more than who ended because of that
        lost = [f for f in (first, *failed) if f is not None and f[1] not in (MISTAKE, LOST)]
        count = max(len(stuck) + len(set(lost)), 1)
        if stuck and not lost:
            return Failure(f"process {self.all.index(stuck[0])} did not end, and was killed", failed[0][1], count)
        who, code = (lost or failed)[0]
        if code < 0:
            return Failure(f"process {who} was ended by {signal.Signals(-code).name}", 128 - code, count)
        return Failure(f"process {who} ended with exit code {code}", code, count, code in STOPS.values())


class _Signals:
    """While inside, SIGINT and SIGTERM go to the processes."""

    def __init__(self) -> None:
        self.asked = 0
        self.group: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Signals:
        self.previous = {one: signal.signal(one, self._pass_on) for one in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for one, old in self.previous.items():
            signal.signal(one, old)

    def reach(self, group: list[subprocess.Popen[bytes]]) -> None:
        """From now on these get them, and what came just before."""
        self.group = group
        if self.asked:
            self._pass_on(self.asked, None)

    def _pass_on(self, number: int, _: object) -> None:
        self.asked = number
        for p in self.group:
            p.send_signal(number)  # which it does not send to one that has ended


def _relay(process: int, errors: IO[bytes]) -> None:
    for line in errors:
        sys.stderr.write(f"[{process}] {line.decode(errors='replace')}")
        sys.stderr.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _say(text: str) -> None:
    print(f"jaxscale launch: {text}", file=sys.stderr, flush=True)
