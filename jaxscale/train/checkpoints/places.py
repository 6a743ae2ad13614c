"""The names in a folder of checkpoints, and what each is: finished, being written, set aside, on its way out.

A checkpoint is written under another name and renamed to its step's number when all of it is on disk; it is renamed
away before it is deleted. So a kill at any moment leaves finished checkpoints and leftovers, and the names tell which.
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
"""A file with the session that writes into the folder."""


def finished(folder: Path) -> list[int]:
    """Steps with a finished checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if is_finished(p))


def renamed(folder: Path, step: int, word: str, session: str) -> Path:
    """The name of a checkpoint that is not, or no longer, finished; `word` is partial, deleted, failed or damaged."""
    return folder / f"{step}.{word}-{session}"


def take(folder: Path, session: str) -> None:
    """Becomes the one that writes into a folder, and clears what killed ones left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _WRITER).write_text(session)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and not path.name.endswith(session):
            shutil.rmtree(path, ignore_errors=True)


def check_taken(folder: Path, session: str) -> None:
    """That nobody else has begun to write here since.

    Raises:
      CheckpointError: somebody has.
    """
    try:
        same = (folder / _WRITER).read_text() == session
    except OSError:
        same = False
    if not same:
        raise CheckpointError(
            f"another run has begun to write into {folder}; this one stops, so that neither overwrites the other: "
            "give each a folder of its own"
        )


def publish(folder: Path, step: int, session: str) -> None:
    """Gives a whole checkpoint its name, so that it survives a loss of power."""
    final = folder / str(step)
    if final.exists():
        raise FileExistsError(17, f"{final} is there already, and not by this run")
    sync_folders(renamed(folder, step, "partial", session))
    renamed(folder, step, "partial", session).rename(final)
    sync(folder)


def discard(folder: Path, step: int, word: str, session: str) -> None:
    """Deletes a checkpoint of another name; what cannot be deleted is left for the next run to clear."""
    shutil.rmtree(renamed(folder, step, word, session), ignore_errors=True)


def expire(folder: Path, keep: int, keep_every: int | None, session: str) -> None:
    """Deletes all but the newest `keep` and the multiples of `keep_every`."""
    for step in finished(folder)[:-keep]:
        if not keep_every or step % keep_every:
            try:
                (folder / str(step)).rename(renamed(folder, step, "deleted", session))
            except OSError as e:
                log.warning("checkpoint %d in %s cannot be deleted: %s", step, folder, e.strerror)
            discard(folder, step, "deleted", session)


def sync_folders(root: Path) -> None:
    """Makes the names in a folder and in all below it survive a loss of power."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda found: sync(Path(found[0])), os.walk(root)))


def sync(path: Path) -> None:
    """The same for one folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
