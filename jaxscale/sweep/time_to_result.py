"""Time to result: which training algorithm reaches a target first, with what certainty, on what tuning budget.

Follows Dahl et al. 2023 ("Benchmarking Neural Network Training Algorithms", AlgoPerf): a workload is a model, data and
a target on held-out data; every entrant (training algorithm) has the same tuning budget; a run's cost is that of its
first evaluation at or below the target; several workloads are combined by performance profiles (Dolan & More 2002).
Settings are tuned on separate seeds, so that reported results are not selected for luck.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.sweep.comparing.differences import last
from jaxscale.sweep.comparing.folders import Ran

Costs = Mapping[str, Mapping[str, float]]  # workload -> entrant -> cost


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and data with a target to reach.

    Args:
      name: name of the model and its data.
      target: the value to reach.
      metric: a metric on held-out data; lower is better.
    """

    name: str
    target: float
    metric: str = "eval_loss"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of an entrant at a workload.

    Args:
      entrant: the training algorithm.
      workload: the workload's name.
      setting: the tuned value, such as a learning rate.
      seed: the run's seed.
      steps: number of steps until the target was reached; infinite if it was not.
      seconds: time of those steps without compilation; infinite if the target was not reached, `None` if unknown.
      final: the last value of the metric.
    """

    entrant: str
    workload: str
    setting: Any
    seed: int
    steps: float
    seconds: float | None = None
    final: float = math.inf


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tuning budget of every entrant.

    Args:
      settings: number of settings that each must try.
      seeds: the seeds to try each setting on; results of these seeds are not reported.
    """

    settings: int
    seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Placed:
    """An entrant's place at a workload.

    Args:
      entrant: its name.
      setting: the setting that tuning chose.
      cost: median cost over seeds; infinite unless more than half reach the target.
      interval: 95% bootstrap interval of that median over seeds.
      reached: (number of seeds that reached the target, number of seeds).
      rank: 1 is first; ties have the mean of their ranks.
      ranks: 95% bootstrap interval of the rank.
      first: share of bootstrap draws in which it is first; ties are shared.
    """

    entrant: str
    setting: Any
    cost: float
    interval: tuple[float, float]
    reached: tuple[int, int]
    rank: float
    ranks: tuple[float, float]
    first: float


def first_reached(curve: Iterable[tuple[int, float]], target: float) -> float:
    """Return the step of the first value at or below the target, without interpolation; infinity if there is none."""
    return next((float(step) for step, value in curve if value <= target), math.inf)


def attempts_of(
    runs: Iterable[Ran],
    workload: Workload,
    entrant: str = "train.optimizer",
    setting: str | Sequence[str] = "train.lr",
) -> list[Attempt]:
    """Return runs as attempts at a workload.

    Args:
      runs: as from `jaxscale.sweep.comparing.read_runs`; one without the metric did not reach the target.
      workload: the workload of all of them.
      entrant: the binding that names a run's training algorithm; axes of its sweep take precedence over its config.
      setting: the binding, or bindings, that were tuned.
    """
    tuned = (setting,) if isinstance(setting, str) else tuple(setting)
    out = []
    for run in runs:
        bound = {**run.bindings, **run.axes}
        values = tuple(bound.get(name) for name in tuned)
        steps = first_reached(run.metrics.get(workload.metric, ()), workload.target)
        each, end = run.step_seconds, last(run, workload.metric)
        out.append(
            Attempt(
                str(bound.get(entrant)),
                workload.name,
                values[0] if len(values) == 1 else values,
                int(bound.get("train.seed", 0)),
                steps,
                math.inf if math.isinf(steps) else None if each is None else steps * each,
                math.inf if end is None or math.isnan(end) else end,
            )
        )
    return out


def tune(attempts: Sequence[Attempt], tuning: Tuning) -> dict[tuple[str, str], Any]:
    """Choose each entrant's setting at each workload: least median steps to the target, then least final value.

    Args:
      attempts: attempts at any workloads.
      tuning: the budget; only attempts with its seeds are used.

    Returns:
      the chosen setting by (workload, entrant).

    Raises:
      ConfigError: an entrant tried more or fewer settings than the budget, or lacks one run of each setting and seed.
    """
    chosen = {}
    for pair, mine in _by_pair(attempts).items():
        tried: dict[Any, list[Attempt]] = {}
        for a in mine:
            if a.seed in tuning.seeds:
                tried.setdefault(a.setting, []).append(a)
        workload, entrant = pair
        if len(tried) != tuning.settings:
            raise ConfigError(
                f"{entrant} tried {len(tried)} settings at {workload}, but the tuning budget of every entrant is "
                f"{tuning.settings}"
            )
        for setting, each in tried.items():
            if (have := sorted(a.seed for a in each)) != sorted(tuning.seeds):
                raise ConfigError(
                    f"{entrant} at {workload} has tuning runs of {setting} with seeds {have}, but the budget is one "
                    f"with each of {sorted(tuning.seeds)}"
                )
        chosen[pair] = min(tried, key=lambda s: tuple(np.median([(a.steps, a.final) for a in tried[s]], axis=0)))
    return chosen


def rank(
    attempts: Sequence[Attempt], tuning: Tuning, workload: str, *, cost: str = "steps", draws: int = 4000, seed: int = 0
) -> list[Placed]:
    """Return the entrants at a workload, best first.

    The bootstrap draws seeds with replacement, the same for all entrants, since a seed also decides the data order.

    Args:
      attempts: attempts of tuning and of the seeds that are reported.
      tuning: the budget, and the tuning seeds, which are not reported.
      workload: the workload's name.
      cost: "steps" or "seconds".
      draws: number of bootstrap draws.
      seed: seed of the bootstrap.

    Raises:
      ConfigError: an entrant has different seeds from the others, a seed twice, or none.
    """
    names, settings, table = _table(attempts, tuning, workload, cost)
    medians = np.median(table, axis=1)
    picks = np.random.default_rng(seed).integers(table.shape[1], size=(draws, table.shape[1]))
    drawn = np.median(table[:, picks], axis=2)  # [entrant, draw]
    ranks = np.apply_along_axis(ranks_of, 0, drawn)
    firsts = (drawn == drawn.min(0)) & np.isfinite(drawn)
    share = (firsts / np.maximum(firsts.sum(0), 1)).mean(1)
    placed = [
        Placed(
            entrant=names[i],
            setting=settings[i],
            cost=float(medians[i]),
            interval=_interval(drawn[i]),
            reached=(int(np.isfinite(table[i]).sum()), table.shape[1]),
            rank=float(ranks_of(medians)[i]),
            ranks=_interval(ranks[i]),
            first=float(share[i]),
        )
        for i in range(len(names))
    ]
    return sorted(placed, key=lambda p: (p.rank, p.entrant))


def beats(
    attempts: Sequence[Attempt], tuning: Tuning, workload: str, *, cost: str = "steps"
) -> dict[str, dict[str, float]]:
    """Return the probability that a run of one entrant is faster than one of another: over pairs of seeds, ties half.

    Args:
      attempts: as for `rank`.
      tuning: as for `rank`.
      workload: the workload's name.
      cost: "steps" or "seconds".

    Returns:
      by the first entrant, by the second, the probability that the first is faster.
    """
    names, _, table = _table(attempts, tuning, workload, cost)
    faster = [[float(np.mean(_less(a[:, None], b[None, :]))) for b in table] for a in table]
    return {a: {b: faster[i][j] for j, b in enumerate(names) if i != j} for i, a in enumerate(names)}


def stability(attempts: Sequence[Attempt], tuning: Tuning, workload: str, *, cost: str = "steps") -> float:
    """Return how similarly the seeds rank the entrants: mean Kendall's tau-b over pairs of seeds; NaN for one seed.

    Args:
      attempts: as for `rank`.
      tuning: as for `rank`.
      workload: the workload's name.
      cost: "steps" or "seconds".
    """
    _, _, table = _table(attempts, tuning, workload, cost)
    pairs = [kendall_tau(table[:, s], table[:, t]) for s, t in itertools.combinations(range(table.shape[1]), 2)]
    return float(np.mean(pairs)) if pairs else math.nan


def profile(costs: Costs, taus: Sequence[float]) -> dict[str, list[float]]:
    """Return performance profiles: the share of workloads that an entrant finishes within `tau` times the best cost.

    Args:
      costs: by workload and entrant; infinite, or missing, if the target was not reached.
      taus: factors of the best cost, at least 1.

    Returns:
      a share for each of `taus`, by entrant.
    """
    best = {w: min(of.values(), default=math.inf) for w, of in costs.items()}
    names = list(dict.fromkeys(name for of in costs.values() for name in of))
    return {
        name: [
            sum(of.get(name, math.inf) <= tau * best[w] < math.inf for w, of in costs.items()) / len(costs)
            for tau in taus
        ]
        for name in names
    }


def score(costs: Costs, most: float = 4.0) -> dict[str, float]:
    """Return AlgoPerf's benchmark score of each entrant: the area under its profile from 1 to `most`, at most 1.

    Args:
      costs: as for `profile`.
      most: the largest factor of the best cost.
    """
    best = {w: min(of.values(), default=math.inf) for w, of in costs.items()}
    names = list(dict.fromkeys(name for of in costs.values() for name in of))

    def area(w: str, name: str) -> float:  # of one workload: its step function is 1 from this entrant's ratio on
        value = costs[w].get(name, math.inf)
        return 0.0 if math.isinf(value) else max(0.0, most - max(value / best[w], 1.0)) / (most - 1)

    return {name: sum(area(w, name) for w in costs) / len(costs) for name in names}


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value: 1 for the least; ties have the mean of their ranks."""
    return 1 + (values[None] < values[:, None]).sum(1) + ((values[None] == values[:, None]).sum(1) - 1) / 2


def kendall_tau(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Return Kendall's tau-b of two lists; infinite values are ties at the end. NaN if all values of one are tied."""
    x, y = ranks_of(np.asarray(a, float)), ranks_of(np.asarray(b, float))
    signs_x, signs_y = np.sign(x[:, None] - x[None]), np.sign(y[:, None] - y[None])
    norm = math.sqrt((signs_x**2).sum() * (signs_y**2).sum())
    return float((signs_x * signs_y).sum() / norm) if norm else math.nan


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a < b) + 0.5 * (a == b)


def _interval(values: np.ndarray) -> tuple[float, float]:
    """The 2.5th and 97.5th percentiles, each one of the values, so that infinite ones are not averaged."""
    low, high = np.quantile(values, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def _by_pair(attempts: Iterable[Attempt]) -> dict[tuple[str, str], list[Attempt]]:
    pairs: dict[tuple[str, str], list[Attempt]] = {}
    for a in attempts:
        pairs.setdefault((a.workload, a.entrant), []).append(a)
    return pairs


def _table(
    attempts: Sequence[Attempt], tuning: Tuning, workload: str, cost: str
) -> tuple[list[str], list[Any], np.ndarray]:
    """Entrants, their chosen settings, and the cost of each at each reported seed: [entrant, seed]."""
    if cost not in ("steps", "seconds"):
        raise ConfigError(f"cost = '{cost}': must be 'steps' or 'seconds'")
    here = [a for a in attempts if a.workload == workload]
    chosen = tune(here, tuning)
    names: list[str] = []
    rows: list[list[float]] = []
    expected: list[int] | None = None
    for (_, entrant), setting in chosen.items():
        mine = [a for a in here if a.entrant == entrant and a.setting == setting and a.seed not in tuning.seeds]
        mine.sort(key=lambda a: a.seed)
        seeds = [a.seed for a in mine]
        if len(set(seeds)) < len(seeds):
            raise ConfigError(f"{entrant} at {workload} with {setting} has seeds {seeds}; give one run of each")
        expected = seeds if expected is None else expected
        if seeds != expected or not seeds:
            raise ConfigError(
                f"{entrant} at {workload} with {setting} has seeds {seeds} beside those of tuning, and "
                f"{names[0] if names else 'every entrant'} has {expected or 'to have some'}; run the same for all"
            )
        values = [getattr(a, cost) for a in mine]
        if None in values:
            raise ConfigError(f"a run of {entrant} at {workload} has no times; rank by steps")
        names.append(entrant)
        rows.append(values)
    if not rows:
        raise ConfigError(f"there are no attempts at {workload}")
    return names, list(chosen.values()), np.array(rows, float)
