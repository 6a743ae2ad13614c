"""Checkpoints that are written to a local disk first and uploaded to a bucket behind the run."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxscale.errors import CheckpointError
from jaxscale.train import agree
from jaxscale.train.checkpoints.chunks import HostArray, whole
from jaxscale.train.checkpoints.lazily import Unread
from jaxscale.train.checkpoints.manifest import Manifest
from jaxscale.train.checkpoints.places import DiskPlace
from jaxscale.train.checkpoints.read import Arrays, dtype_named
from jaxscale.train.checkpoints.store import Checkpoints
from jaxscale.train.checkpoints.write import Save


class StagedCheckpoints(Checkpoints):
    """The checkpoints of one run, on a local disk and in a bucket; each is read from whichever has it whole.

    Training waits for the disk only. Process 0 uploads the newest checkpoint whenever the last upload is done, so that
    one may be left out if uploads take longer than the time between checkpoints; multiples of `keep_every` are not.

    Args:
      bucket: the checkpoints in the bucket.
      staging: folder of a disk that all processes of the run share; each run has a folder of its own in it.
      keep: as of `Checkpoints`, of both.
      keep_every: as of `Checkpoints`, of both.
    """

    def __init__(self, bucket: Checkpoints, staging: str | Path, *, keep: int = 3, keep_every: int | None = None):
        self.bucket, self._staging = bucket, Path(staging).expanduser().absolute()
        super().__init__(self._folder(bucket.run), keep=keep, keep_every=keep_every, run=bucket.run)
        self._upload_session = os.urandom(4).hex()
        self._begin_upload = True
        self._uploading: threading.Thread | None = None
        self._starting, self._again = threading.Lock(), False
        self._upload_failure: BaseException | None = None

    def steps(self) -> list[int]:
        """Return the steps with a finished checkpoint on the disk or in the bucket, ascending."""
        return sorted({*super().steps(), *self.bucket.steps()})

    def save_host(
        self, step: int, arrays: dict[str, HostArray] | Callable[[], dict[str, HostArray]], about: dict[str, Any]
    ) -> None:
        """See `Checkpoints.save_host`."""
        if self._session is None:
            self.run = self.bucket.run = agree.broadcast(self.run)  # process 0 chooses it after this object is made
            self.place = DiskPlace(self._folder(self.run))
        super().save_host(step, arrays, about)

    def check(self) -> None:
        """See `Checkpoints.check`; also raises the error of an upload."""
        super().check()
        failure, self._upload_failure = self._upload_failure, None
        if failure is not None:
            raise failure if isinstance(failure, CheckpointError) else CheckpointError(f"{failure!r}") from failure

    def behind(self) -> bool:
        """Whether the newest checkpoint is on the disk only."""
        return bool(self._pending())

    def close(self) -> None:
        """Wait until the newest checkpoint is on the disk and in the bucket; raises as `check`."""
        self.wait()
        while self._pending() and jax.process_index() == 0:
            self._start_upload()
            uploading = self._uploading
            if uploading is not None:
                uploading.join()
            self.check()

    def manifest(self, step: int) -> Manifest:
        """See `Checkpoints.manifest`; of the disk's checkpoint if there is one."""
        return self._stores(step)[0]._own_manifest(step)

    def arrays(self, step: int) -> Arrays:
        """See `Checkpoints.arrays`; of the disk's checkpoint if there is one."""
        store = self._stores(step)[0]
        return store.arrays(step) if store is not self else super().arrays(step)

    def set_aside(self, after: int) -> None:
        """See `Checkpoints.set_aside`; on the disk and in the bucket."""
        for step in super().steps():
            if step > after:
                self.place.set_aside(step)
        self.bucket.set_aside(after)

    def _stores(self, step: int) -> list[Checkpoints]:
        stores: list[Checkpoints] = [self] if step in super().steps() else []
        stores += [self.bucket] if step in self.bucket.steps() or not stores else []
        return stores

    def _write(self, job: Save) -> None:
        super()._write(job)
        if self._failure is None and jax.process_index() == 0:
            self._start_upload()

    def _pending(self) -> list[int]:
        """Return the steps to upload: newer than the bucket's newest, and multiples of `keep_every` before the rest."""
        return self._newer(max(self.bucket.steps(), default=-1))

    def _newer(self, newest: int) -> list[int]:
        steps = [step for step in super().steps() if step > newest]
        multiples = [step for step in steps if self._keep_every and step % self._keep_every == 0]
        return [*multiples, *([steps[-1]] if steps and steps[-1] not in multiples else [])]

    def _start_upload(self) -> None:
        with self._starting:
            self._again = True
            if self._uploading is None:
                self._uploading = threading.Thread(target=self._upload, name="checkpoint upload", daemon=True)
                self._uploading.start()

    def _more(self) -> bool:
        """Whether a checkpoint was finished since the last call; if none was, the thread that called this ends."""
        with self._starting:
            again, self._again = self._again and self._upload_failure is None, False
            if not again:
                self._uploading = None
            return again

    def _upload(self) -> None:
        while self._more():
            try:
                while (step := self._protected()) is not None:
                    self._upload_one(step)
            except BaseException as e:  # noqa: BLE001  # raised by the next call on the main thread
                self._upload_failure = e
            self.place.protected = ()

    def _protected(self) -> int | None:
        """Return the next step to upload, which `expire` leaves while it is read."""
        newest = max(self.bucket.steps(), default=-1)
        assert isinstance(self.place, DiskPlace)
        with self.place.expiring:
            pending = self._newer(newest)
            self.place.protected = pending
        return pending[0] if pending else None

    def _upload_one(self, step: int) -> None:
        local = self._own_manifest(step)
        source = super().arrays(step)
        arrays, leaves = {}, {}
        for name, leaf in local["leaves"].items():
            region = whole(tuple(leaf["shape"]))
            piece: Any = {region: Unread(source, name, region)}  # read chunk by chunk, each compared with its digest
            arrays[name] = HostArray(tuple(leaf["shape"]), dtype_named(leaf["dtype"]), tuple(leaf["chunk"]), piece)
            leaves[name] = {key: value for key, value in leaf.items() if key != "files"}
        manifest = {**{k: v for k, v in local.items() if k not in ("written", "folder")}, "leaves": leaves}
        begin, self._begin_upload = self._begin_upload, False
        keep = (self._keep, self._keep_every)
        Save(self.bucket.place, self._upload_session, manifest, arrays, 0, 1, *keep, begin).run()

    def _folder(self, run: str | None) -> Path:
        name = run if run is not None and re.fullmatch("[0-9a-f]+", run) else "new"  # it is read from a file
        where = hashlib.sha256(str(self.bucket.place).encode()).hexdigest()[:8]  # a copied run has the same id
        return self._staging / f"{name}-{where}" / "checkpoints"
