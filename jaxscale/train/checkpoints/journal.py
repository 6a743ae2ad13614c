"""Which chunks of an unfinished checkpoint are on disk, so that who was interrupted goes on where it was."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np

from jaxscale.train.checkpoints.digest import DIGESTS, NEW


class Journal:
    """A file with a line per chunk, each written after the chunk is on disk.

    Args:
      path: the file; it goes on from what is there.
    """

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._found: dict[tuple[str, str], str] = {}
        lines = path.read_text().splitlines() if path.is_file() else []
        for line in lines:
            try:
                name, key, digest = json.loads(line)
            except ValueError:  # the last one was cut off
                continue
            self._found[name, key] = digest

    def kept(self, name: str, key: str, file: Path) -> str | None:
        """The digest of a chunk that was written before, if its file is still what was written."""
        noted = self._found.get((name, key))
        if noted is None or not file.is_file():
            return None
        return noted if DIGESTS[NEW](np.fromfile(file, np.uint8)) == noted else None

    def note(self, name: str, key: str, digest: str) -> None:
        """A chunk is on disk."""
        with self._lock, self._path.open("a") as f:
            f.write(json.dumps([name, key, digest]) + "\n")
