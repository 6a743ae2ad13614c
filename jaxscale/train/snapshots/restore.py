"""Restore the newest complete snapshot from the memory of the remaining machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.train.checkpoints.chunks import region_of
from jaxscale.train.snapshots.erasure import Code
from jaxscale.train.snapshots.keeper import digest_of, read_part, read_states
from jaxscale.train.snapshots.peers import Meeting, Peers
from jaxscale.train.snapshots.table import Piece, Table, assemble

ABOUT_LIMIT = 2**26


class Left:
    """The remaining parts of one snapshot.

    Args:
      root: this run's folder in this machine's memory.
      peers: connections to other processes, which read the memory of other machines.
      servers: by folder (`session/process`), a process that can read it; this one if it can.
      me: index of this process.
      session: session of the processes that took the snapshot.
      step: its step.
      slots: by process, the slot that the snapshot is in, and that slot's state (see `Shelf.mark`).
      about: the session's `about.json`.
    """

    def __init__(
        self,
        root: Path,
        peers: Peers,
        servers: dict[str, int],
        me: int,
        session: str,
        step: int,
        slots: dict[int, tuple[int, dict[str, Any]]],
        about: dict[str, Any],
    ):
        self.root, self.peers, self.servers, self.me = root, peers, servers, me
        self.session, self.step, self.slots = session, step, slots
        self.code, self.size = Code(about["count"], about["parity"]), about["piece"]
        self.table, self.facts = Table.from_json(about["table"]), about["facts"]
        self.digests: dict[int, str] = {}
        for process, (_, slot) in slots.items():
            self.digests |= {int(p): d for p, d in slot.get("digests", {}).items()}
            if "own" in slot:
                self.digests[process] = slot["own"]
        self.lost = {p for p in range(self.code.count) if "own" not in slots.get(p, (0, {}))[1]}
        self._blobs: dict[int, np.ndarray] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every blob is available, or can be recomputed from the others."""
        if not self.lost <= self.digests.keys():
            return False
        for stripe in range(self.code.count):
            missing = sum(p in self.lost for p in self.code.givers(stripe))
            if missing > sum(self._has_parity(p) for p in self.code.holders(stripe)):
                return False
        return True

    def blob(self, process: int) -> np.ndarray:
        """Return the blob of a process, recomputed if it is lost.

        Raises:
          CheckpointError: its digest is wrong.
        """
        if process not in self._blobs:
            if process in self.lost:
                self._recover()
            else:
                self._blobs[process] = self._read(process, "own", 0, self.code.pieces * self.size)
            if digest_of(self._blobs[process]) != self.digests[process]:
                raise CheckpointError(f"the snapshot of step {self.step} of process {process} is not what was taken")
        return self._blobs[process]

    def array(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """Make an array of the snapshot, with the given sharding."""
        shape, dtype = self.table.arrays[name]
        pieces = [p for p in self.table.pieces if p.name == name]

        def values(piece: Piece) -> np.ndarray:
            return self.table.take(piece, self.blob(piece.owner))

        def part(index: Any) -> np.ndarray:
            out = assemble(region_of(index, shape), dtype, ((p.region, partial(values, p)) for p in pieces))
            assert out is not None, "a table has every part of its arrays"
            return out

        return jax.make_array_from_callback(shape, sharding, part)

    def _has_parity(self, process: int) -> bool:
        return bool(self.slots.get(process, (0, {}))[1].get("parity"))

    def _recover(self) -> None:
        for p in self.lost:
            self._blobs[p] = np.zeros(self.code.pieces * self.size, np.uint8)

        def piece(process: int, stripe: int) -> np.ndarray:
            return self._read(process, "own", self.code.stripes(process).index(stripe) * self.size, self.size)

        def parity(stripe: int, row: int) -> np.ndarray | None:
            holder = self.code.holders(stripe)[row]
            return self._read(holder, "parity", row * self.size, self.size) if self._has_parity(holder) else None

        for process, stripe, data in self.code.recover(self.lost, piece, parity):
            start = self.code.stripes(process).index(stripe) * self.size
            self._blobs[process][start : start + self.size] = data

    def _read(self, process: int, what: str, start: int, size: int) -> np.ndarray:
        folder = f"{self.session}/{process}"
        path = f"{folder}/{what}-{self.slots[process][0]}"
        return read(self.root, self.peers, self.servers[folder], self.me, path, start, size)


def read(root: Path, peers: Peers, server: int, me: int, path: str, start: int, size: int) -> np.ndarray:
    """Read bytes of a snapshot file, in this machine's memory or through another process.

    Args:
      root: this run's folder in this machine's memory.
      peers: connections to other processes.
      server: the process that can read the file.
      me: index of this process.
      path: the file, relative to the run's folder.
      start: first byte.
      size: most bytes to read.
    """
    message = {"kind": "read", "path": path, "start": start, "size": size}
    return read_part(root, message) if server == me else peers.ask(server, message)


def newest(root: Path, peers: Peers, meeting: Meeting) -> Left | None:
    """Find the newest snapshot that can be restored, the same on every process; all processes must call this.

    Args:
      root: this run's folder in this machine's memory.
      peers: connections to other processes.
      meeting: exchanges small values between all processes.
    """
    reports = [json.loads(text) for text in meeting.gather(json.dumps(read_states(root)))]
    states: dict[str, Any] = {}
    servers: dict[str, int] = {}
    for process in reversed(range(meeting.count)):
        for folder, slots in reports[process].items():
            states[folder], servers[folder] = slots, process
    servers |= dict.fromkeys(reports[meeting.me], meeting.me)
    snapshots: dict[tuple[int, str], dict[int, tuple[int, dict[str, Any]]]] = {}
    for folder, slots in states.items():
        session, _, owner = folder.partition("/")
        for i, slot in enumerate(slots):
            if "step" in slot:
                snapshots.setdefault((slot["step"], session), {})[int(owner)] = (i, slot)
    for step, session in sorted(snapshots, reverse=True):
        some = f"{session}/{min(snapshots[step, session])}"
        about = read(root, peers, servers[some], meeting.me, f"{some}/about.json", 0, ABOUT_LIMIT)
        where = (root, peers, servers, meeting.me, session, step)
        left = Left(*where, snapshots[step, session], json.loads(about.tobytes()))
        if left.is_whole:
            return left
    return None


def load(
    left: Left, want: Mapping[str, Any], where: Mapping[str, jax.sharding.Sharding], meeting: Meeting
) -> dict[str, jax.Array]:
    """Load all arrays of a snapshot; all processes must call this, and all succeed or all raise.

    Args:
      left: from `newest`.
      want: expected shapes and dtypes, by name.
      where: shardings, by name.
      meeting: exchanges small values between all processes.

    Raises:
      CheckpointError: the arrays are not the expected ones, or a digest is wrong; the same on all processes.
    """
    fault, out = "", {}
    expected = {name: (tuple(x.shape), np.dtype(x.dtype).name) for name, x in want.items()}
    different = [k for k in {**expected, **left.table.arrays} if expected.get(k) != left.table.arrays.get(k)]
    try:
        if different:
            raise CheckpointError(f"the snapshot of step {left.step} is of another model: {different[0]} differs")
        out = {name: left.array(name, where[name]) for name in want}
    except (CheckpointError, OSError, ValueError) as e:
        fault = str(e)
    fault = next((f for f in meeting.gather(fault) if f), "")
    if fault:
        raise CheckpointError(fault)
    return out
