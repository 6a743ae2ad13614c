"""What a person sees while a sweep runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxscale.sweep.axes import split
from jaxscale.sweep.base import Axis, Record
from jaxscale.sweep.outcomes import plain
from jaxscale.train.report import Reporter

if TYPE_CHECKING:
    from jaxscale.sweep.sweep import Sweep


class Live:
    """A line whenever the state of a trial changes.

    Args:
      folder, sweep, space, steps: of the sweep.
      quiet: say nothing.
    """

    def __init__(self, folder: Path, sweep: Sweep, space: Mapping[str, Axis], steps: int, *, quiet: bool):
        self.folder, self.sweep, self.space, self.steps = folder, sweep, space, steps
        self.reporter = Reporter(quiet)
        self.states: dict[int, str] = {}

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, records: Sequence[Record]) -> None:
        """The records as they are now."""
        for record in records:
            if self.states.get(record.trial.id) == record.state:
                continue
            self.states[record.trial.id] = record.state
            bound = ", ".join(f"{name} = {plain(value)}" for name, value in split(record.trial.bindings).items())
            value = f" · {self.sweep.objective} {record.curve[-1][1]:.4f}" if record.curve else ""
            why = f" · {record.error}" if record.error else ""
            self.reporter.say(f"{record.trial.id:03} {record.state} · {bound}{value}{why}")
