"""Taking snapshots: the state goes to host memory between two steps, and pieces of it to other processes after that."""

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
from jaxscale.train.checkpoints.digest import DIGESTS, NEW
from jaxscale.train.snapshots.erasure import LARGEST, Code
from jaxscale.train.snapshots.peers import Meeting, Message, Peers
from jaxscale.train.snapshots.shelf import GENERATIONS, Shelf
from jaxscale.train.snapshots.table import Table


def code_for(processes: int, parity: int) -> Code:
    """How copies are spread over so many processes; alone there is nobody to give a copy to.

    Raises:
      ConfigError: there are more processes and copies than bytes have values.
    """
    if processes + parity > LARGEST:
        most = LARGEST - processes
        advice = f"use Snapshots.parity = {most}" if most >= 0 else "use Snapshots.every = 0, which takes none"
        raise ConfigError(
            f"Snapshots.parity = {parity} for {processes} processes: both together may be {LARGEST} at most; {advice}"
        )
    return Code(processes, min(parity, processes - 1))


class Keeper:
    """One process's side.

    Step s is whole once every process has its blob and its parities of it and has told so; nobody writes over the
    generation before until then. So whenever processes are lost, one of the last two snapshots is whole.

    Args:
      root: this run's folder in this machine's memory.
      parity: how many processes may be lost at once.
      meeting: of all processes.
      process_of: the process of a device.
    """

    def __init__(self, root: Path, parity: int, meeting: Meeting, process_of: Callable[[jax.Device], int]):
        self.root, self.meeting, self.process_of = root, meeting, process_of
        self.me = meeting.me
        self.code = code_for(meeting.count, parity)
        self.shelf: Shelf | None = None
        self.peers = Peers(meeting, self._told)
        self._generation = 0
        self._changed = threading.Condition()
        self._done: dict[int, dict[int, str]] = {}
        self._folded: dict[int, int] = {}
        self._rows: set[tuple[int, int]] = set()
        self._jobs: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._worker: threading.Thread | None = None

    def begin(self, arrays: Mapping[str, Any], facts: dict[str, Any]) -> None:
        """Makes room for snapshots of arrays like these; all processes call it before the first.

        Args:
          arrays: by name, with shapes, dtypes and shardings.
          facts: JSON-able; only a run with the same ones is given these snapshots back.

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
        self.meeting.gather("ready")  # nobody sends to one that has no room yet
        self._worker = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._worker.start()

    def take(self, step: int, arrays: Mapping[str, jax.Array]) -> float:
        """Copies the arrays to host memory, and has the rest done in the background; then they may be donated.

        Args:
          step: whose state they are.
          arrays: those that `begin` was told of.

        Returns:
          the seconds it took, once the arrays were computed.

        Raises:
          ConnectionError: a process that holds a copy has gone.
        """
        shelf = self._shelf
        shards = {
            (name, region_of(s.index, x.shape)): s.data for name, x in arrays.items() for s in x.addressable_shards
        }
        sources = [shards[piece.name, piece.region] for piece in self.mine]
        for source in sources:
            source.copy_to_host_async()
        jax.block_until_ready(sources)
        begun = time.perf_counter()
        self.wait()
        generation, self._generation = self._generation, self._generation + 1
        with self._changed:
            self._enter(generation, step)
        blob = shelf.own[generation % GENERATIONS]
        for piece, source in zip(self.mine, sources, strict=True):
            data = as_bytes(np.asarray(source))
            blob[piece.start : piece.start + data.size] = data
        self._idle.clear()
        self._jobs.put((generation, step))
        return time.perf_counter() - begun

    def wait(self) -> None:
        """Until the last snapshot is whole; the watchdog ends a process that waits for one that has gone.

        Raises:
          ConnectionError: a process that holds a copy has gone.
        """
        self._idle.wait()
        if self._failure is not None:
            raise ConnectionError(f"a snapshot was not told to all others: {self._failure}") from self._failure

    def forget(self) -> None:
        """Takes back all there are, as when a run goes back to before them. All processes call this."""
        self.wait()
        with self._changed:
            for slot in range(GENERATIONS):
                self._shelf.clear(slot)
        self._remove_others()

    def close(self, *, forget: bool) -> None:
        """Ends it; where `forget`, as after a run that is finished, the memory is given back."""
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
            try:
                self._spread(*job)
            except OSError as e:
                self._failure = e
            self._idle.set()

    def _spread(self, generation: int, step: int) -> None:
        shelf, slot = self._shelf, generation % GENERATIONS
        blob = shelf.own[slot]
        found = digest_of(blob)
        with self._changed:
            shelf.note(slot, own=found)
        about = {"generation": generation, "step": step, "from": self.me}
        for i, stripe in enumerate(self.code.stripes(self.me)):
            data = blob[i * self.piece : (i + 1) * self.piece]
            for row, holder in enumerate(self.code.holders(stripe)):
                self.peers.send(holder, {**about, "kind": "piece", "row": row}, data)
        wanted = self.code.pieces * self.code.parity
        with self._changed:
            self._changed.wait_for(lambda: self._folded.get(generation, 0) == wanted)
            shelf.note(slot, parity=True)
            self._done.setdefault(generation, {})[self.me] = found
        for other in range(self.code.count):
            if other != self.me:
                self.peers.send(other, {**about, "kind": "done", "digest": found})
        with self._changed:
            self._changed.wait_for(lambda: len(self._done.get(generation, {})) == self.code.count)
            shelf.note(slot, digests=self._done.pop(generation))
            self._folded.pop(generation, None)
        if generation == 0:
            self._remove_others()

    def _remove_others(self) -> None:
        """Those of before a restart."""
        for old in self.root.iterdir():
            if old.name != self.session:
                shutil.rmtree(old, ignore_errors=True)

    def _told(self, message: Message, data: np.ndarray) -> np.ndarray | None:
        kind = message["kind"]
        if kind == "read":
            return read_part(self.root, message)
        generation, sender = message["generation"], message["from"]
        with self._changed:
            self._enter(generation, message["step"])
            if kind == "done":
                self._done.setdefault(generation, {})[sender] = message["digest"]
                self._shelf.note(generation % GENERATIONS, digests=self._done[generation])
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
        """The first word of a generation, whoever says it: what is in its place is no longer whole."""
        slot = generation % GENERATIONS
        if self._shelf.generation(slot) != generation:
            self._shelf.clear(slot, generation=generation, step=step)
            self._rows = {r for r in self._rows if r[0] > generation - GENERATIONS}


def digest_of(blob: np.ndarray) -> str:
    """Of a blob's bytes."""
    return DIGESTS[NEW](blob)


def read_part(root: Path, message: Message) -> np.ndarray:
    """Bytes of a file of this machine's snapshots."""
    path = (root / message["path"]).resolve()
    if not path.is_relative_to(root.resolve()):
        raise OSError(f"{path} is not a snapshot's")
    return np.fromfile(path, np.uint8, message["size"], offset=message["start"])


def read_states(root: Path) -> dict[str, Any]:
    """What there is in this machine's memory, by `session/process`."""
    found = {}
    for path in root.glob("*/*/state.json"):
        try:
            found[str(path.parent.relative_to(root))] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # being removed
    return found


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return  # others are not done with it
