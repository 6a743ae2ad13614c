"""`jaxscale launch`: runs several processes of one run on this machine, and restarts them when one is lost.

With `--on` it writes what a cluster reads: see `jaxscale.commands.launch_on`.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from jaxscale.commands import launch_on
from jaxscale.commands.shared import TEXT
from jaxscale.errors import LOST, MISTAKE, ConfigError
from jaxscale.import_path import python_path
from jaxscale.interrupts import STOPS, handled_signals

GRACE = 15.0
"""Seconds from the first failure of a process until the others are killed; they print a message and end before that."""

RESTARTS = 3
"""How often to restart by default."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "launch",
        help="run several processes on this machine, or write what a cluster reads to run on many",
        description="With --nproc: runs a command as N processes on this machine that form one run. When one of them "
        "is lost, the others\nprint that and end, and all are restarted from the last complete checkpoint.\n"
        "With --on: writes the file with which a cluster starts the run on all its hosts and restarts it.",
        epilog="  jaxscale launch --nproc 2 -- train experiments/demo.gin --devices 4 "
        "--gin.train.checkpoint_every=50\n"
        "  jaxscale launch --on slurm experiments/llama3_8b.gin --topology h100:16 --mesh fsdp=-1 --run /shared/run-1",
        formatter_class=TEXT,
    )
    after = type(parser)(prog=parser.prog)  # for options that follow the name of the gin file
    _options(parser)
    _options(after)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- train ... | CONFIG", help="command or gin file")
    after.add_argument("config", nargs="?")
    parser.set_defaults(run_command=functools.partial(run, after))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, metavar="N", help="how many processes")
    parser.add_argument(
        "--restarts", type=int, metavar="R", help="restart at most R times after failures (default 3; with --on 20)"
    )
    parser.add_argument(
        "--fewer",
        action="store_true",
        help="restart with the processes that are left; needs a mesh for any number of devices, such as data=-1",
    )
    launch_on.options(parser)


def run(after: argparse.ArgumentParser, args: argparse.Namespace, bindings: list[str]) -> int:
    """Launch the processes, or write a file for a cluster; returns the exit code."""
    if args.on is not None or "--on" in args.words[: args.words.index("--") if "--" in args.words else None]:
        return launch_on.run(after.parse_args(args.words, args), bindings)
    for name in launch_on.NAMES:
        if getattr(args, name):
            raise ConfigError(f"--{name} is an option of --on; add --on SYSTEM, such as --on slurm, or leave it out")
    if args.nproc is None:
        raise ConfigError("say where to run: --nproc 2 -- train CONFIG on this machine, or --on slurm CONFIG")
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if bindings:
        raise ConfigError(f"put --gin options after --: jaxscale launch --nproc {args.nproc} -- train ... --gin...")
    if words[:1] != ["train"]:
        raise ConfigError(f"jaxscale launch runs train, not '{' '.join(words[:1])}': launch --nproc 2 -- train CONFIG")
    if any(word.startswith("--distributed") for word in words):
        raise ConfigError("jaxscale launch passes --distributed to each process; leave it out")
    restarts = RESTARTS if args.restarts is None else args.restarts
    for name, least, value in (("nproc", 1, args.nproc), ("restarts", 0, restarts)):
        if value < least:
            raise ConfigError(f"--{name} {value}: must be at least {least}")
    train = [sys.executable, "-P", "-m", "jaxscale", *words]
    again = [] if "--resume" in words or "--continue" in words else ["--continue"]

    def command(count: int, process: int, address: str, attempt: int) -> list[str]:
        own = ["--distributed", f"{address},{count},{process}"] if count > 1 else []
        return [*train, *(again if attempt else []), *own]

    return supervise(command, args.nproc, restarts=restarts, fewer=args.fewer)


def supervise(
    command: Callable[[int, int, str, int], Sequence[str]],
    processes: int,
    *,
    restarts: int,
    fewer: bool,
    grace: float = GRACE,
) -> int:
    """Run processes until all have succeeded, and restart them when one fails.

    SIGINT and SIGTERM are passed on to all processes. There is no restart after such a signal, also if a single
    process got it and stopped the run with a checkpoint. Errors of the user (exit code 2) are not retried, except
    that after a restart with fewer processes a smaller number is tried.

    Args:
      command: (processes, process, address of process 0, attempt) -> command line of one process.
      processes: number of processes of the first attempt.
      restarts: how often to restart at most.
      fewer: whether to restart without the processes that were lost.
      grace: seconds from the first failure until the other processes are killed.

    Returns:
      0, or the exit code of a process that failed.
    """
    count, attempt, reduced = processes, 0, False
    with _Signals() as signals:
        while True:
            address = f"127.0.0.1:{_free_port()}"
            commands = [command(count, i, address, attempt) for i in range(count)]
            failure = _Group(commands, signals).wait(grace)
            if failure is None or signals.received or failure.stopped:
                return 0 if failure is None else failure.code
            if failure.code == MISTAKE and not (reduced and count > 1):
                return MISTAKE
            if failure.code == MISTAKE:
                _say(f"{count} processes do not fit this run; trying {count - 1}")
                count -= 1
                continue
            if attempt == restarts:
                _say(f"{failure.text}; giving up after {restarts} restarts (--restarts)")
                return failure.code
            attempt += 1
            left = max(count - failure.lost, 1) if fewer else count
            count, reduced = left, left < count
            _say(f"{failure.text}; restart {attempt} of {restarts} with {_processes(count)}")


class Failure(NamedTuple):
    """How an attempt failed.

    Args:
      text: which process failed first, and how, for a message.
      code: its exit code, above 0.
      lost: number of processes that crashed or were killed, at least one.
      stopped: whether a signal asked the run to stop, and it did so with a checkpoint.
    """

    text: str
    code: int
    lost: int
    stopped: bool = False


class _Group:
    """The processes of one attempt."""

    def __init__(self, commands: Sequence[Sequence[str]], signals: _Signals):
        # A process group of their own: Ctrl-C in the terminal reaches them only through us, and only once.
        environment = {**os.environ, "PYTHONPATH": python_path()}
        self.all = [
            subprocess.Popen(words, stderr=subprocess.PIPE, process_group=0, env=environment) for words in commands
        ]
        self.relays = [threading.Thread(target=_relay, args=(i, p.stderr), daemon=True) for i, p in enumerate(self.all)]
        for thread in self.relays:
            thread.start()
        signals.reach(self.all)

    def wait(self, grace: float) -> Failure | None:
        """Wait for all processes, and return the first failure, or None."""
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
        # A process that crashed explains more than those that ended because of it.
        lost = [f for f in (first, *failed) if f is not None and f[1] not in (MISTAKE, LOST)]
        count = max(len(stuck) + len(set(lost)), 1)
        if stuck and not lost:
            return Failure(f"process {self.all.index(stuck[0])} did not end and was killed", failed[0][1], count)
        who, code = (lost or failed)[0]
        if code < 0:
            return Failure(f"process {who} was killed by {signal.Signals(-code).name}", 128 - code, count)
        return Failure(f"process {who} ended with exit code {code}", code, count, code in STOPS.values())


class _Signals:
    """Context manager that passes SIGINT and SIGTERM on to the processes."""

    def __init__(self) -> None:
        self.received = 0
        self.group: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Signals:
        self.previous = {one: signal.signal(one, self._pass_on) for one in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for one, old in self.previous.items():
            signal.signal(one, old)

    def reach(self, group: list[subprocess.Popen[bytes]]) -> None:
        """Send signals to these processes from now on, also one that was received before they started."""
        self.group = group
        if self.received:
            self._pass_on(self.received, None)

    def _pass_on(self, number: int, _: object) -> None:
        self.received = number
        for p in self.group:
            p.send_signal(number)  # Popen sends nothing to a process that has ended


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
