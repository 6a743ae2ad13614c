"""A sweep without runs: trials whose curves are formulas, advanced by workers in turns."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxscale.sweep.base import FAILED, FINISHED, PAUSED, RUNNING, STOPPED, WAITING, Axis, Record, Search, Trial

Curve = Callable[[Mapping[str, Any], int], float]
"""Bindings and a step -> objective."""


@dataclasses.dataclass
class Carried:
    """Result of a sweep.

    Args:
      records: records of all trials.
      spent: steps that all trials took together.
      bests: (steps spent, lowest objective of a finished trial) at each improvement.
      proposed: every trial that was started or continued, in order, with the records of that moment, whose curves have
        only their last point.
      idle: how often a worker had nothing to do while others worked.
    """

    records: list[Record] = dataclasses.field(default_factory=list)
    spent: int = 0
    bests: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    proposed: list[tuple[Trial, list[Record]]] = dataclasses.field(default_factory=list)
    idle: int = 0

    def at_step(self, step: int | None) -> set[int]:
        """Return the ids of trials that were told to run until a step."""
        return {trial.id for trial, _ in self.proposed if trial.until == step}

    @property
    def best(self) -> float:
        """Return the lowest objective of a finished trial."""
        return self.bests[-1][1] if self.bests else math.inf


def carry_out(
    search: Search,
    space: Mapping[str, Axis],
    curve: Curve,
    steps: int,
    *,
    runs: int | None = None,
    workers: int = 1,
    every: int = 1,
    failing: Collection[int] = (),
    killed_after: int | None = None,
    records: list[Record] | None = None,
    until: float = -math.inf,
    budget: float = math.inf,
    seed: int = 0,
) -> Carried:
    """Run a sweep as a coordinator does, and check the rules for every search.

    Args:
      search: the search.
      space: name -> axis.
      curve: objective of bindings at a step.
      steps: steps of a complete run.
      runs: largest number of trials.
      workers: trials that run at the same time; a random one of them advances next.
      every: steps between two measurements.
      failing: ids of trials that fail half-way to their first target.
      killed_after: number of turns after which the sweep stops.
      records: records of an earlier sweep that is continued.
      until: the sweep ends at this objective.
      budget: the sweep ends after this many steps.
      seed: random seed of the workers' order.
    """
    out, random = Carried(copy.deepcopy(records or [])), np.random.default_rng(seed)
    for record in out.records:
        record.state = WAITING if record.state == RUNNING else record.state
    turns = 0
    while True:
        while sum(r.state == RUNNING for r in out.records) < workers:
            waiting = [r for r in out.records if r.state == WAITING]
            if waiting:
                waiting[0].state = RUNNING
                continue
            trial = search.next(space, out.records, steps)
            if trial is None or (trial.id == len(out.records) and runs is not None and trial.id >= runs):
                out.idle += any(r.state == RUNNING for r in out.records)
                break
            out.proposed.append((trial, [dataclasses.replace(r, curve=r.curve[-1:]) for r in out.records]))
            _begin(out.records, trial, steps)
        running = [r for r in out.records if r.state == RUNNING]
        if not running or turns == killed_after or out.best <= until or out.spent >= budget:
            return out
        turns += 1
        _turn(out, running[random.integers(len(running))], search, curve, steps, every, failing)


def _begin(records: list[Record], trial: Trial, steps: int) -> None:
    end = steps if trial.until is None else trial.until
    assert 1 <= end <= steps and trial.until != steps, "a step of the run, and None for its last"
    if trial.id == len(records):
        records.append(Record(trial, RUNNING))
        return
    record = records[trial.id]
    assert record.state == PAUSED, f"trial {trial.id} is {record.state} and was proposed again"
    assert record.trial.until is not None and end > record.trial.until, "the trial already got there"
    assert trial.bindings == record.trial.bindings, "a trial keeps its bindings"
    record.trial, record.state = trial, RUNNING


def _turn(
    out: Carried, record: Record, search: Search, curve: Curve, steps: int, every: int, failing: Collection[int]
) -> None:
    before = record.curve[-1][0] if record.curve else 0
    end = steps if record.trial.until is None else record.trial.until
    step = min(before + every, end)
    out.spent += step - before
    if record.trial.id in failing and 2 * step >= end:
        record.state, record.error = FAILED, "it failed"
        return
    record.curve.append((step, curve(record.trial.bindings, step)))
    if step == end:
        record.state = FINISHED if end == steps else PAUSED
        if record.state == FINISHED and record.curve[-1][1] < out.best:
            out.bests.append((out.spent, record.curve[-1][1]))
    elif not search.keeps(record, out.records, steps):
        record.state = STOPPED
