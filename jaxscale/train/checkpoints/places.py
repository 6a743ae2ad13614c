"""Names in a folder of checkpoints: finished, being written, damaged, or being deleted.

A checkpoint is written under another name and renamed to its step's number when all of it is on disk, and is renamed
again before it is deleted. So whenever a process is killed, names tell finished checkpoints from leftovers.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxscale.errors import CheckpointError
from jaxscale.train.checkpoints.manifest import is_finished

log = logging.getLogger("jaxscale")

_LEFTOVER = re.compile(r"\d+\.((partial|deleted|failed)-[0-9a-f]{8}|orbax-checkpoint-tmp.*)")
_WRITER = "writer"
"""File with the id of the session that writes into the folder."""


def finished(folder: Path) -> list[int]:
    """Return the steps with a finished checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if is_finished(p))


def renamed(folder: Path, step: int, word: str, session: str) -> Path:
    """Return the path of a checkpoint that is not finished; `word` is "partial", "deleted", "failed" or "damaged"."""
    return folder / f"{step}.{word}-{session}"


def take(folder: Path, session: str) -> None:
    """Become the only writer of a folder, and delete what killed writers left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _WRITER).write_text(session)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and not path.name.endswith(session):
            shutil.rmtree(path, ignore_errors=True)


def check_taken(folder: Path, session: str) -> None:
    """Check that no other session has become the writer of the folder.

    Raises:
      CheckpointError: another one has.
    """
    try:
        same = (folder / _WRITER).read_text() == session
    except OSError:
        same = False
    if not same:
        raise CheckpointError(
            f"another run has begun to write into {folder}; this one stops, so that neither overwrites the other: "
            "use a folder of its own for each"
        )


def publish(folder: Path, step: int, session: str) -> None:
    """Rename a completely written checkpoint to its step's number, after syncing it to disk."""
    final = folder / str(step)
    if final.exists():
        raise FileExistsError(17, f"{final} already exists, written by another run")
    sync_folders(renamed(folder, step, "partial", session))
    renamed(folder, step, "partial", session).rename(final)
    sync(folder)


def discard(folder: Path, step: int, word: str, session: str) -> None:
    """Delete an unfinished checkpoint; what cannot be deleted is left for the next writer."""
    shutil.rmtree(renamed(folder, step, word, session), ignore_errors=True)


def expire(folder: Path, keep: int, keep_every: int | None, session: str) -> None:
    """Delete all checkpoints but the newest `keep` and multiples of `keep_every`."""
    for step in finished(folder)[:-keep]:
        if not keep_every or step % keep_every:
            try:
                (folder / str(step)).rename(renamed(folder, step, "deleted", session))
            except OSError as e:
                log.warning("checkpoint %d in %s cannot be deleted: %s", step, folder, e.strerror)
            discard(folder, step, "deleted", session)


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
