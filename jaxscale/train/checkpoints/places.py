"""Where checkpoints are: a folder of a disk, in which a rename finishes a checkpoint.

A checkpoint is written under another name and renamed to its step's number when all of it is on disk, and is renamed
again before it is deleted. So whenever a process is killed, names tell finished checkpoints from leftovers. A bucket,
which has no rename, is in `bucket_places`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxscale import reading
from jaxscale.buckets import is_url
from jaxscale.errors import CheckpointError

log = logging.getLogger("jaxscale")

MANIFEST = "manifest.json"
OLD_MANIFEST = "manifest/metadata"
"""The manifest of schema 1, which Orbax wrote."""

_LEFTOVER = re.compile(r"\d+\.((partial|deleted|failed)-[0-9a-f]{8}|orbax-checkpoint-tmp.*)")
_STEP = re.compile("0|[1-9][0-9]{0,15}")
WRITER = "writer"
"""File with the id of the session that writes into the folder."""


class Files(Protocol):
    """The files of one checkpoint. All methods raise `OSError`, of which `strerror` says what is wrong."""

    @property
    def step(self) -> str:
        """The step's number, for messages; the folder's name."""
        ...

    @property
    def folder(self) -> object:
        """The folder of checkpoints, for messages."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        ...

    def size(self, name: str) -> int:
        """Return a file's size in bytes, if that costs less than reading it, else -1."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return a file's bytes, uint8."""
        ...

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        """Write a file; on return it is stored."""
        ...

    def message(self, name: str, text: str) -> None:
        """Write a small file, of which another process never sees a part."""
        ...


class Place(Protocol):
    """A folder of checkpoints."""

    protected: Collection[int]
    """Steps that `expire` leaves."""
    before_publish: Callable[[], None]
    """Called by `publish` first."""

    def steps(self) -> list[int]:
        """Return the steps with a finished checkpoint, ascending."""
        ...

    def unfinished(self) -> list[str]:
        """Return the names of checkpoints that are not finished, or were set aside."""
        ...

    def finished(self, step: int) -> Files:
        """Return the files of a finished checkpoint."""
        ...

    def take(self, session: str) -> None:
        """Become the only writer, and delete what killed writers left."""
        ...

    def check_taken(self, session: str) -> None:
        """Check that no other session has become the writer.

        Raises:
          CheckpointError: another one has.
        """
        ...

    def begin(self, step: int, session: str) -> Files:
        """Return the files of a checkpoint to be written, in which processes also leave messages for each other."""
        ...

    def subfolder(self, session: str) -> str:
        """Return the beginning of the names of an unfinished checkpoint's arrays, recorded in its manifest."""
        ...

    def publish(self, step: int, session: str, manifest: bytes) -> None:
        """Write the manifest and finish the checkpoint; raises `FileExistsError` if it exists."""
        ...

    def abandon(self, step: int, session: str) -> None:
        """Delete an unfinished checkpoint."""
        ...

    def is_abandoned(self, step: int, session: str) -> bool:
        """Whether `abandon` was called and the checkpoint is not finished."""
        ...

    def expire(self, keep: int, keep_every: int | None, session: str) -> None:
        """Delete all checkpoints but the newest `keep`, multiples of `keep_every`, and protected ones."""
        ...

    def set_aside(self, step: int) -> None:
        """Give a damaged checkpoint another name, so that its step can be saved again."""
        ...


def place_of(folder: str | Path) -> Place:
    """Return the place that a path or URL names.

    Args:
      folder: a folder of a disk, or the URL of one in a bucket.
    """
    from jaxscale.train.checkpoints.bucket_places import BucketPlace

    return BucketPlace(folder) if is_url(folder) else DiskPlace(Path(folder).absolute())


class DiskFiles:
    """The files of a checkpoint on a disk; see `Files`.

    Args:
      path: its folder.
    """

    def __init__(self, path: Path):
        self.path, self.step, self.folder = path, path.name, path.parent

    def has(self, name: str) -> bool:
        """See `Files`."""
        return (self.path / name).exists()

    def size(self, name: str) -> int:
        """See `Files`."""
        with reading.open_file(self.path / name) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str) -> np.ndarray:
        """See `Files`."""
        with reading.open_file(self.path / name) as file:
            return np.fromfile(file, np.uint8)

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        """See `Files`."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, data)

    def message(self, name: str, text: str) -> None:
        """Write a small file atomically."""
        self.write(f"{name}.writing", text.encode())
        (self.path / f"{name}.writing").rename(self.path / name)


class DiskPlace:
    """A folder of checkpoints on a disk; see `Place`.

    Args:
      folder: the folder.

    Attributes:
      expiring: held while `expire` renames one, and by whoever sets `protected`.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self.expiring = threading.Lock()
        self.protected: Collection[int] = ()
        self.before_publish: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return str(self.path)

    def steps(self) -> list[int]:
        """See `Place`."""
        if not self.path.is_dir():
            return []
        return sorted(int(p.name) for p in self.path.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())

    def unfinished(self) -> list[str]:
        """See `Place`."""
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if p.name[0].isdecimal() and "." in p.name and p.is_dir())

    def finished(self, step: int) -> DiskFiles:
        """See `Place`."""
        return DiskFiles(self.path / str(step))

    def take(self, session: str) -> None:
        """See `Place`."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / WRITER).write_text(session)
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name) and not path.name.endswith(session):
                shutil.rmtree(path, ignore_errors=True)

    def check_taken(self, session: str) -> None:
        """See `Place`."""
        try:
            same = (self.path / WRITER).read_text() == session
        except OSError:
            same = False
        if not same:
            raise second_writer(self.path)

    def begin(self, step: int, session: str) -> DiskFiles:
        """See `Place`."""
        return DiskFiles(self._named(step, "partial", session))

    def subfolder(self, session: str) -> str:
        """See `Place`; a disk needs none."""
        return ""

    def publish(self, step: int, session: str, manifest: bytes) -> None:
        """See `Place`."""
        self.before_publish()
        final, partial = self.path / str(step), self._named(step, "partial", session)
        write_file(partial / MANIFEST, manifest)
        for message in partial.glob("process-*"):
            message.unlink()
        self.check_taken(session)
        if final.exists():
            raise FileExistsError(17, f"{final} already exists, written by another run")
        sync_folders(partial)
        partial.rename(final)
        sync(self.path)

    def abandon(self, step: int, session: str) -> None:
        """See `Place`; what cannot be deleted is left for the next writer."""
        failed = self._named(step, "failed", session)
        self._named(step, "partial", session).rename(failed)
        shutil.rmtree(failed, ignore_errors=True)

    def is_abandoned(self, step: int, session: str) -> bool:
        """See `Place`."""
        return not self._named(step, "partial", session).exists() and not (self.path / str(step)).exists()

    def expire(self, keep: int, keep_every: int | None, session: str) -> None:
        """See `Place`."""
        for step in expired(self, keep, keep_every):
            deleted = self._named(step, "deleted", session)
            try:
                with self.expiring:
                    if step not in self.protected:
                        (self.path / str(step)).rename(deleted)
            except OSError as e:
                log.warning("checkpoint %d in %s cannot be deleted: %s", step, self.path, e.strerror)
            shutil.rmtree(deleted, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """See `Place`."""
        (self.path / str(step)).rename(self._named(step, "damaged", os.urandom(4).hex()))

    def _named(self, step: int, word: str, session: str) -> Path:
        return self.path / f"{step}.{word}-{session}"


def expired(place: Place, keep: int, keep_every: int | None) -> list[int]:
    """Return the steps that `Place.expire` deletes."""
    return [s for s in place.steps()[:-keep] if not (keep_every and s % keep_every == 0) and s not in place.protected]


def second_writer(folder: object) -> CheckpointError:
    """Make the error for a folder in which another session has begun to write."""
    return CheckpointError(
        f"another run has begun to write into {folder}; this one stops, so that neither overwrites the other: "
        "use a folder of its own for each"
    )


def write_file(path: Path, data: bytes | np.ndarray) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as f:
        f.write(data)  # type: ignore[arg-type]
        f.flush()
        os.fsync(f.fileno())


def sync_folders(root: Path) -> None:
    """Call fsync on a folder and all folders below it, so that their names survive a power failure."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda entry: sync(Path(entry[0])), os.walk(root)))


def sync(path: Path) -> None:
    """Call fsync on one folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
