"""Where one process keeps its snapshots: files in memory (`/dev/shm`), which outlast it as they would not on a heap."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import ConfigError

GENERATIONS = 2
"""The last whole snapshot, and the one being made."""


class Shelf:
    """Two generations of a blob and of parities, and what is whole of them.

    Args:
      folder: made anew.
      sizes: bytes of "own" and "parity".
      about: JSON-able, kept beside them.

    Raises:
      ConfigError: there is too little memory for them.
    """

    def __init__(self, folder: Path, sizes: dict[str, int], about: dict[str, Any]):
        self.folder = folder
        folder.mkdir(parents=True)
        wanted, free = GENERATIONS * sum(sizes.values()), shutil.disk_usage(folder).free
        if wanted > free:
            folder.rmdir()
            raise ConfigError(
                f"snapshots need {wanted / 2**20:,.0f} MiB a process in {folder} and {free / 2**20:,.0f} MiB are free; "
                "make it larger, set Snapshots.folder, or lay the state out over more devices"
            )
        (folder / "about.json").write_text(json.dumps(about))
        self.own = [self._room(f"own-{i}", sizes["own"]) for i in range(GENERATIONS)]
        self.parity = [self._room(f"parity-{i}", sizes["parity"]) for i in range(GENERATIONS)]
        self._slots: list[dict[str, Any]] = [{} for _ in range(GENERATIONS)]
        self._write()

    def _room(self, name: str, size: int) -> np.ndarray:
        if size == 0:
            return np.zeros(0, np.uint8)
        room: np.ndarray = np.memmap(self.folder / name, np.uint8, "w+", shape=(size,))
        room[:] = 0  # the pages are found now, not during a step
        return room

    def generation(self, slot: int) -> int | None:
        """Which one is there, or being made."""
        return self._slots[slot].get("generation")

    @property
    def nbytes(self) -> int:
        """Of all that is kept."""
        return sum(x.nbytes for x in (*self.own, *self.parity))

    def clear(self, slot: int, **what: int) -> None:
        """Nothing in a slot is whole any more; from now on it is for a `generation` and its `step`, if for any."""
        self._slots[slot] = dict(what)
        self._write()

    def note(self, slot: int, **what: Any) -> None:
        """What is whole: `own` the blob's digest, `parity` all of them, `digests` of others' blobs."""
        self._slots[slot].update(what)
        self._write()

    def remove(self) -> None:
        """Gives the memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        new = self.folder / "state.json.new"
        new.write_text(json.dumps(self._slots))
        new.rename(self.folder / "state.json")
