"""Take snapshots: copy the state to host memory between two steps, then send pieces of it in the background."""

from __future__ import annotations

import json
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.train.checkpoints.chunks import as_bytes, region_of
from jaxscale.train.checkpoints.device_copies import device_copies
from jaxscale.train.checkpoints.digest import DIGESTS, NEW
from jaxscale.train.snapshots.erasure import LARGEST, Code
from jaxscale.train.snapshots.peers import Meeting, Message, Peers
from jaxscale.train.snapshots.shelf import GENERATIONS, Shelf
from jaxscale.train.snapshots.table import Table


def code_for(processes: int, parity: int) -> Code:
    """Return the erasure code for a number of processes; a single process has no parity.

    Args:
      processes: number of processes.
      parity: `Snapshots.parity`.

    Raises:
      ConfigError: processes and parities together are more than `LARGEST`.
    """
    if processes + parity > LARGEST:
        most = LARGEST - processes
        advice = f"use Snapshots.parity = {most}" if most >= 0 else "use Snapshots.every = 0 for no snapshots"
        raise ConfigError(
            f"Snapshots.parity = {parity} for {processes} processes: their sum may be at most {LARGEST}; {advice}"
        )
    return Code(processes, min(parity, processes - 1))


class Keeper:
    """Takes and stores the snapshots of one process.

    A snapshot is complete once every process has reported that it has its own blob and its parities. The one before is
    not overwritten until then, so one of the last two snapshots is complete whenever processes are lost.

    Args:
      root: this run's folder in this machine's memory.
      parity: how many processes may be lost at once.
      meeting: exchanges small values between all processes.
      process_of: returns the process of a device.
    """

    def __init__(self, root: Path, parity: int, meeting: Meeting, process_of: Callable[[jax.Device], int]):
        self.root, self.meeting, self.process_of = root, meeting, process_of
        self.me = meeting.me
        self.code = code_for(meeting.count, parity)
        self.shelf: Shelf | None = None
        self.peers = Peers(meeting, self._handle)
        self._generation = 0
        self._changed = threading.Condition()
        self._done: dict[int, dict[int, str]] = {}
        self._folded: dict[int, int] = {}
        self._rows: set[tuple[int, int]] = set()
        self._jobs: queue.SimpleQueue[tuple[int, int, list[jax.Array]] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._worker: threading.Thread | None = None

    def begin(self, arrays: Mapping[str, Any], facts: dict[str, Any]) -> None:
        """Allocate memory for snapshots; all processes must call this before the first one.

        Args:
          arrays: arrays (or shapes) by name, with shardings.
          facts: JSON-able facts; only a run with equal ones may restore these snapshots.

        Raises:
          ConfigError: there is too little memory.
        """
        self.table = Table.of(arrays, self.process_of)
        self.mine = [p for p in self.table.pieces if p.owner == self.me]
        self.piece = self.code.piece_size(max(self.table.blob(), 1))
        self.session = self.meeting.gather(secrets.token_hex(4))[0]
        sizes = {"own": self.code.pieces * self.piece, "parity": self.code.parity * self.piece}
        about = {"count": self.code.count, "parity": self.code.parity, "piece": self.piece, "facts": facts}
        folder = self.root / self.session / str(self.me)
        self.shelf = Shelf(folder, sizes, {**about, "table": self.table.to_json()})
        self.meeting.gather("ready")  # no process sends before all have allocated their memory
        self._worker = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._worker.start()

    def take(self, step: int, arrays: Mapping[str, jax.Array], *, overlap: bool = False) -> float:
        """Copy the arrays to host memory and send pieces in the background; on return they may be donated.

        Args:
          step: the step of the state.
          arrays: the arrays, by the names and with the shardings passed to `begin`.
          overlap: copy the arrays on their devices, and the copies to host memory in the background.

        Returns:
          the seconds it took after the arrays were computed; with `overlap`, from the call on.

        Raises:
          ConnectionError: a process that holds a copy has gone.
        """
        begun = time.perf_counter()
        if overlap:
            self.wait()  # for the previous copies' memory
            arrays = device_copies(arrays)
        shards = {
            (name, region_of(s.index, x.shape)): s.data for name, x in arrays.items() for s in x.addressable_shards
        }
        sources = [shards[piece.name, piece.region] for piece in self.mine]
        for source in sources:
            source.copy_to_host_async()
        if not overlap:
            jax.block_until_ready(sources)
            begun = time.perf_counter()
            self.wait()
        generation, self._generation = self._generation, self._generation + 1
        with self._changed:
            self._enter(generation, step)
        self._idle.clear()
        if overlap:
            self._jobs.put((generation, step, sources))
        else:
            self._fetch(generation, sources)
            self._jobs.put((generation, step, []))
        return time.perf_counter() - begun

    def _fetch(self, generation: int, sources: list[jax.Array]) -> None:
        blob = self._shelf.own[generation % GENERATIONS]
        for piece, source in zip(self.mine, sources, strict=True):
            data = as_bytes(np.asarray(source))
            blob[piece.start : piece.start + data.size] = data

    def wait(self) -> None:
        """Block until the last snapshot is complete; the watchdog ends a process that waits for a lost one.

        Raises:
          ConnectionError: a process that holds a copy has gone.
        """
        self._idle.wait()
        if self._failure is not None:
            raise ConnectionError(
                f"a snapshot could not be copied, or sent to all other processes: {self._failure}"
            ) from self._failure

    def forget(self) -> None:
        """Discard all snapshots, since the run goes back to a step before them. All processes must call this."""
        self.wait()
        with self._changed:
            for slot in range(GENERATIONS):
                self._shelf.clear(slot)
        self._remove_others()

    def close(self, *, forget: bool) -> None:
        """Close all connections.

        Args:
          forget: also free the memory, as after a run that is finished.
        """
        if self.shelf is not None:
            if forget:
                self.wait()
            self._jobs.put(None)
            if forget:
                self.shelf.remove()
                _remove_empty(self.root / self.session, self.root)
        self.peers.close()

    @property
    def _shelf(self) -> Shelf:
        assert self.shelf is not None, "begin() comes first"
        return self.shelf

    # --- in the background

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            generation, step, sources = job
            try:
                if sources:
                    self._fetch(generation, sources)
                del job, sources  # the copies' device memory
                self._spread(generation, step)
            except (OSError, jax.errors.JaxRuntimeError) as e:
                self._failure = e
            self._idle.set()

    def _spread(self, generation: int, step: int) -> None:
        shelf, slot = self._shelf, generation % GENERATIONS
        blob = shelf.own[slot]
        digest = digest_of(blob)
        with self._changed:
            shelf.mark(slot, own=digest)
        about = {"generation": generation, "step": step, "from": self.me}
        for i, stripe in enumerate(self.code.stripes(self.me)):
            data = blob[i * self.piece : (i + 1) * self.piece]
            for row, holder in enumerate(self.code.holders(stripe)):
                self.peers.send(holder, {**about, "kind": "piece", "row": row}, data)
        expected = self.code.pieces * self.code.parity
        with self._changed:
            self._changed.wait_for(lambda: self._folded.get(generation, 0) == expected)
            shelf.mark(slot, parity=True)
            self._done.setdefault(generation, {})[self.me] = digest
        for other in range(self.code.count):
            if other != self.me:
                self.peers.send(other, {**about, "kind": "done", "digest": digest})
        with self._changed:
            self._changed.wait_for(lambda: len(self._done.get(generation, {})) == self.code.count)
            shelf.mark(slot, digests=self._done.pop(generation))
            self._folded.pop(generation, None)
        if generation == 0:
            self._remove_others()

    def _remove_others(self) -> None:
        """Delete the snapshots of earlier sessions."""
        for old in self.root.iterdir():
            if old.name != self.session:
                shutil.rmtree(old, ignore_errors=True)

    def _handle(self, message: Message, data: np.ndarray) -> np.ndarray | None:
        """Handle a message of another process; returns the answer to a "read"."""
        kind = message["kind"]
        if kind == "read":
            return read_part(self.root, message)
        generation, sender = message["generation"], message["from"]
        with self._changed:
            self._enter(generation, message["step"])
            if kind == "done":
                self._done.setdefault(generation, {})[sender] = message["digest"]
                self._shelf.mark(generation % GENERATIONS, digests=self._done[generation])
            else:
                self._fold(generation, message["row"], sender, data)
            self._changed.notify_all()
        return None

    def _fold(self, generation: int, row: int, sender: int, data: np.ndarray) -> None:
        place = self._shelf.parity[generation % GENERATIONS][row * self.piece : (row + 1) * self.piece]
        if (generation, row) not in self._rows:
            self._rows.add((generation, row))
            place[:] = 0
        self.code.fold(place, data, row, sender)
        self._folded[generation] = self._folded.get(generation, 0) + 1

    def _enter(self, generation: int, step: int) -> None:
        """Reuse the slot of an older generation when the first message or blob of a new one arrives."""
        slot = generation % GENERATIONS
        if self._shelf.generation(slot) != generation:
            self._shelf.clear(slot, generation=generation, step=step)
            self._rows = {r for r in self._rows if r[0] > generation - GENERATIONS}


def digest_of(blob: np.ndarray) -> str:
    """Return the digest of a blob."""
    return DIGESTS[NEW](blob)


def read_part(root: Path, message: Message) -> np.ndarray:
    """Read bytes of a snapshot file on this machine.

    Args:
      root: this run's folder in this machine's memory.
      message: has "path" in that folder, "start" and "size".

    Raises:
      OSError: the path is outside of the folder.
    """
    path = (root / message["path"]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise OSError(f"{path} is not a file of a snapshot")
    return np.fromfile(path, np.uint8, message["size"], offset=message["start"])


def read_states(root: Path) -> dict[str, Any]:
    """Read the state of the snapshots in this machine's memory, by `session/process`."""
    states = {}
    for path in root.glob("*/*/state.json"):
        try:
            states[str(path.parent.relative_to(root))] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # it is being removed
    return states


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return  # another process still uses it
