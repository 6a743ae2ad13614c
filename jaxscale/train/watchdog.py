"""Seeing within seconds that another process has died, stopped or stands still: nobody waits for ever in a collective.

Every process tells process 0 once a second where it is, over a connection of its own that owes nothing to JAX, whose
own heartbeats take a minute and know nothing of a process that is alive and stuck. Process 0 judges, tells all, and
each process leaves one report and ends itself: its main thread may never come back from where it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale.errors import LOST, MISTAKE, JaxscaleError
from jaxscale.step.watchdog import BEAT, Watchdog
from jaxscale.train.listener import Coordinator, Listener, connect, lines, listen_address, machine, new_token

FEW = 64
"""Up to as many processes are told of each phase of process 0 as it begins; more hear of it once a second."""

GRACE = 2.0
"""Seconds in which the cause of an exception may still come to light: who waits for a dead process gets an error."""

_ARRIVE = 5.0
"""Seconds in which all processes may name their machines; after them, they count as being on several."""


@contextlib.contextmanager
def watching(
    settings: Watchdog, run: Path, steps: Callable[[], list[int]], ended: Callable[[], None]
) -> Iterator[Watch]:
    """Watches while inside; where several processes run, an error raised inside ends all of them.

    Args:
      settings: when a process counts as lost.
      run: the run's folder; what is found goes into its `failures.jsonl`, too.
      steps: of the checkpoints there are.
      ended: called in process 0 before it ends because of a failure.
    """
    if jax.process_count() == 1:
        yield Watch()
        return
    watch = _Member(settings, run, steps, ended)
    try:
        yield watch
    except BaseException as e:
        watch.failed(e)
        raise
    watch.leave()


@contextlib.contextmanager
def preparing(settings: Watchdog) -> Iterator[None]:
    """Ends this process if what is inside, which may wait for other processes, takes longer than `first`."""
    if jax.process_count() == 1:
        yield
        return
    timer = threading.Timer(settings.first, _too_long, (settings.first,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watch:
    """Told what a process does; this one, of a single process, needs to know nothing."""

    def phase(self, step: int, name: str, *, disk: bool = False) -> None:
        """What is being done from now on, and for which step; `disk` where it may wait for one."""


@dataclasses.dataclass
class Seen:
    """What process 0 knows of another (or itself).

    Args:
      at: how many phases it has been through.
      step, phase: where it is.
      since: when that began, seconds of the monotonic clock.
      limit: how long it may take.
      heard: when it last gave a sign of life.
      raised: the error that it met.
      code: what it wants to exit with.
      ended: whether its connection closed without a word.
      left: whether it came to the end.
    """

    at: int = 0
    step: int = 0
    phase: str = "start"
    since: float = 0.0
    limit: float = 0.0
    heard: float = dataclasses.field(default_factory=time.monotonic)
    raised: str = ""
    code: int = LOST
    ended: bool = False
    left: bool = False

    @property
    def where(self) -> str:
        """In words."""
        return f"in step {self.step}, phase '{self.phase}'"


class Verdict(NamedTuple):
    """What process 0 finds.

    Args:
      text: a sentence that names the process to blame, its step and its phase.
      code: what all processes are to exit with.
      early: whether a better one may come.
    """

    text: str
    code: int = LOST
    early: bool = False


def verdict(all_seen: Sequence[Seen], silent: float, now: float) -> Verdict | None:
    """Who is to blame, if anybody: who is gone before who is silent, who raised, who keeps the others waiting.

    Args:
      all_seen: of every process.
      silent: seconds without a sign of life that are too many.
      now: on the clock that `Seen` is told in.
    """
    here = [(p, s) for p, s in enumerate(all_seen) if not s.left]
    for p, s in here:
        if s.ended:
            return Verdict(f"process {p} ended without a word {s.where}")
    for p, s in here:
        if now - s.heard > silent:
            return Verdict(f"process {p} has given no sign of life for {now - s.heard:.0f} s, {s.where}")
    raised = [(p, s) for p, s in here if s.raised]
    if raised:
        from_jax = ("XlaRuntimeError", "JaxRuntimeError", "ValueError: UNKNOWN")  # what a broken collective raises
        p, s = min(raised, key=lambda r: (r[1].raised.startswith(from_jax), r[0]))
        return Verdict(f"process {p} raised {s.raised}, {s.where}", s.code, early=True)
    if not here:
        return None
    p, s = min(here, key=lambda r: r[1].at)  # all go through the same phases: who is behind keeps the others waiting
    if not s.limit or now - s.since <= s.limit:
        return None
    alike = len(here) > 1 and all(t.at == s.at for _, t in here)
    who = f"none of {len(here)} processes gets on" if alike else f"process {p} does not get on"
    return Verdict(f"{who}: {now - s.since:.0f} s {s.where}")


class _Member(Watch):
    """One process's side, and process 0's judgement."""

    def __init__(self, settings: Watchdog, run: Path, steps: Callable[[], list[int]], ended: Callable[[], None]):
        self.settings, self.run, self.steps, self.ended = settings, run, steps, ended
        self.me, self.count = jax.process_index(), jax.process_count()
        self.now = (0, "start", 0, time.monotonic())  # how many phases there were, the phase, the step, since when
        self.disk = False
        self.took: dict[str, list[float]] = {}
        self.error, self.code = "", LOST
        self.raised: BaseException | None = None
        self.over = threading.Event()
        self.hub_was = "before its first step"
        self.sending, self.ending = threading.Lock(), threading.Lock()
        self.seen = [Seen() for _ in range(self.count)]
        self.members: dict[int, socket.socket] = {}
        coordinator = Coordinator("watchdog")
        coordinator.put(self.me, machine())
        if self.me == 0:
            token, host = new_token(), listen_address(_machines(coordinator, self.count), coordinator.address)
            self.listener = Listener(host, token, self.count, self._hear)
            coordinator.put("hub", json.dumps([host, self.listener.port, token]))
            self._thread(self._judge)
        else:
            host, port, token = json.loads(coordinator.get("hub", 300))
            self.hub = connect(host or coordinator.host, port, token, 30)
            self.hub.settimeout(None)
            self._thread(self._listen_to_hub)
            self._thread(self._guard_hub)
        self._thread(self._beat)

    # --- what the loop calls

    def phase(self, step: int, name: str, *, disk: bool = False) -> None:
        """Notes how long the last phase took, and tells what comes now."""
        at, last, _, since = self.now
        now = time.monotonic()
        took = self.took.get(last, [])
        self.took[last] = [*took[:1], max([now - since, *took[1:]])]  # the first time, then the longest of the others
        self.now, self.disk = (at + 1, name, step, now), disk
        self._send_beat()
        if self.me == 0 and self.count <= FEW:
            self._tell({"where": self._where()})

    def leave(self) -> None:
        """The end was reached: this process is not missed from here on."""
        self.over.set()
        self._send_beat(left=True)
        self._tell({"left": True})

    def failed(self, e: BaseException) -> None:
        """Something was raised: it may be the cause of what others meet, or come of it. Does not return."""
        self.raised = e
        self.code = MISTAKE if isinstance(e, JaxscaleError) else LOST
        self.error = f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0][:300]}"
        self._send_beat()
        time.sleep(self.settings.silent + self.settings.stuck)  # the judgement ends this process
        self._end(f"process {self.me} raised {self.error}, and no other answered", self.code)

    # --- beats

    def _thread(self, what: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=what, args=args, daemon=True).start()

    def _message(self, **more: Any) -> dict[str, Any]:
        at, name, step, since = self.now
        _, *took = self.took.get(name, [0.0])
        least = self.settings.disk if self.disk else self.settings.stuck
        limit = max(least, 20 * took[0]) if took else self.settings.first
        told = {"process": self.me, "at": at, "step": step, "phase": name, "age": time.monotonic() - since}
        return told | {"limit": limit, "error": self.error, "code": self.code} | more

    def _send_beat(self, **more: Any) -> None:
        message = self._message(**more)
        if self.me == 0:
            self._heard(message)
            return
        with contextlib.suppress(OSError), self.sending:
            self.hub.sendall(_line(message))

    def _beat(self) -> None:
        while not self.over.is_set():
            self._send_beat()
            time.sleep(BEAT)

    # --- process 0

    def _hear(self, member: socket.socket) -> None:
        process = None
        with contextlib.suppress(OSError, ValueError):
            for line in lines(member):
                told = json.loads(line)
                process = int(told["process"])
                self.members[process] = member
                self._heard(told)
        if process is not None and not self.seen[process].left:
            self.seen[process].ended = True

    def _heard(self, told: dict[str, Any]) -> None:
        seen, now = self.seen[told["process"]], time.monotonic()
        seen.at, seen.step, seen.phase, seen.heard = told["at"], told["step"], told["phase"], now
        seen.since, seen.limit = now - told["age"], told["limit"]
        seen.left = seen.left or told.get("left", False)
        seen.raised, seen.code = told["error"], told["code"]

    def _tell(self, message: dict[str, Any]) -> None:
        """Says something to all others."""
        for member in list(self.members.values()):
            with contextlib.suppress(OSError):
                member.sendall(_line(message))

    def _judge(self) -> None:
        first, told = None, 0.0
        while not self.over.is_set():
            time.sleep(BEAT / 4)
            if time.monotonic() - told > BEAT:
                told = time.monotonic()
                self._tell({"where": self._where()})
            found = verdict(self.seen, self.settings.silent, time.monotonic())
            if found and first is None:
                first = time.monotonic()
            # an exception may be what a process meets whose neighbour has gone
            if found and (not found.early or time.monotonic() - first > GRACE):  # type: ignore[operator]
                self._tell({"verdict": found.text, "code": found.code})
                self._end(found.text, found.code)

    # --- the others

    def _listen_to_hub(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in lines(self.hub):
                told = json.loads(line)
                self.seen[0].heard = time.monotonic()
                self.seen[0].left |= told.get("left", False)
                self.hub_was = told.get("where", self.hub_was)
                if "verdict" in told:
                    self._end(told["verdict"], told["code"])
        if not self.seen[0].left:
            self._end(f"process 0 ended without a word {self.hub_was}")

    def _guard_hub(self) -> None:
        while not self.over.is_set() and not self.seen[0].left:
            time.sleep(BEAT)
            silent = time.monotonic() - self.seen[0].heard
            if silent > self.settings.silent:
                self._end(f"process 0 has given no sign of life for {silent:.0f} s, {self.hub_was}")

    def _where(self) -> str:
        _, name, step, _ = self.now
        return f"in step {step}, phase '{name}'"

    # --- the end

    def _end(self, verdict: str, code: int = LOST) -> None:
        with self.ending:
            if self.over.is_set():
                return
            self.over.set()
            _exit_in(GRACE, code)  # even if the disk does not answer
            steps = self.steps()
            last = f"the last finished checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
            report = f"jaxscale: {verdict}; process {self.me} was {self._where()} and ends; {last}: {self.run}"
            if self.raised is not None and code != MISTAKE and verdict.startswith(f"process {self.me} "):
                import traceback

                traceback.print_exception(self.raised)
            print(f"\n{report}", file=sys.stderr, flush=True)
            row = {"time": time.time(), "verdict": verdict, "process": self.me, "where": self._where()}
            with contextlib.suppress(OSError), (self.run / "failures.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if self.me == 0:
                with contextlib.suppress(Exception):
                    self.ended()
            sys.stdout.flush()
            os._exit(code)  # its main thread may wait in a collective for ever


def _line(message: dict[str, Any]) -> bytes:
    return (json.dumps(message) + "\n").encode()


def _machines(coordinator: Coordinator, count: int) -> list[str | None]:
    """The machine of each process; `None` from the first on that has not come within `_ARRIVE` seconds."""
    until = time.monotonic() + _ARRIVE
    found: list[str | None] = [None] * count
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for process in range(count):
            found[process] = coordinator.get(process, until - time.monotonic())
    return found


def _exit_in(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _too_long(seconds: float) -> None:
    text = f"process {jax.process_index()} did not come to its first step within {seconds:.0f} s and ends"
    print(f"\njaxscale: {text}", file=sys.stderr, flush=True)
    os._exit(LOST)
