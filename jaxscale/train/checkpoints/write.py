"""Writing a checkpoint: each process its chunks, process 0 the manifest, and then the rename that finishes it.

Processes tell each other through files in the unfinished folder, so that this needs no device, no collective and no
main thread, and nobody waits longer than `PATIENCE`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
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
"""Seconds that a process waits for the others' parts."""

Files = dict[str, dict[str, str]]
"""By array and file, a digest."""


@dataclasses.dataclass(frozen=True)
class Save:
    """One checkpoint to be written.

    Args:
      folder: of the run's checkpoints.
      session: of this run of the program, equal in all its processes.
      manifest: without the files' digests.
      arrays: what this process holds.
      process: this one's number.
      processes: how many take part.
      keep: how many of the newest stay.
      keep_every: steps that stay for good, or `None`.
      begin: whether it is the first of this session.
      journal: of chunks that an interrupted one of the same session has written, and which are not written again.
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
        """Whose state it is."""
        return self.manifest["step"]

    @property
    def partial(self) -> Path:
        """Where it is until it is finished."""
        return places.renamed(self.folder, self.step, "partial", self.session)

    def run(self) -> None:
        """Does it.

        Raises:
          CheckpointError: in every process, when any could not do its part; what was finished before is as it was.
        """
        main = self.process == 0
        try:
            try:
                if main and self.begin:
                    places.take(self.folder, self.session)
                self._tell("", json.dumps(self._write_chunks()))
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
        for (name, key, _), found in zip(jobs, digests, strict=True):
            files.setdefault(name, {})[key] = found
        return files

    def _write_chunk(self, job: tuple[str, str, np.ndarray]) -> str:
        name, key, piece = job
        file = self.partial / FOLDER / name / key
        kept = self.journal.kept(name, key, file) if self.journal is not None else None
        if kept is not None:
            return kept
        data = as_bytes(piece)  # a copy where it is not in one piece: here, so that few are there at once
        found = digest.DIGESTS[self.manifest["digest"]](data)  # of the memory: what the disk made of it shows later
        write_file(file, data)
        if self.journal is not None:
            self.journal.note(name, key, found)
        return found

    def _write_about(self, item: tuple[str, dict[str, Any]]) -> None:
        name, leaf = item
        write_file(self.partial / FOLDER / name / "zarr.json", zarr_json(leaf).encode())

    def _finish(self) -> None:
        files: Files = {}
        for process in range(self.processes):
            for name, found in json.loads(self._await_told(process)).items():
                files.setdefault(name, {}).update(found)
        leaves = {name: {**leaf, "files": files.get(name, {})} for name, leaf in self.manifest["leaves"].items()}
        write_file(self.partial / FILE, digest.sealed({**self.manifest, "leaves": leaves}).encode())
        for process in range(self.processes):
            (self.partial / f"process-{process}").unlink()
        places.check_taken(self.folder, self.session)
        places.publish(self.folder, self.step, self.session)

    def _tell(self, suffix: str, text: str) -> None:
        path = self.partial / f"process-{self.process}{suffix}"
        write_file(path.with_name(f"{path.name}.writing"), text.encode())
        path.with_name(f"{path.name}.writing").rename(path)

    def _await_told(self, process: int) -> str:
        path = self.partial / f"process-{process}"
        for _ in _waits(PATIENCE):
            if path.exists():
                return path.read_text()
            failed = path.with_name(f"{path.name}.failed")
            if failed.exists():
                raise CheckpointError(failed.read_text() or self._sentence(f"process {process} could not write"))
        raise CheckpointError(self._sentence(f"process {process} did not finish its part within {PATIENCE:.0f} s"))

    def _await_finish(self) -> None:
        final = self.folder / str(self.step)
        for _ in _waits(PATIENCE):
            if final.exists():
                return
            if not self.partial.exists() and not final.exists():
                raise CheckpointError(self._sentence("process 0 gave it up, and says why"))
        raise CheckpointError(self._sentence(f"process 0 did not finish it within {PATIENCE:.0f} s"))

    def _abandon(self, why: str) -> None:
        if self.journal is not None:  # what is there is gone on from
            return
        try:
            if self.process == 0:  # the others see it go
                self.partial.rename(places.renamed(self.folder, self.step, "failed", self.session))
            else:
                self._tell(".failed", why)
        except OSError:
            pass  # it is gone, or the disk refuses that too
        places.discard(self.folder, self.step, "failed", self.session)

    def _sentence(self, why: str) -> str:
        done = places.finished(self.folder)
        kept = f"; what was finished before is as it was: {', '.join(map(str, done))}" if done else ""
        return f"could not write checkpoint {self.step} into {self.folder}: {why}{kept}"


def write_file(path: Path, data: Any) -> None:
    """Writes a file and waits until it is on disk."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _waits(seconds: float) -> Any:
    """Yields now, and again after ever longer pauses, until `seconds` have passed."""
    end, pause = time.monotonic() + seconds, 0.002
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
