"""Write a checkpoint: each process its chunks, then process 0 the manifest, and then the rename that finishes it.

Processes communicate through files of the unfinished checkpoint, which needs no device, no collective and no main
thread, and none waits longer than `PATIENCE`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxscale.buckets import BucketError, failure
from jaxscale.errors import CheckpointError
from jaxscale.train.checkpoints import digest
from jaxscale.train.checkpoints.chunks import HostArray, as_bytes, zarr_json
from jaxscale.train.checkpoints.journal import Journal
from jaxscale.train.checkpoints.manifest import Manifest
from jaxscale.train.checkpoints.places import MANIFEST, Files, Place
from jaxscale.train.checkpoints.read import FOLDER, THREADS

PATIENCE = 600.0
"""Seconds that a process waits for the others to write their chunks."""

Digests = dict[str, dict[str, str]]
"""Digests, by array and file name."""


@dataclasses.dataclass(frozen=True)
class Save:
    """Writes one checkpoint.

    Args:
      place: the folder of the run's checkpoints.
      session: id of this execution of the program, the same on all processes.
      manifest: the manifest, without digests of chunks.
      arrays: this process's shards, by name of array.
      process: index of this process.
      processes: how many processes write.
      keep: how many of the newest checkpoints to keep.
      keep_every: also keep checkpoints whose step is a multiple of this, or `None`.
      begin: whether this is the session's first checkpoint.
      journal: records written chunks, so that an interrupted save of the same session does not write them again.
    """

    place: Place
    session: str
    manifest: Manifest
    arrays: dict[str, HostArray]
    process: int
    processes: int
    keep: int
    keep_every: int | None
    begin: bool
    journal: Journal | None = None

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return self.manifest["step"]

    @functools.cached_property
    def files(self) -> Files:
        """The checkpoint's files until it is finished."""
        return self.place.begin(self.step, self.session)

    def run(self) -> None:
        """Write the checkpoint.

        Raises:
          CheckpointError: a process could not write its chunks; raised in all processes. Older checkpoints stay.
        """
        main = self.process == 0
        try:
            try:
                if main and self.begin:
                    self.place.take(self.session)
                self._write_message("", json.dumps(self._write_chunks()))
                if main:
                    self._finish()
                else:
                    self._await_finish()
            except BucketError as e:
                raise failure(CheckpointError, e, self._sentence(e.strerror or ""), running=True) from e
            except OSError as e:
                raise CheckpointError(self._sentence(e.strerror or str(e))) from e
        except CheckpointError as e:
            self._abandon(str(e))
            raise
        if main:
            self.place.expire(self.keep, self.keep_every, self.session)

    def _write_chunks(self) -> Digests:
        jobs = [(name, key, data) for name, array in self.arrays.items() for key, data in array.chunks()]
        abouts = self.manifest["leaves"].items() if self.process == 0 else ()
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(self._write_chunk, jobs))
            list(pool.map(self._write_about, abouts))
        files: Digests = {}
        for (name, key, _), chunk_digest in zip(jobs, digests, strict=True):
            files.setdefault(name, {})[key] = chunk_digest
        return files

    def _write_chunk(self, job: tuple[str, str, np.ndarray]) -> str:
        name, key, piece = job
        file = f"{FOLDER}/{name}/{key}"
        recorded = self.journal.recorded(name, key, self.files, file) if self.journal is not None else None
        if recorded is not None:
            return recorded
        data = as_bytes(piece)  # a copy if it is not contiguous; made here, so that few exist at a time
        chunk_digest = digest.DIGESTS[self.manifest["digest"]](data)  # of the memory, to detect errors of the disk
        self.files.write(file, data)
        if self.journal is not None:
            self.journal.record(name, key, chunk_digest)
        return chunk_digest

    def _write_about(self, item: tuple[str, dict[str, Any]]) -> None:
        name, leaf = item
        self.files.write(f"{FOLDER}/{name}/zarr.json", zarr_json(leaf).encode())

    def _finish(self) -> None:
        files: Digests = {}
        for process in range(self.processes):
            for name, digests in json.loads(self._await_digests(process)).items():
                files.setdefault(name, {}).update(digests)
        leaves = {name: {**leaf, "files": files.get(name, {})} for name, leaf in self.manifest["leaves"].items()}
        where = {"folder": folder} if (folder := self.place.subfolder(self.session)) else {}
        manifest = digest.sealed({**self.manifest, **where, "leaves": leaves}).encode()
        self.place.publish(self.step, self.session, manifest)

    def _write_message(self, suffix: str, text: str) -> None:
        self.files.message(f"process-{self.process}{suffix}", text)

    def _await_digests(self, process: int) -> str:
        name = f"process-{process}"
        for _ in _waits(PATIENCE):
            if self.files.has(name):
                return self.files.read(name).tobytes().decode()
            if self.files.has(f"{name}.failed"):
                why = self.files.read(f"{name}.failed").tobytes().decode()
                raise CheckpointError(why or self._sentence(f"process {process} could not write"))
        raise CheckpointError(self._sentence(f"process {process} did not write its chunks within {PATIENCE:.0f} s"))

    def _await_finish(self) -> None:
        finished = self.place.finished(self.step)
        for _ in _waits(PATIENCE):
            if finished.has(MANIFEST):
                return
            if self.place.is_abandoned(self.step, self.session):
                raise CheckpointError(self._sentence("process 0 failed; see its error"))
        raise CheckpointError(self._sentence(f"process 0 did not finish it within {PATIENCE:.0f} s"))

    def _abandon(self, why: str) -> None:
        if self.journal is not None:  # keep the chunks, to continue from them
            return
        try:
            if self.process == 0:  # the others notice that the folder is gone
                self.place.abandon(self.step, self.session)
            else:
                self._write_message(".failed", why)
        except OSError:
            pass  # the folder is gone, or the disk fails again

    def _sentence(self, why: str) -> str:
        try:
            done = self.place.steps()
        except OSError:
            done = []  # the server does not answer
        older = f"; finished checkpoints are unchanged: {', '.join(map(str, done))}" if done else ""
        return f"could not write checkpoint {self.step} into {self.place}: {why}{older}"


def _waits(seconds: float) -> Iterator[None]:
    """Yield at once, and again after increasing pauses, until `seconds` have passed."""
    end, pause = time.monotonic() + seconds, 0.002
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
