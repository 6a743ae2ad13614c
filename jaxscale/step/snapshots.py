"""Settings of snapshots of the training state in host memory; `jaxscale.train` takes them."""

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

    A process stores its part of the state twice, and parities of other processes' parts: with `n` processes, twice its
    part times 1 + parity / (n - parity). They are files in memory, which outlast the process, until the run ends.

    Args:
      every: steps between snapshots; 0 takes none.
      parity: how many processes (machines, if each has one process) may be lost without losing the snapshot.
      folder: a folder whose files are in memory.
      overlap: copy the state to host memory while the next step runs, from a copy on the devices, which takes the
        memory of another state; else the step waits for it.

    Raises:
      ConfigError: a number below 0, or `folder` does not exist.
    """

    every: int = 1
    parity: int = 1
    folder: str = "/dev/shm"
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "parity"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"Snapshots.{name} = {value!r}: must be a whole number of at least 0")
        if self.every and not Path(self.folder).is_dir():
            raise ConfigError(f"Snapshots.folder = {self.folder!r} does not exist; name a folder that is in memory")

    def root(self, run: Path) -> Path:
        """Return a run's folder in this machine's memory.

        Args:
          run: the run's folder on disk.
        """
        name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]
        return Path(self.folder) / f"jaxscale-{os.getuid()}" / name
