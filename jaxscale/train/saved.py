"""The saved states of a run: what is said beside each, and what has to hold before the run goes on from one."""

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
    """The states that a run goes on from, on disk and in memory.

    What they were trained on is said beside them, and a run that was given something else does not go on from them.

    Args:
      run: whose they are.
      prepared: its model and data.
      checkpoints: its own; given the run's id when one is restored.
      say: takes a sentence for the user.
    """

    def __init__(self, run: RunFolder, prepared: Prepared, checkpoints: Checkpoints, say: Callable[[str], None]):
        self.run, self.prepared, self.checkpoints, self.say = run, prepared, checkpoints, say
        self.config = run.config

    def first(self, snapshots: Taker, resuming: bool) -> TrainState:
        """Out of memory where there is a snapshot newer than every checkpoint, else off the disk, else a new one."""
        blueprint, newest = self.prepared.blueprint, snapshots.newest()
        if newest > agree.broadcast(self.last_step()):
            shapes, places = blueprint.abstract_state(), blueprint.shardings()
            state = snapshots.restore(shapes, places, self.facts(), self.say)
            if state is not None:
                return blueprint.completed(state)
        return self.restore() if resuming else blueprint.init(self.config.seed)

    def save(self, state: TrainState) -> None:
        """Starts writing a checkpoint.

        Raises:
          CheckpointError: see `Checkpoints.save`.
        """
        layout = None if self.config.layout is None else str(self.config.layout)
        facts = {"layout": layout, "data": self.prepared.fingerprint, "rows": self._rows(), **self._start}
        blueprint = self.prepared.blueprint
        self.checkpoints.save(state, blueprint.algorithm.infos(blueprint), {**facts, "steps": self.config.steps})

    def restore(self) -> TrainState:
        """The state of the newest checkpoint that is whole; those after it are set aside.

        Raises:
          CheckpointError: there is none, or it is of another model, or of adapters over other parameters.
          RunError: the data or its rows are others.
        """
        blueprint, manifest = self.prepared.blueprint, {}

        def check(found: dict[str, Any]) -> None:
            self._check_data(found)
            self._check_start(found)
            manifest.update(found)

        state = self.checkpoints.restore(None, blueprint.abstract_state(), blueprint.shardings(), self.say, check)
        state = blueprint.completed(state)
        step = int(state.step)
        if self.run.is_main:
            self.checkpoints.set_aside(after=step)
        self.checkpoints.run = self.checkpoints.run or manifest["run"]
        if self.prepared.schedule is not None and manifest.get("steps") != self.config.steps:
            rate = float(self.prepared.schedule(step))
            self.say(
                f"train.steps was {manifest.get('steps')} and is {self.config.steps}: the schedule is made anew, and "
                f"goes on with a learning rate of {rate:.3g}"
            )
        return state

    def last_step(self) -> int:
        """The step of the newest checkpoint, or 0."""
        steps = self.checkpoints.steps()
        return steps[-1] if steps else 0

    def facts(self) -> dict[str, Any]:
        """What a snapshot has to have in common with this run; all processes have to call this."""
        run = agree.broadcast(self.checkpoints.run)
        return {"run": run, "data": self.prepared.fingerprint, "rows": self._rows(), "steps": self.config.steps}

    def _check_data(self, manifest: dict[str, Any]) -> None:
        rows = manifest.get("rows")
        if not isinstance(rows, dict):
            raise RunError(f"the checkpoint of {self.run.path} does not say what its rows were; start a new run")
        for key, value in self._rows().items():
            if rows.get(key) != value:
                raise RunError(
                    f"{self.run.path} was trained with train.{key} = {rows.get(key)!r}, and a run keeps its "
                    f"rows; leave it so, or start a new run for {value!r}"
                )
        saved = manifest.get("data")
        if saved != self.prepared.fingerprint:
            raise RunError(
                f"the corpus is not the one {self.run.path} was trained on (its fingerprint was {str(saved)[:12]} and "
                f"is {self.prepared.fingerprint[:12]}); start a new run, or bring the old files back"
            )

    def _check_start(self, manifest: dict[str, Any]) -> None:
        """That a run whose start is in no checkpoint goes on with the one that it began with."""
        if self.config.keeps_start and manifest.get("start") != self._start.get("start"):
            raise CheckpointError(
                f"{self.run.path} was trained with other frozen parameters than those of "
                f"{self.config.start}; bring that checkpoint back, or name it with --gin.FromRun.path and .step"
            )

    @functools.cached_property
    def _start(self) -> dict[str, Any]:
        """What a checkpoint says of where the run started; for most runs nothing depends on it any more."""
        start = self.config.start
        return {} if start is None or not self.config.keeps_start else {"start": start.fingerprint()}

    def _rows(self) -> dict[str, Any]:
        """The settings that decide what a row of data is."""
        return {"seq_len": self.config.seq_len, "packing": self.config.packing}
