"""What runs have in common, what they differ in, and which are one setting under several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import RunError, near
from jaxscale.sweep.comparing.folders import SEED, Ran

POINTS = 300
"""A curve with more points than this is thinned to so many: means over consecutive steps."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one config that differ in nothing but their seed.

    Args:
      label: what sets it apart from the other groups.
      runs: their places in the list that was grouped.
    """

    label: str
    runs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Curves:
    """A metric of several runs on common steps.

    Args:
      metric: its name.
      steps: ascending; where curves were thinned, the last of those that a point is the mean of.
      values: [run, step]; NaN where a value was not finite.
      there: [run, step]; whether the run has a value at that point at all, finite or not.
      thinned: how many steps a point is the mean of.
    """

    metric: str
    steps: np.ndarray
    values: np.ndarray
    there: np.ndarray
    thinned: int

    def band(self, runs: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Mean, least, greatest and number of the finite values of some runs at each step; NaN where there is none."""
        values = self.values[list(runs)]
        finite = np.isfinite(values)
        count = finite.sum(0)
        some = count > 0
        mean = np.divide(np.where(finite, values, 0).sum(0), count, out=np.full(len(count), np.nan), where=some)
        low = np.where(some, np.where(finite, values, np.inf).min(0), np.nan)
        high = np.where(some, np.where(finite, values, -np.inf).max(0), np.nan)
        return mean, low, high, count


def differing(runs: Sequence[Ran]) -> dict[str, list[Any]]:
    """The bindings that are not the same in all runs, each with its value by run; `None` where a run has none.

    A sweep's axes come first, under their own names. A setting of a part that some runs do not have (AdamW's `b1`
    beside Lion) is no difference by itself: that their parts differ is one.
    """
    found: dict[str, list[Any]] = {}
    for name in _names(run.axes for run in runs):
        values = [run.axes.get(name, run.bindings.get(name)) for run in runs]
        if _differ(values):
            found[name] = values
    axes = dict(found)
    for name in _names(run.bindings for run in runs):
        values = [run.bindings.get(name) for run in runs]
        having = [i for i, run in enumerate(runs) if name in run.bindings]
        if name in found or not _differ([values[i] for i in having]):
            continue
        tail = name.rsplit("/", 1)[-1]
        same = [axis for axis in axes if axis.rsplit("/", 1)[-1] == tail]
        if not any(all(str(axes[axis][i]) == str(values[i]) for i in having) for axis in same):
            found[name] = values
    return found


def shared(runs: Sequence[Ran]) -> dict[str, Any]:
    """The bindings that every run with a config has, with one value."""
    known = [run for run in runs if run.bindings]
    return {
        name: known[0].bindings[name]
        for name in _names(run.bindings for run in known)
        if all(name in run.bindings for run in known) and not _differ([run.bindings[name] for run in known])
    }


def groups_of(runs: Sequence[Ran], differs: dict[str, list[Any]] | None = None) -> list[Group]:
    """Runs by config, their seeds together; a run whose config is not known stands alone."""
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
    """The metrics that any run has; losses first, held-out ones before them."""
    found = list(dict.fromkeys(name for run in runs for name in run.metrics))
    return sorted(found, key=lambda name: (not is_loss(name), not name.startswith("eval"), found.index(name)))


def objective_of(runs: Sequence[Ran], metric: str | None = None) -> str | None:
    """The metric that runs are judged by: the one asked for, else a held-out loss, else a loss; `None` without numbers.

    Raises:
      RunError: no run has the metric that was asked for, and they have others.
    """
    found = metrics_of(runs)
    if metric is not None and found and metric not in found:
        raise RunError(f"no run has a metric '{metric}'{near(metric, found)}")
    return metric if found and metric else next(iter(found), None)


def is_loss(metric: str) -> bool:
    """Whether its name says that less of it is better; what follows a stroke is a corpus."""
    return metric.partition("/")[0].endswith(("loss", "perplexity", "error"))


def last(run: Ran, metric: str) -> float | None:
    """The last value of a metric, `None` where there is none."""
    points = run.metrics.get(metric)
    return points[-1][1] if points else None


def best(run: Ran, metric: str) -> tuple[int, float] | None:
    """(step, value) of the least finite value of a metric."""
    points = [p for p in run.metrics.get(metric, []) if np.isfinite(p[1])]
    return min(points, key=lambda p: p[1]) if points else None


def curves_of(runs: Sequence[Ran], metric: str, points: int = POINTS) -> Curves:
    """A metric of all runs on common steps, thinned where there are more than `points`."""
    raw = [run.metrics.get(metric, []) for run in runs]
    union = sorted({step for curve in raw for step, _ in curve})
    width = max(1, -(-len(union) // points))
    place = {step: i // width for i, step in enumerate(union)}
    steps = np.array(union[width - 1 :: width] + ([union[-1]] if len(union) % width else []), int)
    total, count = np.zeros((len(runs), len(steps))), np.zeros((len(runs), len(steps)), int)
    there = np.zeros(total.shape, bool)
    for r, curve in enumerate(raw):
        for step, value in curve:
            there[r, place[step]] = True
            if np.isfinite(value):
                total[r, place[step]] += value
                count[r, place[step]] += 1
    values = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return Curves(metric, steps, values, there, width)


def short_names(names: Sequence[str]) -> list[str]:
    """Bindings without what they do not need to be told apart: `train.lr` is `lr` where no other is."""
    tails = [name.rsplit(".", 1)[-1] for name in names]
    middles = [name.rsplit("/", 1)[-1] for name in names]
    return [
        tail if tails.count(tail) == 1 else middle if middles.count(middle) == 1 else name
        for name, tail, middle in zip(names, tails, middles, strict=True)
    ]


def worded(value: Any) -> str:
    """A binding's value, short: numbers to four digits, of a reference such as `@optimizer/AdamW()` its name."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value.rsplit("/", 1)[-1].removeprefix("@").removesuffix("()") if value.startswith("@") else value
    return str(value)


def _names(dicts: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for d in dicts for name in d))


def _differ(values: Sequence[Any]) -> bool:
    return len({repr(v) for v in values}) > 1
