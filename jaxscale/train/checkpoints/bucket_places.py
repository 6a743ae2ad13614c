"""Checkpoints in a bucket, which has no rename: one exists when its manifest does, which is written last.

<step>/manifest.json              written last, and only if there is none; its "folder" names the session
<step>/<session>/tensors/...      the arrays as on a disk; each execution of the program has a folder of its own, so
that a process that was believed dead cannot write into a finished checkpoint
<step>/<session>/process-<i>      messages of processes to each other, deleted at the end
<step>/damaged-<id>.json          the manifest of a damaged checkpoint that was set aside
writer                            id of the session that writes
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from jaxscale.buckets import Bucket, BucketError
from jaxscale.train.checkpoints.places import MANIFEST, OLD_MANIFEST, WRITER, expired, second_writer

log = logging.getLogger("jaxscale")

_MANIFEST = re.compile(rf"(0|[1-9][0-9]{{0,15}})/({re.escape(MANIFEST)}|{re.escape(OLD_MANIFEST)})")
_OURS = re.compile(r"(0|[1-9][0-9]{0,15})/[0-9a-f]{8}/.*")
"""Objects of unfinished checkpoints; what others put here stays."""
_OF_STEP = re.compile(r"(0|[1-9][0-9]{0,15})/")
_ASIDE = re.compile(r"(0|[1-9][0-9]{0,15})/damaged-[0-9a-f]{8}\.json")
_FAILED = "failed"


class BucketFiles:
    """The files of a checkpoint in a bucket; see `Files`.

    Args:
      bucket: the folder of its step.
      writing: the session's subfolder, into which all is written; empty for a finished checkpoint.
    """

    def __init__(self, bucket: Bucket, writing: str = ""):
        self.bucket, self._writing = bucket, writing
        self.folder, _, self.step = bucket.url.rpartition("/")

    def has(self, name: str) -> bool:
        """See `Files`."""
        return self.bucket.exists(self._writing + name)

    def size(self, name: str) -> int:
        """See `Files`; a request for the size takes as long as one for a chunk."""
        return -1

    def read(self, name: str) -> np.ndarray:
        """See `Files`."""
        return np.frombuffer(self.bucket.read(self._writing + name), np.uint8)

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        """See `Files`."""
        self.bucket.write(self._writing + name, bytes(data))

    def message(self, name: str, text: str) -> None:
        """Write a small file atomically."""
        self.write(name, text.encode())


class BucketPlace:
    """A folder of checkpoints in a bucket; see `Place`.

    Args:
      url: the folder.
    """

    def __init__(self, url: str | Path):
        self.bucket = Bucket(url)
        self.protected: Collection[int] = ()
        self.before_publish: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return self.bucket.url

    def steps(self) -> list[int]:
        """See `Place`."""
        return sorted(int(match[1]) for key in self.bucket.list() if (match := _MANIFEST.fullmatch(key)))

    def unfinished(self) -> list[str]:
        """See `Place`."""
        keys = self.bucket.list()
        done = {key.partition("/")[0] for key in keys if _MANIFEST.fullmatch(key)}
        aside = {match[1]: match[0] for key in keys if (match := _ASIDE.fullmatch(key))}
        others = {match[1] for key in keys if (match := _OF_STEP.match(key))} - done - set(aside)
        return sorted([*others, *aside.values()])

    def finished(self, step: int) -> BucketFiles:
        """See `Place`."""
        return BucketFiles(self.bucket.folder(str(step)))

    def take(self, session: str) -> None:
        """See `Place`."""
        self.bucket.write(WRITER, session.encode())
        keys = self.bucket.list()
        whole = {key.partition("/")[0] for key in keys if "/damaged-" in key}
        done = {match[1] for key in keys if (match := _MANIFEST.fullmatch(key))} | whole
        ours = [key for key in keys if _OURS.fullmatch(key) and key.partition("/")[0] not in done]
        leftover = [key for key in ours if key.split("/")[1] != session]
        for _ in self.bucket.each(self.bucket.delete, leftover):
            pass

    def check_taken(self, session: str) -> None:
        """See `Place`."""
        try:
            same = self.bucket.read(WRITER).decode(errors="replace") == session
        except FileNotFoundError:
            same = False
        if not same:
            raise second_writer(self)

    def begin(self, step: int, session: str) -> BucketFiles:
        """See `Place`."""
        return BucketFiles(self.bucket.folder(str(step)), self.subfolder(session))

    def subfolder(self, session: str) -> str:
        """See `Place`."""
        return f"{session}/"

    def publish(self, step: int, session: str, manifest: bytes) -> None:
        """See `Place`."""
        self.before_publish()
        for key in self.bucket.list(f"{step}/{session}/process-"):
            self.bucket.delete(key)
        self.check_taken(session)
        self.bucket.write(f"{step}/{MANIFEST}", manifest, new=True)

    def abandon(self, step: int, session: str) -> None:
        """See `Place`."""
        mark = f"{step}/{session}/{_FAILED}"
        self.bucket.write(mark, b"the session gave up")  # first, since other processes wait for it
        for _ in self.bucket.each(self.bucket.delete, set(self.bucket.list(f"{step}/{session}/")) - {mark}):
            pass

    def is_abandoned(self, step: int, session: str) -> bool:
        """See `Place`."""
        return self.bucket.exists(f"{step}/{session}/{_FAILED}")

    def expire(self, keep: int, keep_every: int | None, session: str) -> None:
        """See `Place`; the manifest goes first."""
        try:
            for step in expired(self, keep, keep_every):
                self.bucket.delete(f"{step}/{MANIFEST}")
                self.bucket.delete_folder(str(step))
        except BucketError as e:
            log.warning("old checkpoints in %s cannot be deleted: %s", self, e.strerror)

    def set_aside(self, step: int) -> None:
        """See `Place`."""
        for name in (MANIFEST, OLD_MANIFEST):
            with contextlib.suppress(FileNotFoundError):
                manifest = self.bucket.read(f"{step}/{name}")
                self.bucket.write(f"{step}/damaged-{os.urandom(4).hex()}.json", manifest)
                self.bucket.delete(f"{step}/{name}")
