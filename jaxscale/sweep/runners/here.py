"""Runs in this process, one at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from jaxscale.config import register
from jaxscale.sweep.base import Job
from jaxscale.sweep.jobs import run_job


class Thread:
    """A handle on a job that runs in a thread of this process."""

    def __init__(self, job: Job):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=run_job, args=(job,), kwargs={"stop": self._stop.is_set}, daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """See `Handle`."""
        return self._thread.is_alive()

    def stop(self, id: int) -> None:
        """See `Handle`."""
        self._stop.set()

    def why(self) -> str:
        """See `Handle`."""
        return ""


@register
@dataclasses.dataclass(frozen=True)
class Here:
    """This process, one run at a time, in a thread beside the one that looks after the sweep."""

    def slots(self) -> int:
        """See `Runner`."""
        return 1

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """See `Runner`."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Thread:
        """See `Runner`."""
        [job] = jobs
        return Thread(job)

    def close(self) -> None:
        """See `Runner`; a thread cannot be ended, and ends with the process."""
