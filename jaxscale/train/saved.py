"""Save and restore a run's state, with the facts that have to match before training continues from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxscale.errors import CheckpointError, RunError
from jaxscale.step.prepare import Prepared
from jaxscale.step.state import TrainState
from jaxscale.train import agree
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.run import RunFolder
from jaxscale.train.snapshots.taker import Taker


class Saved:
    """A run's saved states, on disk and in memory.

    Each records the data it was trained on, and is not used by a run with other data.

    Args:
      run: the run.
      prepared: its compiled parts and data.
      checkpoints: its checkpoints; their `run` is set to the run's id when one is restored.
      say: prints a line.
    """

    def __init__(self, run: RunFolder, prepared: Prepared, checkpoints: Checkpoints, say: Callable[[str], None]):
        self.run, self.prepared, self.checkpoints, self.say = run, prepared, checkpoints, say
        self.config = run.config

    def first(self, snapshots: Taker, resuming: bool) -> TrainState:
        """Return the state to start from: a snapshot newer than all checkpoints, else a checkpoint, else a new state.

        Args:
          snapshots: the run's in-memory snapshots.
          resuming: whether to restore the newest checkpoint.
        """
        blueprint, newest = self.prepared.blueprint, snapshots.newest()
        if newest > agree.broadcast(self.last_step()):
            shapes, places = blueprint.abstract_state(), blueprint.shardings()
            state = snapshots.restore(shapes, places, self.facts(), self.say)
            if state is not None:
                return blueprint.completed(state)
        return self.restore() if resuming else blueprint.init(self.config.seed)

    def save(self, state: TrainState) -> None:
        """Start writing a checkpoint.

        Args:
          state: the state to save.

        Raises:
          CheckpointError: see `Checkpoints.save`.
        """
        layout = None if self.config.layout is None else str(self.config.layout)
        facts = {"layout": layout, "data": self.prepared.fingerprint, "rows": self._rows(), **self._start}
        blueprint = self.prepared.blueprint
        facts["steps"] = self.config.steps
        infos = blueprint.algorithm.infos(blueprint)
        self.checkpoints.save(state, infos, facts, overlap=self.config.overlap_saves)

    def restore(self) -> TrainState:
        """Restore the newest checkpoint that is not damaged; newer, damaged ones are renamed.

        Raises:
          CheckpointError: there is no such checkpoint, or it is of another model or start.
          RunError: it was trained on other data.
        """
        blueprint, manifest = self.prepared.blueprint, {}

        def check(candidate: dict[str, Any]) -> None:
            self._check_data(candidate)
            self._check_start(candidate)
            manifest.update(candidate)

        state = self.checkpoints.restore(None, blueprint.abstract_state(), blueprint.shardings(), self.say, check)
        state = blueprint.completed(state)
        step = int(state.step)
        if self.run.is_main:
            self.checkpoints.set_aside(after=step)
        self.checkpoints.run = self.checkpoints.run or manifest["run"]
        if self.prepared.schedule is not None and manifest.get("steps") != self.config.steps:
            rate = float(self.prepared.schedule(step))
            self.say(
                f"train.steps was {manifest.get('steps')} and is now {self.config.steps}: the learning-rate schedule "
                f"is recomputed and continues at {rate:.3g}"
            )
        return state

    def last_step(self) -> int:
        """Return the step of the newest checkpoint, or 0 if there is none."""
        steps = self.checkpoints.steps()
        return steps[-1] if steps else 0

    def facts(self) -> dict[str, Any]:
        """Return the facts that a snapshot must share with this run; all processes must call this."""
        run = agree.broadcast(self.checkpoints.run)
        return {"run": run, "data": self.prepared.fingerprint, "rows": self._rows(), "steps": self.config.steps}

    def _check_data(self, manifest: dict[str, Any]) -> None:
        rows = manifest.get("rows")
        if not isinstance(rows, dict):
            raise RunError(
                f"{self.run.place} has the weights only and nothing to resume; start a new run from them: "
                f"jaxscale train CONFIG --from {self.run.place}"
            )
        for key, value in self._rows().items():
            if rows.get(key) != value:
                raise RunError(
                    f"{self.run.place} was trained with train.{key} = {rows.get(key)!r}, which cannot change within a "
                    f"run; keep that value, or start a new run for {value!r}"
                )
        saved = manifest.get("data")
        if saved != self.prepared.fingerprint:
            raise RunError(
                f"the corpus is not the one {self.run.place} was trained on (its fingerprint was {str(saved)[:12]} and "
                f"is {self.prepared.fingerprint[:12]}); start a new run, or restore the old files"
            )

    def _check_start(self, manifest: dict[str, Any]) -> None:
        """Check that frozen parameters, which are in no checkpoint, are those that the run began with."""
        for name, fingerprint in self._start.items():
            if manifest.get(name) != fingerprint:
                raise CheckpointError(
                    f"{self.run.place} was trained with other frozen parameters than those of "
                    f"{self.config.frozen_starts[name]}; restore that checkpoint, or name it with --gin.FromRun.path "
                    "and .step"
                )

    @functools.cached_property
    def _start(self) -> dict[str, Any]:
        """Entries of a manifest for the runs of which frozen parameters are read again."""
        return {name: start.fingerprint() for name, start in self.config.frozen_starts.items()}

    def _rows(self) -> dict[str, Any]:
        """The settings that define a row of data."""
        return {"seq_len": self.config.seq_len, "packing": self.config.packing}
