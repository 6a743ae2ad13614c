"""Snapshots as the training loop uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxscale.errors import CheckpointError
from jaxscale.step.snapshots import Snapshots
from jaxscale.step.state import TrainState
from jaxscale.train.checkpoints.manifest import flatten
from jaxscale.train.snapshots.keeper import Keeper
from jaxscale.train.snapshots.peers import JaxMeeting, Meeting
from jaxscale.train.snapshots.restore import load, newest


def _process_of(device: jax.Device) -> int:
    return device.process_index


def taker(settings: Snapshots, run: Path) -> Taker:
    """Make the object that takes a run's snapshots.

    Args:
      settings: the run's settings of snapshots.
      run: the run's folder.
    """
    return Taking(settings, run) if settings.every else Taker()


class Taker:
    """Takes no snapshots; the interface of `Taking`."""

    def newest(self) -> int:
        """Return the step of the newest snapshot that can be restored, or -1. All processes must call this."""
        return -1

    def restore(
        self, state: TrainState, shardings: TrainState | None, facts: dict[str, Any], say: Callable[[str], None]
    ) -> TrainState | None:
        """Restore the newest snapshot, or return `None` if there is none of this run. All processes must call this.

        Args:
          state: shapes and dtypes; snapshots have no frozen parameters (see `Blueprint.completed`).
          shardings: a sharding per array, or `None` for the default device.
          facts: as passed to `begin`.
          say: prints which snapshot is used, or why it cannot be.
        """
        return None

    def begin(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Allocate memory for snapshots of states like this one. All processes must call this.

        Args:
          state: a state, or its shapes, with shardings.
          facts: JSON-able facts; only a run with equal ones may restore these snapshots.
        """

    def due(self, step: int) -> bool:
        """Return whether a snapshot is taken after this step."""
        return False

    def after(self, step: int, state: TrainState) -> dict[str, Any]:
        """Take a snapshot if one is due after this step; returns metrics to record."""
        return {}

    def forget(self) -> None:
        """Discard all snapshots, since the run goes back to a step before them. All processes must call this."""

    def close(self, *, forget: bool) -> None:
        """Close all connections, and free the memory if `forget`."""


class Taking(Taker):
    """Takes a snapshot every `settings.every` steps.

    Args:
      settings: the run's settings of snapshots.
      run: the run's folder.
      meeting: exchanges small values between all processes; by default through JAX's coordinator.
      process_of: returns the process of a device.
    """

    def __init__(
        self,
        settings: Snapshots,
        run: Path,
        meeting: Meeting | None = None,
        process_of: Callable[[jax.Device], int] = _process_of,
    ):
        self.settings, self.meeting = settings, meeting or JaxMeeting()
        self.keeper = Keeper(settings.root(run), settings.parity, self.meeting, process_of)
        self._left = newest(self.keeper.root, self.keeper.peers, self.meeting)

    def newest(self) -> int:
        """See `Taker`."""
        return -1 if self._left is None else self._left.step

    def restore(
        self, state: TrainState, shardings: TrainState | None, facts: dict[str, Any], say: Callable[[str], None]
    ) -> TrainState | None:
        """See `Taker`."""
        left, self._left = self._left, None
        if left is None:
            return None
        if left.facts != facts:
            say(f"not using the snapshot of step {left.step}: it is of another run")
            return None
        state, shardings = state.saved, None if shardings is None else shardings.saved
        want = flatten(state)
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        where = flatten(shardings) if shardings is not None else dict.fromkeys(want, default)
        try:
            arrays = load(left, want, where, self.meeting)
        except CheckpointError as e:
            say(f"not using the newest snapshot: {e}")
            return None
        arrays["rng"] = jax.random.wrap_key_data(arrays["rng"])
        recovered = f"; {_processes(len(left.lost))} recovered from parities" if left.lost else ""
        say(f"continuing from the snapshot of step {left.step} in host memory{recovered}")
        names = list(want)
        return jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in names])

    def begin(self, state: TrainState, facts: dict[str, Any]) -> None:
        """See `Taker`."""
        self.keeper.begin(flatten(state.saved), facts)

    def due(self, step: int) -> bool:
        """See `Taker`."""
        return step % self.settings.every == 0

    def after(self, step: int, state: TrainState) -> dict[str, Any]:
        """See `Taker`; `snapshot_seconds` is the time by which the snapshot delayed the step."""
        if not self.due(step):
            return {}
        return {"snapshot_seconds": self.keeper.take(step, flatten(state.saved), overlap=self.settings.overlap)}

    def forget(self) -> None:
        """See `Taker`."""
        self.keeper.forget()

    def close(self, *, forget: bool) -> None:
        """See `Taker`."""
        self.keeper.close(forget=forget)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
