"""Runs trials in this process, one at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxscale.config import register
from jaxscale.sweep.base import Job
from jaxscale.sweep.jobs import run_job
from jaxscale.sweep.runners.threads import Threads


@register
@dataclasses.dataclass(frozen=True)
class Here:
    """This process, one run at a time, in a thread beside the one that runs the sweep."""

    def slots(self) -> int:
        """Return 1."""
        return 1

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """Return each job as a group of its own."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Threads:
        """Start a job in a new thread."""
        [job] = jobs
        return Threads({job.trial.id: functools.partial(run_job, job)})

    def close(self) -> None:
        """Do nothing: a thread ends with the process."""
