"""Settings of the watchdog (`jaxscale.train.watchdog`): when a process counts as failed."""

from __future__ import annotations

import dataclasses

from jaxscale.config import register
from jaxscale.errors import ConfigError

BEAT = 1.0
"""Seconds between two heartbeats of a process."""


@register
@dataclasses.dataclass(frozen=True)
class Watchdog:
    """When a process counts as failed. Only runs of several processes are watched.

    Args:
      silent: seconds without a heartbeat, as of a process that was killed, stopped or disconnected.
      stuck: seconds in one phase of a step, or 20 times the longest that the phase has taken if that is more.
      disk: the same for a phase that waits for a disk, which can take minutes.
      first: the same for a phase that has not yet finished twice, since it may compile. Everything before the first
        step must also finish within this time.

    Raises:
      ConfigError: a time is not more than two heartbeats.
    """

    silent: float = 8.0
    stuck: float = 10.0
    disk: float = 600.0
    first: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("silent", "stuck", "disk", "first"):
            if not getattr(self, name) > 2 * BEAT:
                raise ConfigError(f"Watchdog.{name} = {getattr(self, name)}: must be above {2 * BEAT:g} seconds")
