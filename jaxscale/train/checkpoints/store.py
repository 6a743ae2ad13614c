"""`Checkpoints`: global arrays by name, written by the processes that hold them, restored onto any layout."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxscale.buckets import BucketError, failure
from jaxscale.errors import CheckpointError, DamagedCheckpoint, OtherArrays
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.tensors import path_name
from jaxscale.optim import convert_state, raise_zeros
from jaxscale.step.guards import memory_saved
from jaxscale.step.state import TrainState
from jaxscale.train import agree
from jaxscale.train.checkpoints import digest
from jaxscale.train.checkpoints.chunks import HostArray, to_host, without_pieces
from jaxscale.train.checkpoints.device_copies import device_copies
from jaxscale.train.checkpoints.manifest import Manifest, check_same, flatten, leaves_of, read_manifest
from jaxscale.train.checkpoints.migrate import SCHEMA
from jaxscale.train.checkpoints.places import DiskPlace, place_of
from jaxscale.train.checkpoints.precision import as_saved, has_lost_moments
from jaxscale.train.checkpoints.read import Arrays, open_arrays, place
from jaxscale.train.checkpoints.write import Save

log = logging.getLogger("jaxscale")

Tree = Any
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`, written in the background.

    A checkpoint is a flat dict of global arrays, `params/embed/weight`, `opt_state/...`, `rng`, `step`, and a manifest
    with the shape, dtype, logical axes and chunk digests of each. The newest `keep` checkpoints stay, and those whose
    step is a multiple of `keep_every`. Unfinished checkpoints have another name and are never used; damaged ones are
    never loaded.

    Args:
      folder: where checkpoints are, on a disk or in a bucket; made when the first one is saved.
      keep: how many of the newest checkpoints to keep.
      keep_every: also keep checkpoints whose step is a multiple of this, or `None`.
      run: the run's id; loading a checkpoint of another run raises `DamagedCheckpoint`.
      before_publish: called before a checkpoint is finished, on the thread that writes it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        run: str | None = None,
        before_publish: Callable[[], None] = lambda: None,
    ):
        self.place = place_of(folder)
        self.place.before_publish = before_publish
        self.run = run
        self._keep, self._keep_every = keep, keep_every
        self._session: str | None = None
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def folder(self) -> Path | str:
        """The folder of a disk, or the URL of one in a bucket."""
        return self.place.path if isinstance(self.place, DiskPlace) else str(self.place)

    def steps(self) -> list[int]:
        """Return the steps with a finished checkpoint, ascending.

        Raises:
          CheckpointError: they are in a bucket that cannot be read.
        """
        try:
            return self.place.steps()
        except BucketError as e:
            raise failure(CheckpointError, e) from None

    def unfinished(self) -> list[str]:
        """Return the names of checkpoints that are not finished, or were set aside; raises as `steps`."""
        try:
            return self.place.unfinished()
        except BucketError as e:
            raise failure(CheckpointError, e) from None

    def save(self, state: TrainState, infos: dict[str, Tree], about: dict[str, Any], *, overlap: bool = False) -> None:
        """Start writing `state`; returns once its arrays may be overwritten.

        Args:
          state: the state to save under its step, without its frozen parameters.
          infos: `TensorInfo`s of its arrays (see `Algorithm.infos`).
          about: JSON-able facts for the manifest.
          overlap: copy the arrays on their devices, and the copies to host memory in the background; takes the device
            memory of another state, until that is done.

        Raises:
          CheckpointError: an earlier save failed in the background.
        """
        self.wait()  # two copies of the state may be more than fits in host memory
        saved = state.saved
        flat = flatten(saved)
        arrays = without_pieces(flat) if overlap else to_host(flat)
        facts = {**about, "leaves": leaves_of(saved, arrays, infos["params"], infos["extra"])}
        if not overlap:
            self.save_host(int(state.step), arrays, facts)
            return
        copies = device_copies(flat)

        def fetch() -> dict[str, HostArray]:
            fetched = to_host(copies, owned=True)
            copies.clear()  # their device memory is free from here on
            return fetched

        self.save_host(int(state.step), fetch, facts)

    def save_host(
        self, step: int, arrays: dict[str, HostArray] | Callable[[], dict[str, HostArray]], about: dict[str, Any]
    ) -> None:
        """Start writing a state that is in host memory already; every process must call this.

        Args:
          step: the step of the state.
          arrays: this process's shards of every array, or a function that fetches them, called in the background.
          about: the manifest's "leaves", and JSON-able facts.

        Raises:
          CheckpointError: an earlier save failed in the background.
        """
        self.wait()
        begin = self._session is None
        if self._session is None:
            self._session = agree.broadcast(os.urandom(4).hex())
        facts = {"schema": SCHEMA, "step": step, "run": self.run, "arrays": "chunks", "digest": digest.NEW}
        saved = {**facts, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **about}
        job = Save(
            self.place,
            self._session,
            saved,
            {} if callable(arrays) else arrays,
            jax.process_index(),
            jax.process_count(),
            self._keep,
            self._keep_every,
            begin,
        )
        # a daemon, so that a failing process does not wait for others; a normal end calls `close`
        fetch = arrays if callable(arrays) else None
        self._writing = threading.Thread(target=self._fetch, args=[job, fetch], name=f"checkpoint {step}", daemon=True)
        self._writing.start()

    def _fetch(self, job: Save, fetch: Callable[[], dict[str, HostArray]] | None) -> None:
        try:
            job = job if fetch is None else dataclasses.replace(job, arrays=fetch())
        except BaseException as e:  # noqa: BLE001  # as in _write
            self._failure = e
            return
        self._write(job)

    def _write(self, job: Save) -> None:
        try:
            job.run()
        except BaseException as e:  # noqa: BLE001  # raised by the next call on the main thread
            self._failure = e

    def check(self) -> None:
        """Raise the error of a save that failed in the background, if any; does not block.

        Raises:
          CheckpointError: a save failed.
        """
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if isinstance(failure, CheckpointError):
            raise failure
        raise CheckpointError(f"a checkpoint could not be written into {self.place}: {failure!r}") from failure

    def wait(self) -> None:
        """Block until the current save is on disk.

        Raises:
          CheckpointError: a save failed in the background.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.check()

    def behind(self) -> bool:
        """Whether a finished checkpoint is not yet where it belongs."""
        return False

    def close(self) -> None:
        """Call `wait`; use it at the end of a run."""
        self.wait()

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint.

        Args:
          step: the checkpoint's step.

        Raises:
          DamagedCheckpoint: the manifest is missing, unreadable, or of another run.
          CheckpointError: there is no such checkpoint, or its schema is newer than this version.
        """
        return self._own_manifest(step)

    def _own_manifest(self, step: int) -> Manifest:
        have = Checkpoints.steps(self)
        if step not in have:
            known = ", ".join(map(str, have)) or "none"
            raise CheckpointError(f"there is no finished checkpoint {step} in {self.place}; finished are: {known}")
        manifest = read_manifest(self.place.finished(step))
        if self.run is not None and manifest["run"] not in (None, self.run):
            raise DamagedCheckpoint(
                f"checkpoint {step} in {self.place} is not of this run: its manifest names run {manifest['run']}, "
                f"and this is run {self.run}"
            )
        return manifest

    def arrays(self, step: int) -> Arrays:
        """Open the arrays of a checkpoint, to read them on the host.

        Args:
          step: the checkpoint's step.

        Raises:
          CheckpointError: see `manifest`.
        """
        return open_arrays(self.place.finished(step), self._own_manifest(step))

    def _stores(self, step: int) -> list[Checkpoints]:
        """Return where to read a checkpoint, the best first; equally many on all processes."""
        return [self]

    def restore(
        self,
        step: int | None,
        state: TrainState,
        shardings: TrainState | None,
        say: Callable[[str], None] = log.info,
        check: Callable[[Manifest], None] = lambda _: None,
    ) -> TrainState:
        """Restore a state onto the layout of `shardings`.

        Optimizer state that was saved in another precision or with other 8-bit tiles is converted, and second moments
        that an older version rounded to 0 are raised; both print a line with `say`.

        Args:
          step: the checkpoint's step; `None` is the newest that is not damaged on any process. Damaged ones are
            logged, with the file and the array.
          state: shapes and dtypes, as `Blueprint.abstract_state()` gives. The guards' memory is read as it was saved,
            and frozen parameters are not read (see `Blueprint.completed`).
          shardings: a sharding per array, or `None` for the default device.
          say: prints a line.
          check: raises if the run cannot use a checkpoint with this manifest.

        Raises:
          DamagedCheckpoint: a file is not what was written.
          CheckpointError: arrays are missing, extra or of another shape or dtype; the message lists them.
        """
        state, shardings = state.saved, None if shardings is None else shardings.saved

        def read(manifest: Manifest, arrays: Arrays) -> tuple[TrainState, TrainState, bool]:
            check(manifest)
            stored, places_ = as_saved(state, shardings, manifest["leaves"])
            guards = memory_saved(manifest["leaves"])  # the run may have other guards now
            stored = dataclasses.replace(stored, guards=guards)
            if places_:
                replicated = places_.step
                places_ = dataclasses.replace(places_, guards=jax.tree.map(lambda _: replicated, guards))
            want = flatten(stored)
            where = flatten(places_) if places_ else dict.fromkeys(want, _default_sharding())
            got = _read(manifest, arrays, want, where, "")
            got["rng"] = jax.random.wrap_key_data(got["rng"])
            treedef: Any
            paths, treedef = jax.tree_util.tree_flatten_with_path(stored)
            whole_state = jax.tree.unflatten(treedef, [got[path_name(path)] for path, _ in paths])
            return whole_state, stored, has_lost_moments(manifest["leaves"])

        chosen, (restored, stored, lost) = self._first_undamaged(step, read, say)
        structures: Any = [jax.tree.structure(s.opt_state) for s in (stored, state)]
        dtypes = [[x.dtype for x in jax.tree.leaves(s.opt_state)] for s in (stored, state)]
        same = dtypes[0] == dtypes[1] and structures[0] == structures[1]
        if same and not lost:
            return restored
        if not same:
            say(f"converted the optimizer state of checkpoint {chosen} from another precision or other 8-bit tiles")
        if lost:
            say(f"checkpoint {chosen} is of a version that rounded small second moments to 0 in 8 bits; zeros were "
                "raised to the smallest 8-bit value, so that no step divides by eps")  # fmt: skip
        placed = shardings.opt_state if shardings else None
        raised = raise_zeros if lost else lambda s: s
        convert = jax.jit(lambda s: convert_state(raised(s), state.opt_state), out_shardings=placed)
        return dataclasses.replace(restored, opt_state=convert(restored.opt_state))

    def restore_params(
        self,
        step: int | None,
        infos: Tree,
        layout: Layout | None,
        say: Callable[[str], None] = log.info,
        part: str = "params",
        some: bool = False,
    ) -> Tree:
        """Restore only the parameters, onto any layout.

        Args:
          step: the checkpoint's step; `None` is the newest that is not damaged.
          infos: a `TensorInfo` per parameter.
          layout: where to place them; `None` is the default device.
          say: prints a line.
          part: the part of the state that holds them (see `Algorithm.weights_in`).
          some: whether the checkpoint may have further arrays, which are not read.

        Raises:
          CheckpointError: as `restore`.
        """
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        want = {f"{part}/{path_name(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(params)}
        placed = shardings_of(infos, layout)
        where = dict.fromkeys(want, _default_sharding())
        if placed is not None:
            where = {f"{part}/{path_name(p)}": s for p, s in jax.tree_util.tree_leaves_with_path(placed)}
        got = self._first_undamaged(step, lambda m, a: _read(m, a, want, where, f"{part}/", some), say)[1]
        return jax.tree.unflatten(jax.tree.structure(params), [got[name] for name in want])

    def set_aside(self, after: int) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again; nothing is deleted.

        Called by process 0 of a resumed run.

        Args:
          after: the step that the run resumes from; checkpoints of later steps are renamed.
        """
        for step in self.steps():
            if step > after:
                try:
                    self.place.set_aside(step)
                except BucketError as e:
                    raise failure(CheckpointError, e, running=True) from None
                except OSError as e:
                    raise CheckpointError(f"checkpoint {step} in {self.place} cannot be renamed: {e.strerror}") from e

    def _first_undamaged(
        self, step: int | None, read: Callable[[Manifest, Arrays], T], say: Callable[[str], None]
    ) -> tuple[int, T]:
        """Read the newest checkpoint that is not damaged on any process, or that of `step`; returns step and result."""
        steps = [step] if step is not None else agree.broadcast(self.steps())[::-1]
        fault = ""
        for one, store in [(s, store) for s in steps for store in self._stores(s)]:
            results: list[T] = []
            fault, hopeless = "", 0
            try:
                manifest = store._own_manifest(one)
                if manifest["digest"] is None:
                    say(f"checkpoint {one} in {store.place} is of schema {manifest['written']}, which has no digests: "
                        "its values are loaded unchecked")  # fmt: skip
                results.append(read(manifest, open_arrays(store.place.finished(one), manifest)))
            except CheckpointError as e:
                fault, hopeless = str(e), 0 if isinstance(e, DamagedCheckpoint) else 1 + isinstance(e, OtherArrays)
            # processes read different chunks, and one may not see the folder
            fault, hopeless = max(agree.gather([fault, hopeless]), key=lambda answer: (answer[1], bool(answer[0])))
            if hopeless:
                raise (CheckpointError, OtherArrays)[hopeless - 1](fault)
            if not fault:
                return one, results[0]
            if (one != steps[-1] or store is not self._stores(one)[-1]) and jax.process_index() == 0:
                log.warning("%s; going back to the checkpoint before it", fault)
        if not steps:
            raise CheckpointError(f"there is no finished checkpoint in {self.place}")
        if len(steps) > 1:
            raise DamagedCheckpoint(f"all checkpoints in {self.place} are damaged; the oldest: {fault}")
        raise DamagedCheckpoint(fault)


def _read(
    manifest: Manifest, arrays: Arrays, want: dict[str, Any], where: dict[str, Any], prefix: str, some: bool = False
) -> dict[str, jax.Array]:
    saved = {k: v for k, v in manifest["leaves"].items() if k.startswith(prefix) and (k in want or not some)}
    check_same(saved, want, f"checkpoint {manifest['step']}")
    return {name: place(arrays, name, x, where[name]) for name, x in want.items()}


def _default_sharding() -> jax.sharding.Sharding:
    chosen = getattr(jax.config, "jax_default_device", None)  # set by `jax.default_device` in this thread
    return jax.sharding.SingleDeviceSharding(chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0])
