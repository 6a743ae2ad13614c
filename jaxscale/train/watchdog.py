"""Detect within seconds that a process has died or is stuck, so that the others do not wait for ever in a collective.

Every process sends process 0 a heartbeat once a second, with its step and phase, over a socket of its own: JAX's
heartbeats take a minute and do not notice a process that is alive but stuck. Process 0 chooses the failed process and
tells all others; each process then prints one report and exits, since its main thread may never return from a
collective.
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

from jaxscale.errors import LOST, JaxscaleError
from jaxscale.step.watchdog import BEAT, Watchdog
from jaxscale.train.listener import Coordinator, Listener, connect, lines, listen_address, machine, new_token
from jaxscale.working_copy import as_named

FEW = 64
"""With at most this many processes, process 0 sends them each of its phases at once; with more, once a second."""

GRACE = 2.0
"""Seconds to wait for the cause of an exception: a process that waits for a dead one raises an error, too."""

_ARRIVE = 5.0
"""Seconds that all processes have to name their machines; after that, they are treated as being on several."""


@contextlib.contextmanager
def watching(
    settings: Watchdog, run: Path, steps: Callable[[], list[int]], on_failure: Callable[[], None]
) -> Iterator[Watch]:
    """Watch all processes while the context is active; with several, an error raised inside ends all of them.

    Args:
      settings: when a process counts as lost.
      run: the run's folder, to whose `failures.jsonl` failures are appended.
      steps: returns the steps of the finished checkpoints.
      on_failure: called in process 0 before it exits because of a failure.
    """
    if jax.process_count() == 1:
        yield Watch()
        return
    watch = _Member(settings, run, steps, on_failure)
    try:
        yield watch
    except BaseException as e:
        watch.failed(e)
        raise
    watch.leave()


@contextlib.contextmanager
def preparing(settings: Watchdog) -> Iterator[None]:
    """End this process if the context, which may wait for other processes, takes longer than `settings.first`."""
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
    """Watches a single process: does nothing."""

    def phase(self, step: int, name: str, *, disk: bool = False) -> None:
        """Report that a phase of a step begins.

        Args:
          step: the step.
          name: the phase.
          disk: whether it may wait for a disk, and so take longer.
        """


@dataclasses.dataclass
class Status:
    """What process 0 knows of a process.

    Args:
      phases: how many phases it has begun.
      step: the step it is in.
      phase: the phase it is in.
      since: when that phase began, in seconds of the monotonic clock.
      limit: seconds that the phase may take; 0 for no limit.
      last_beat: when its last heartbeat arrived.
      error: the error that it raised.
      code: its exit code for that error.
      disconnected: whether its connection closed before it finished.
      finished: whether it finished the run.
    """

    phases: int = 0
    step: int = 0
    phase: str = "start"
    since: float = 0.0
    limit: float = 0.0
    last_beat: float = dataclasses.field(default_factory=time.monotonic)
    error: str = ""
    code: int = LOST
    disconnected: bool = False
    finished: bool = False

    @property
    def where(self) -> str:
        """Step and phase, for a message."""
        return f"in step {self.step}, phase '{self.phase}'"


class Verdict(NamedTuple):
    """Which process failed.

    Args:
      text: names the failed process, its step and its phase.
      code: the exit code for all processes.
      early: whether the cause may still become known.
    """

    text: str
    code: int = LOST
    early: bool = False


def verdict(statuses: Sequence[Status], silent: float, now: float) -> Verdict | None:
    """Choose the failed process, if any: disconnected before silent before raised before stuck.

    Args:
      statuses: of every process.
      silent: seconds without a heartbeat after which a process counts as lost.
      now: the time, in seconds of the monotonic clock.
    """
    running = [(p, s) for p, s in enumerate(statuses) if not s.finished]
    for p, s in running:
        if s.disconnected:
            return Verdict(f"process {p} disconnected {s.where}")
    for p, s in running:
        if now - s.last_beat > silent:
            return Verdict(f"process {p} has sent no heartbeat for {now - s.last_beat:.0f} s, {s.where}")
    raised = [(p, s) for p, s in running if s.error]
    if raised:
        from_jax = ("XlaRuntimeError", "JaxRuntimeError", "ValueError: UNKNOWN")  # what a broken collective raises
        p, s = min(raised, key=lambda r: (r[1].error.startswith(from_jax), r[0]))
        return Verdict(f"process {p} raised {s.error}, {s.where}", s.code, early=True)
    if not running:
        return None
    p, s = min(running, key=lambda r: r[1].phases)  # all have the same phases: the others wait for the one behind
    if not s.limit or now - s.since <= s.limit:
        return None
    alike = len(running) > 1 and all(t.phases == s.phases for _, t in running)
    who = f"all {len(running)} processes are stuck" if alike else f"process {p} is stuck"
    return Verdict(f"{who}: {now - s.since:.0f} s {s.where}")


class _Member(Watch):
    """Sends this process's heartbeats and ends it when a process has failed; in process 0 also chooses which one."""

    def __init__(self, settings: Watchdog, run: Path, steps: Callable[[], list[int]], on_failure: Callable[[], None]):
        self.settings, self.run, self.steps, self.on_failure = settings, run, steps, on_failure
        self.me, self.count = jax.process_index(), jax.process_count()
        self.now = (0, "start", 0, time.monotonic())  # phases begun, current phase, step, start of the phase
        self.disk = False
        self.durations: dict[str, list[float]] = {}  # by phase: its first duration, and the longest of the others
        self.error, self.code = "", LOST
        self.raised: BaseException | None = None
        self.over = threading.Event()
        self.hub_was = "before its first step"
        self.sending, self.ending = threading.Lock(), threading.Lock()
        self.statuses = [Status() for _ in range(self.count)]
        self.members: dict[int, socket.socket] = {}
        coordinator = Coordinator("watchdog")
        coordinator.put(self.me, machine())
        if self.me == 0:
            token, host = new_token(), listen_address(_machines(coordinator, self.count), coordinator.address)
            self.listener = Listener(host, token, self.count, self._listen_to_member)
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
        """Record the duration of the last phase, and report that a new one begins."""
        phases, last, _, since = self.now
        now = time.monotonic()
        durations = self.durations.get(last, [])
        self.durations[last] = [*durations[:1], max([now - since, *durations[1:]])]
        self.now, self.disk = (phases + 1, name, step, now), disk
        self._send_beat()
        if self.me == 0 and self.count <= FEW:
            self._broadcast({"where": self._where()})

    def leave(self) -> None:
        """Report that this process has finished."""
        self.over.set()
        self._send_beat(finished=True)
        self._broadcast({"finished": True})

    def failed(self, e: BaseException) -> None:
        """Report an error, which may be the cause or the effect of another process's. Does not return."""
        self.raised = e
        self.code = e.code if isinstance(e, JaxscaleError) else LOST
        self.error = f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0][:300]}"
        self._send_beat()
        time.sleep(self.settings.silent + self.settings.stuck)  # process 0's verdict ends this process
        self._end(f"process {self.me} raised {self.error}, and process 0 did not answer", self.code)

    # --- heartbeats

    def _thread(self, what: Callable[..., None], *args: object) -> None:
        threading.Thread(target=what, args=args, daemon=True).start()

    def _message(self, **more: bool) -> dict[str, Any]:
        phases, name, step, since = self.now
        _, *longest = self.durations.get(name, [0.0])
        least = self.settings.disk if self.disk else self.settings.stuck
        limit = max(least, 20 * longest[0]) if longest else self.settings.first
        place = {"process": self.me, "phases": phases, "step": step, "phase": name, "age": time.monotonic() - since}
        return place | {"limit": limit, "error": self.error, "code": self.code} | more

    def _send_beat(self, **more: bool) -> None:
        message = self._message(**more)
        if self.me == 0:
            self._update_status(message)
            return
        with contextlib.suppress(OSError), self.sending:
            self.hub.sendall(_line(message))

    def _beat(self) -> None:
        while not self.over.is_set():
            self._send_beat()
            time.sleep(BEAT)

    # --- process 0

    def _listen_to_member(self, member: socket.socket) -> None:
        process = None
        with contextlib.suppress(OSError, ValueError):
            for line in lines(member):
                message = json.loads(line)
                process = int(message["process"])
                self.members[process] = member
                self._update_status(message)
        if process is not None and not self.statuses[process].finished:
            self.statuses[process].disconnected = True

    def _update_status(self, message: dict[str, Any]) -> None:
        status, now = self.statuses[message["process"]], time.monotonic()
        status.phases, status.step, status.phase = message["phases"], message["step"], message["phase"]
        status.last_beat, status.since, status.limit = now, now - message["age"], message["limit"]
        status.finished = status.finished or message.get("finished", False)
        status.error, status.code = message["error"], message["code"]

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all other processes."""
        for member in list(self.members.values()):
            with contextlib.suppress(OSError):
                member.sendall(_line(message))

    def _judge(self) -> None:
        first, last_broadcast = None, 0.0
        while not self.over.is_set():
            time.sleep(BEAT / 4)
            if time.monotonic() - last_broadcast > BEAT:
                last_broadcast = time.monotonic()
                self._broadcast({"where": self._where()})
            failure = verdict(self.statuses, self.settings.silent, time.monotonic())
            if failure and first is None:
                first = time.monotonic()
            # an exception may be the effect of another process's death
            if failure and (not failure.early or time.monotonic() - first > GRACE):  # type: ignore[operator]
                self._broadcast({"verdict": failure.text, "code": failure.code})
                self._end(failure.text, failure.code)

    # --- the others

    def _listen_to_hub(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in lines(self.hub):
                message = json.loads(line)
                self.statuses[0].last_beat = time.monotonic()
                self.statuses[0].finished |= message.get("finished", False)
                self.hub_was = message.get("where", self.hub_was)
                if "verdict" in message:
                    self._end(message["verdict"], message["code"])
        if not self.statuses[0].finished:
            self._end(f"process 0 disconnected {self.hub_was}")

    def _guard_hub(self) -> None:
        while not self.over.is_set() and not self.statuses[0].finished:
            time.sleep(BEAT)
            silent = time.monotonic() - self.statuses[0].last_beat
            if silent > self.settings.silent:
                self._end(f"process 0 has sent no heartbeat for {silent:.0f} s, {self.hub_was}")

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
            report = f"jaxscale: {verdict}; process {self.me} was {self._where()} and exits"
            print(f"\n{report}", file=sys.stderr, flush=True)  # first: a bucket may not answer
            last = "its checkpoints cannot be listed"
            with contextlib.suppress(JaxscaleError):
                steps = self.steps()
                last = f"the last finished checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
            own = self.raised is not None and not isinstance(self.raised, JaxscaleError)
            if own and verdict.startswith(f"process {self.me} "):
                import traceback

                traceback.print_exception(self.raised)
            print(f"{last}: {as_named(self.run)}", file=sys.stderr, flush=True)
            row = {"time": time.time(), "verdict": verdict, "process": self.me, "where": self._where()}
            with contextlib.suppress(OSError), (self.run / "failures.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if self.me == 0:
                with contextlib.suppress(Exception):
                    self.on_failure()
            sys.stdout.flush()
            os._exit(code)  # the main thread may wait in a collective for ever


def _line(message: dict[str, Any]) -> bytes:
    return (json.dumps(message) + "\n").encode()


def _machines(coordinator: Coordinator, count: int) -> list[str | None]:
    """The machine of each process; `None` from the first process on that names none within `_ARRIVE` seconds."""
    until = time.monotonic() + _ARRIVE
    machines: list[str | None] = [None] * count
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for process in range(count):
            machines[process] = coordinator.get(process, until - time.monotonic())
    return machines


def _exit_in(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _too_long(seconds: float) -> None:
    text = f"process {jax.process_index()} did not reach its first step within {seconds:.0f} s and exits"
    print(f"\njaxscale: {text}", file=sys.stderr, flush=True)
    os._exit(LOST)
