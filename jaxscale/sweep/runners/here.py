"""Runs in this process, one at a time."""

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
    """This process, one run at a time, in a thread beside the one that looks after the sweep."""

    def slots(self) -> int:
        """See `Runner`."""
        return 1

    def together(self, jobs: Sequence[Job]) -> Sequence[Sequence[Job]]:
        """See `Runner`."""
        return [[job] for job in jobs]

    def start(self, jobs: Sequence[Job]) -> Threads:
        """See `Runner`."""
        [job] = jobs
        return Threads({job.trial.id: functools.partial(run_job, job)})

    def close(self) -> None:
        """See `Runner`; a thread cannot be ended, and ends with the process."""
