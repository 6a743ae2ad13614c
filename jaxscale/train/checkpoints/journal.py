"""Record which chunks of an unfinished checkpoint are on disk, so that an interrupted import can continue."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from jaxscale.train.checkpoints.digest import DIGESTS, NEW
from jaxscale.train.checkpoints.places import Files


class Journal:
    """A file with one line per chunk, appended when the chunk is on disk.

    Args:
      path: the file; an existing one is read and continued.
    """

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._digests: dict[tuple[str, str], str] = {}
        lines = path.read_text().splitlines() if path.is_file() else []
        for line in lines:
            try:
                name, key, digest = json.loads(line)
            except ValueError:  # the last line is incomplete
                continue
            self._digests[name, key] = digest

    def recorded(self, name: str, key: str, files: Files, file: str) -> str | None:
        """Return the digest of a chunk that was recorded before, if `file` still has that digest; else `None`.

        Args:
          name: the array.
          key: the chunk's file name.
          files: the unfinished checkpoint's files.
          file: the chunk's file.
        """
        digest = self._digests.get((name, key))
        if digest is None:
            return None
        try:
            return digest if DIGESTS[NEW](files.read(file)) == digest else None
        except OSError:
            return None

    def record(self, name: str, key: str, digest: str) -> None:
        """Record that a chunk is on disk.

        Args:
          name: the array.
          key: the chunk's file name.
          digest: of its bytes.
        """
        with self._lock, self._path.open("a") as f:
            f.write(json.dumps([name, key, digest]) + "\n")
