"""Storage of one process's snapshots: files in memory (`/dev/shm`), which outlive the process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import ConfigError

GENERATIONS = 2
"""Slots: one for the last complete snapshot, one for the next."""


class Shelf:
    """Two generations of a blob and of parities, and a record of which parts are complete.

    Args:
      folder: a folder to make.
      sizes: bytes of "own", the blob, and of "parity".
      about: JSON-able facts, written to `about.json`.

    Raises:
      ConfigError: there is too little memory.
    """

    def __init__(self, folder: Path, sizes: dict[str, int], about: dict[str, Any]):
        self.folder = folder
        folder.mkdir(parents=True)
        need, free = GENERATIONS * sum(sizes.values()), shutil.disk_usage(folder).free
        if need > free:
            folder.rmdir()
            raise ConfigError(
                f"snapshots need {need / 2**20:,.0f} MiB per process in {folder}, with {free / 2**20:,.0f} MiB free; "
                "make it larger, set Snapshots.folder, or shard the state over more devices"
            )
        (folder / "about.json").write_text(json.dumps(about))
        self.own = [self._allocate(f"own-{i}", sizes["own"]) for i in range(GENERATIONS)]
        self.parity = [self._allocate(f"parity-{i}", sizes["parity"]) for i in range(GENERATIONS)]
        self._slots: list[dict[str, Any]] = [{} for _ in range(GENERATIONS)]
        self._write()

    def _allocate(self, name: str, size: int) -> np.ndarray:
        if size == 0:
            return np.zeros(0, np.uint8)
        memory: np.ndarray = np.memmap(self.folder / name, np.uint8, "w+", shape=(size,))
        memory[:] = 0  # map the pages now, not during a step
        return memory

    def generation(self, slot: int) -> int | None:
        """Return the generation in a slot, complete or not; `None` if it is empty."""
        return self._slots[slot].get("generation")

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs and parities."""
        return sum(x.nbytes for x in (*self.own, *self.parity))

    def clear(self, slot: int, **what: int) -> None:
        """Mark a slot as incomplete.

        Args:
          slot: the slot.
          **what: `generation` and `step` that the slot is for now, if any.
        """
        self._slots[slot] = dict(what)
        self._write()

    def mark(self, slot: int, **what: object) -> None:
        """Record what is complete in a slot.

        Args:
          slot: the slot.
          **what: `own`, the digest of this process's blob; `parity`, whether all parities are complete; `digests` of
            the other processes' blobs.
        """
        self._slots[slot].update(what)
        self._write()

    def remove(self) -> None:
        """Delete the files, which frees the memory."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        new = self.folder / "state.json.new"
        new.write_text(json.dumps(self._slots))
        new.rename(self.folder / "state.json")
