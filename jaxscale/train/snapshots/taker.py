"""Taking snapshots by their settings: what the training loop calls."""

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
    """What takes the snapshots of a run in this folder."""
    return Taking(settings, run) if settings.every else Taker()


class Taker:
    """Takes no snapshots."""

    def newest(self) -> int:
        """The step of the newest one of which enough is left, or -1. All processes call this."""
        return -1

    def restore(
        self, state: TrainState, shardings: TrainState | None, facts: dict[str, Any], say: Callable[[str], None]
    ) -> TrainState | None:
        """The state of the newest one, if there is one of these facts. All processes call this.

        Args:
          state: shapes and dtypes; of the frozen parameters none are kept (see `Blueprint.completed`).
          shardings: a sharding per array, or `None` for the default device.
          facts: as given to `begin`.
          say: told why there is none where there might be.
        """
        return None

    def begin(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Makes room for states like this one. All processes call this."""

    def after(self, step: int, state: TrainState) -> dict[str, Any]:
        """Takes one if it is time; what is to be told of it."""
        return {}

    def forget(self) -> None:
        """Takes back all there are: the run goes back to before them. All processes call this."""

    def close(self, *, forget: bool) -> None:
        """Ends it, and gives the memory back where `forget`."""


class Taking(Taker):
    """Takes them.

    Args:
      settings: how.
      run: the run's folder.
      meeting: of all processes; JAX's by default.
      process_of: the process of a device.
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
            say(f"the snapshot of step {left.step} is not used: it is of another run")
            return None
        state, shardings = state.saved, None if shardings is None else shardings.saved
        want = flatten(state)
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        where = flatten(shardings) if shardings is not None else dict.fromkeys(want, default)
        try:
            arrays = load(left, want, where, self.meeting)
        except CheckpointError as e:
            say(f"the newest snapshot is not used: {e}")
            return None
        arrays["rng"] = jax.random.wrap_key_data(arrays["rng"])
        again = f", {_processes(len(left.lost))} made again from parities" if left.lost else ""
        say(f"going on from the snapshot of step {left.step}, out of memory{again}")
        names = list(want)
        return jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in names])

    def begin(self, state: TrainState, facts: dict[str, Any]) -> None:
        """See `Taker`."""
        self.keeper.begin(flatten(state.saved), facts)

    def after(self, step: int, state: TrainState) -> dict[str, Any]:
        """See `Taker`; `snapshot_seconds` is what the step was held up for."""
        if step % self.settings.every:
            return {}
        return {"snapshot_seconds": self.keeper.take(step, flatten(state.saved))}

    def forget(self) -> None:
        """See `Taker`."""
        self.keeper.forget()

    def close(self, *, forget: bool) -> None:
        """See `Taker`."""
        self.keeper.close(forget=forget)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
