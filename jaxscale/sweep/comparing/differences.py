"""Bindings that runs share, bindings that differ, and groups of runs that differ in their seed only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import RunError, near
from jaxscale.sweep.comparing.folders import SEED, Ran

POINTS = 300
"""A curve with more points than this is thinned to at most this many: means over consecutive steps."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one config that differ only in their seed.

    Args:
      label: the bindings that distinguish it from other groups.
      runs: indices into the list that was grouped.
    """

    label: str
    runs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Curves:
    """A metric of several runs on common steps.

    Args:
      metric: the metric's name.
      steps: [point], ascending; for thinned curves, the last step of each point.
      values: [run, point]; NaN if there is no finite value.
      present: [run, point], bool; whether the run has a value there, finite or not.
      thinned: how many steps a point is the mean of.
    """

    metric: str
    steps: np.ndarray
    values: np.ndarray
    present: np.ndarray
    thinned: int

    def band(self, runs: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return mean, minimum, maximum and number of the finite values of some runs at each point; NaN without any.

        Args:
          runs: indices of the runs.
        """
        values = self.values[list(runs)]
        finite = np.isfinite(values)
        count = finite.sum(0)
        some = count > 0
        mean = np.divide(np.where(finite, values, 0).sum(0), count, out=np.full(len(count), np.nan), where=some)
        low = np.where(some, np.where(finite, values, np.inf).min(0), np.nan)
        high = np.where(some, np.where(finite, values, -np.inf).max(0), np.nan)
        return mean, low, high, count


def differing(runs: Sequence[Ran]) -> dict[str, list[Any]]:
    """Return the bindings that differ between runs, each with a value per run; `None` if a run lacks it.

    A sweep's axes come first, under their own names. A setting of a part that some runs do not have (AdamW's `b1`
    beside Lion) does not count: the different part itself does.
    """
    differ: dict[str, list[Any]] = {}
    for name in _names(run.axes for run in runs):
        values = [run.axes.get(name, run.bindings.get(name)) for run in runs]
        if _differ(values):
            differ[name] = values
    axes = dict(differ)
    for name in _names(run.bindings for run in runs):
        values = [run.bindings.get(name) for run in runs]
        having = [i for i, run in enumerate(runs) if name in run.bindings]
        if name in differ or not _differ([values[i] for i in having]):
            continue
        tail = name.rsplit("/", 1)[-1]
        same = [axis for axis in axes if axis.rsplit("/", 1)[-1] == tail]
        if not any(all(str(axes[axis][i]) == str(values[i]) for i in having) for axis in same):
            differ[name] = values
    return differ


def shared(runs: Sequence[Ran]) -> dict[str, Any]:
    """Return the bindings that have the same value in every run with a config."""
    known = [run for run in runs if run.bindings]
    return {
        name: known[0].bindings[name]
        for name in _names(run.bindings for run in known)
        if all(name in run.bindings for run in known) and not _differ([run.bindings[name] for run in known])
    }


def groups_of(runs: Sequence[Ran], differs: dict[str, list[Any]] | None = None) -> list[Group]:
    """Group runs that differ only in their seed; a run whose config is unknown is a group of its own."""
    differs = differing(runs) if differs is None else differs
    members: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        setting = frozenset((k, repr(v)) for k, v in run.bindings.items() if k != SEED)
        members.setdefault(setting or run.path, []).append(i)
    apart = [name for name in differs if name != SEED]
    names = dict(zip(apart, short_names(apart), strict=True))
    groups = []
    for places in members.values():
        first = places[0]
        words = [f"{names[n]}={worded(differs[n][first])}" for n in apart if differs[n][first] is not None]
        label = ", ".join(words)
        if not words or len(label) > 60:
            label = runs[first].name if len(places) == 1 else f"{runs[first].name} and its seeds"
        groups.append(Group(label, tuple(places)))
    labels = [g.label for g in groups]
    return [
        dataclasses.replace(g, label=f"{g.label} · {runs[g.runs[0]].name}") if labels.count(g.label) > 1 else g
        for g in groups
    ]


def metrics_of(runs: Sequence[Ran]) -> list[str]:
    """Return the metrics that any run has: losses first, and held-out losses before other losses."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    return sorted(names, key=lambda name: (not is_loss(name), not name.startswith("eval"), names.index(name)))


def objective_of(runs: Sequence[Ran], metric: str | None = None) -> str | None:
    """Return the metric to compare runs by: the requested one, else a held-out loss, else a loss, else any.

    Args:
      runs: the runs.
      metric: the requested metric.

    Returns:
      its name; `None` if no run has metrics.

    Raises:
      RunError: no run has the requested metric, but they have others.
    """
    names = metrics_of(runs)
    if metric is not None and names and metric not in names:
        raise RunError(f"no run has a metric '{metric}'{near(metric, names)}")
    return metric if names and metric else next(iter(names), None)


def is_loss(metric: str) -> bool:
    """Whether a metric is a loss, perplexity or error by its name, so that lower is better; after "/" is a corpus."""
    return metric.partition("/")[0].endswith(("loss", "perplexity", "error"))


def last(run: Ran, metric: str) -> float | None:
    """Return the last value of a metric; `None` if there is none."""
    points = run.metrics.get(metric)
    return points[-1][1] if points else None


def best(run: Ran, metric: str) -> tuple[int, float] | None:
    """Return (step, value) of the lowest finite value of a metric; `None` if there is none."""
    points = [p for p in run.metrics.get(metric, []) if np.isfinite(p[1])]
    return min(points, key=lambda p: p[1]) if points else None


def curves_of(runs: Sequence[Ran], metric: str, points: int = POINTS) -> Curves:
    """Return a metric of all runs on common steps, thinned to at most `points` points."""
    raw = [run.metrics.get(metric, []) for run in runs]
    union = sorted({step for curve in raw for step, _ in curve})
    width = max(1, -(-len(union) // points))
    place = {step: i // width for i, step in enumerate(union)}
    steps = np.array(union[width - 1 :: width] + ([union[-1]] if len(union) % width else []), int)
    total, count = np.zeros((len(runs), len(steps))), np.zeros((len(runs), len(steps)), int)
    present = np.zeros(total.shape, bool)
    for r, curve in enumerate(raw):
        for step, value in curve:
            present[r, place[step]] = True
            if np.isfinite(value):
                total[r, place[step]] += value
                count[r, place[step]] += 1
    values = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return Curves(metric, steps, values, present, width)


def short_names(names: Sequence[str]) -> list[str]:
    """Return the shortest unambiguous suffix of each binding: `train.lr` is `lr` if no other ends so."""
    tails = [name.rsplit(".", 1)[-1] for name in names]
    middles = [name.rsplit("/", 1)[-1] for name in names]
    return [
        tail if tails.count(tail) == 1 else middle if middles.count(middle) == 1 else name
        for name, tail, middle in zip(names, tails, middles, strict=True)
    ]


def worded(value: object) -> str:
    """Return a binding's value as short text: floats to four digits, `@optimizer/AdamW()` as `AdamW`."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value.rsplit("/", 1)[-1].removeprefix("@").removesuffix("()") if value.startswith("@") else value
    return str(value)


def _names(dicts: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for d in dicts for name in d))


def _differ(values: Sequence[object]) -> bool:
    return len({repr(v) for v in values}) > 1
