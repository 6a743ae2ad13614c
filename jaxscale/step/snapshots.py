"""How often snapshots of the state are taken, and how many processes may be lost; taken by `jaxscale.train`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from jaxscale.config import register
from jaxscale.errors import ConfigError


@register
@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Snapshots of the state in host memory; in gin `train.snapshots = @Snapshots()` and `Snapshots.every = 10`.

    A process keeps its part of the state twice, and parities of others' parts: for `n` processes, twice its part times
    1 + parity / (n - parity). They outlast it, in files in memory, until the run is finished.

    Args:
      every: steps between snapshots; 0 takes none.
      parity: how many processes (machines, where each has its own) may be lost with all that they held.
      folder: where files are memory.

    Raises:
      ConfigError: a number below 0, or `folder` is not there.
    """

    every: int = 1
    parity: int = 1
    folder: str = "/dev/shm"

    def __post_init__(self) -> None:
        for name in ("every", "parity"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"Snapshots.{name} = {value!r}: must be a whole number of at least 0")
        if self.every and not Path(self.folder).is_dir():
            raise ConfigError(f"Snapshots.folder = {self.folder!r} is not there; name a folder that is in memory")

    def root(self, run: Path) -> Path:
        """A run's folder in this machine's memory."""
        name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]
        return Path(self.folder) / f"jaxscale-{os.getuid()}" / name
