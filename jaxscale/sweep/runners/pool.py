"""Runs trials in worker processes on this machine, each worker one trial after another."""

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
    """A process that runs one trial after another.

    It ends when its standard input closes, which happens however this process ends.
    """

    def __init__(self) -> None:
        # a process group of its own: Ctrl-C in the terminal reaches only the sweep, which stops each trial
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxscale.sweep.worker", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            process_group=0,
        )
        self.task: Task | None = None
        threading.Thread(target=self._answers, daemon=True).start()

    def start(self, job: Job) -> Task:
        """Start a job in the process."""
        task = self.task = Task(self)
        self.send(f"job {write_job(job).resolve()}")
        return task

    def send(self, line: str) -> None:
        """Send a command; see `jaxscale.sweep.worker`."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died, which `Task.alive` reports
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _answers(self) -> None:
        assert self.process.stdout is not None
        for _ in self.process.stdout:
            task, self.task = self.task, None  # before `done`, after which this worker may get its next job
            assert task is not None
            task.done = True


class Task:
    """A handle on a job of a worker.

    Args:
      worker: the worker.
    """

    def __init__(self, worker: Worker):
        self.worker, self.done = worker, False

    def alive(self) -> bool:
        """Whether the job still runs."""
        return not self.done and self.worker.process.poll() is None

    def stop(self, id: int) -> None:
        """Tell the worker to stop its trial."""
        self.worker.send(f"stop {id}")

    def why(self) -> str:
        """How the worker died, such as "ended by SIGKILL"."""
        code = self.worker.process.poll()
        if code is None or self.done:
            return ""
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@register
@dataclasses.dataclass(frozen=True)
class Pool:
    """Worker processes on this machine. A worker that dies is replaced, and its trial is tried again.

    Args:
      workers: number of processes.

    Raises:
      ConfigError: fewer than one.
    """

    workers: int = 2
    _all: list[Worker] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"Pool.workers = {self.workers}: must be at least 1")

    def slots(self) -> int:
        """Return the number of workers."""
        return self.workers

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return each job as a group of its own."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Task:
        """Start a job on an idle worker, or on a new one."""
        [job] = jobs
        self._all[:] = [w for w in self._all if w.process.poll() is None]
        idle = next((w for w in self._all if w.task is None), None)
        if idle is None:
            idle = Worker()
            self._all.append(idle)
        return idle.start(job)

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._all:
            worker.process.kill()
            worker.process.wait()
        self._all.clear()
