"""Write a checkpoint: each process its chunks, then process 0 the manifest, and then the rename that finishes it.

Processes communicate through files in the unfinished folder, which needs no device, no collective and no main thread,
and none waits longer than `PATIENCE`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.train.checkpoints import digest, places
from jaxscale.train.checkpoints.chunks import HostArray, as_bytes, zarr_json
from jaxscale.train.checkpoints.journal import Journal
from jaxscale.train.checkpoints.manifest import FILE, Manifest
from jaxscale.train.checkpoints.read import FOLDER, THREADS

PATIENCE = 600.0
"""Seconds that a process waits for the others to write their chunks."""

Files = dict[str, dict[str, str]]
"""Digests, by array and file name."""


@dataclasses.dataclass(frozen=True)
class Save:
    """Writes one checkpoint.

    Args:
      folder: the run's checkpoints.
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

    folder: Path
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

    @property
    def partial(self) -> Path:
        """Path of the checkpoint until it is finished."""
        return places.renamed(self.folder, self.step, "partial", self.session)

    def run(self) -> None:
        """Write the checkpoint.

        Raises:
          CheckpointError: a process could not write its chunks; raised in all processes. Older checkpoints stay.
        """
        main = self.process == 0
        try:
            try:
                if main and self.begin:
                    places.take(self.folder, self.session)
                self._write_message("", json.dumps(self._write_chunks()))
                if main:
                    self._finish()
                else:
                    self._await_finish()
            except OSError as e:
                raise CheckpointError(self._sentence(e.strerror or str(e))) from e
        except CheckpointError as e:
            self._abandon(str(e))
            raise
        if main:
            places.expire(self.folder, self.keep, self.keep_every, self.session)

    def _write_chunks(self) -> Files:
        for name in self.arrays:
            (self.partial / FOLDER / name).mkdir(parents=True, exist_ok=True)
        jobs = [(name, key, data) for name, array in self.arrays.items() for key, data in array.chunks()]
        abouts = self.manifest["leaves"].items() if self.process == 0 else ()
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(self._write_chunk, jobs))
            list(pool.map(self._write_about, abouts))
        files: Files = {}
        for (name, key, _), chunk_digest in zip(jobs, digests, strict=True):
            files.setdefault(name, {})[key] = chunk_digest
        return files

    def _write_chunk(self, job: tuple[str, str, np.ndarray]) -> str:
        name, key, piece = job
        file = self.partial / FOLDER / name / key
        recorded = self.journal.recorded(name, key, file) if self.journal is not None else None
        if recorded is not None:
            return recorded
        data = as_bytes(piece)  # a copy if it is not contiguous; made here, so that few exist at a time
        chunk_digest = digest.DIGESTS[self.manifest["digest"]](data)  # of the memory, to detect errors of the disk
        write_file(file, data)
        if self.journal is not None:
            self.journal.record(name, key, chunk_digest)
        return chunk_digest

    def _write_about(self, item: tuple[str, dict[str, Any]]) -> None:
        name, leaf = item
        write_file(self.partial / FOLDER / name / "zarr.json", zarr_json(leaf).encode())

    def _finish(self) -> None:
        files: Files = {}
        for process in range(self.processes):
            for name, digests in json.loads(self._await_digests(process)).items():
                files.setdefault(name, {}).update(digests)
        leaves = {name: {**leaf, "files": files.get(name, {})} for name, leaf in self.manifest["leaves"].items()}
        write_file(self.partial / FILE, digest.sealed({**self.manifest, "leaves": leaves}).encode())
        for process in range(self.processes):
            (self.partial / f"process-{process}").unlink()
        places.check_taken(self.folder, self.session)
        places.publish(self.folder, self.step, self.session)

    def _write_message(self, suffix: str, text: str) -> None:
        path = self.partial / f"process-{self.process}{suffix}"
        write_file(path.with_name(f"{path.name}.writing"), text.encode())
        path.with_name(f"{path.name}.writing").rename(path)

    def _await_digests(self, process: int) -> str:
        path = self.partial / f"process-{process}"
        for _ in _waits(PATIENCE):
            if path.exists():
                return path.read_text()
            failed = path.with_name(f"{path.name}.failed")
            if failed.exists():
                raise CheckpointError(failed.read_text() or self._sentence(f"process {process} could not write"))
        raise CheckpointError(self._sentence(f"process {process} did not write its chunks within {PATIENCE:.0f} s"))

    def _await_finish(self) -> None:
        final = self.folder / str(self.step)
        for _ in _waits(PATIENCE):
            if final.exists():
                return
            if not self.partial.exists() and not final.exists():
                raise CheckpointError(self._sentence("process 0 failed; see its error"))
        raise CheckpointError(self._sentence(f"process 0 did not finish it within {PATIENCE:.0f} s"))

    def _abandon(self, why: str) -> None:
        if self.journal is not None:  # keep the chunks, to continue from them
            return
        try:
            if self.process == 0:  # the others notice that the folder is gone
                self.partial.rename(places.renamed(self.folder, self.step, "failed", self.session))
            else:
                self._write_message(".failed", why)
        except OSError:
            pass  # the folder is gone, or the disk fails again
        places.discard(self.folder, self.step, "failed", self.session)

    def _sentence(self, why: str) -> str:
        done = places.finished(self.folder)
        older = f"; finished checkpoints are unchanged: {', '.join(map(str, done))}" if done else ""
        return f"could not write checkpoint {self.step} into {self.folder}: {why}{older}"


def write_file(path: Path, data: Any) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _waits(seconds: float) -> Iterator[None]:
    """Yield at once, and again after increasing pauses, until `seconds` have passed."""
    end, pause = time.monotonic() + seconds, 0.002
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
