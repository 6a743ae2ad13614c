"""When a process counts as lost; `jaxscale.train.watchdog` watches by it."""

from __future__ import annotations

import dataclasses

from jaxscale.config import register
from jaxscale.errors import ConfigError

BEAT = 1.0
"""Seconds between two signs of life."""


@register
@dataclasses.dataclass(frozen=True)
class Watchdog:
    """When a process counts as lost. Only runs of several processes are watched.

    Args:
      silent: seconds without a sign of life, of a process that was killed without a trace, stopped, or cut off.
      stuck: seconds in one phase of a step without getting on, or 20 times what the phase ever took if that is more.
      disk: the same for a phase that waits for a disk, where a minute may be nothing out of order.
      first: the same for a phase that was not yet finished twice: it compiles. All that comes before the first step has
        to be done within as long.

    Raises:
      ConfigError: a time that is not above two signs of life.
    """

    silent: float = 8.0
    stuck: float = 10.0
    disk: float = 600.0
    first: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("silent", "stuck", "disk", "first"):
            if not getattr(self, name) > 2 * BEAT:
                raise ConfigError(f"Watchdog.{name} = {getattr(self, name)}: must be above {2 * BEAT:g} seconds")
