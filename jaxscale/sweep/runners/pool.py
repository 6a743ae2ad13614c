"""Runs in processes of this machine, each of which takes one trial after another."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.sweep.base import Job
from jaxscale.sweep.jobs import write_job
from jaxscale.sweep.programs import environment


class Worker:
    """A process that takes one trial after another.

    It ends when its standard input does, which happens however this process ends.
    """

    def __init__(self) -> None:
        # a group of its own: a Ctrl-C of the terminal is for the sweep, which asks each trial to stop
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxscale.sweep.worker", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            process_group=0,
        )
        self.has: Task | None = None
        threading.Thread(target=self._answers, daemon=True).start()

    def start(self, job: Job) -> Task:
        """Gives it a job."""
        task = self.has = Task(self)
        self.tell(f"job {write_job(job).resolve()}")
        return task

    def tell(self, line: str) -> None:
        """Says something to it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which shows
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _answers(self) -> None:
        assert self.process.stdout is not None
        for _ in self.process.stdout:
            task, self.has = self.has, None  # first: who sees that it is done may give this worker the next
            assert task is not None
            task.done = True


class Task:
    """A handle on a job that a worker has."""

    def __init__(self, worker: Worker):
        self.worker, self.done = worker, False

    def alive(self) -> bool:
        """See `Handle`."""
        return not self.done and self.worker.process.poll() is None

    def stop(self, id: int) -> None:
        """See `Handle`."""
        self.worker.tell(f"stop {id}")

    def why(self) -> str:
        """See `Handle`."""
        code = self.worker.process.poll()
        if code is None or self.done:
            return ""
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@register
@dataclasses.dataclass(frozen=True)
class Pool:
    """Processes of this machine. One that dies is a trial that is tried again, and is replaced.

    Args:
      workers: how many.

    Raises:
      ConfigError: fewer than one.
    """

    workers: int = 2
    _all: list[Worker] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"Pool.workers = {self.workers}: must be at least 1")

    def slots(self) -> int:
        """See `Runner`."""
        return self.workers

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """See `Runner`."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Task:
        """See `Runner`."""
        [job] = jobs
        self._all[:] = [w for w in self._all if w.process.poll() is None]
        idle = next((w for w in self._all if w.has is None), None)
        if idle is None:
            idle = Worker()
            self._all.append(idle)
        return idle.start(job)

    def close(self) -> None:
        """See `Runner`."""
        for worker in self._all:
            worker.process.kill()
            worker.process.wait()
        self._all.clear()
