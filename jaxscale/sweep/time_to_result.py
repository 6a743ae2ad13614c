"""Time to result: which training algorithm reaches a target first, how surely, after how much tuning.

As Dahl et al. 2023 ("Benchmarking Neural Network Training Algorithms", AlgoPerf) compare them: a workload is a model,
data and a target on held-out data; every entrant tunes within the same budget of settings; what counts is the first
evaluation at or below the target; and several workloads are put together by performance profiles (Dolan & More 2002).
Settings are chosen on seeds of their own, so that what is reported was not selected for being lucky.
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
    """What is to be reached.

    Args:
      name: of the model and its data.
      target: the value to come down to.
      metric: of held-out data, less being better.
    """

    name: str
    target: float
    metric: str = "eval_loss"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of an entrant at a workload.

    Args:
      entrant: the training algorithm.
      workload: its name.
      setting: what was tuned, such as a learning rate.
      seed: of the run.
      steps: until the target was reached; infinite where it was not.
      seconds: as long as those steps take, compilation left out; infinite where they are, `None` where not known.
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
    """The budget that every entrant has, spent alike.

    Args:
      settings: how many it may try.
      seeds: on which it tries them; no result is reported of these.
    """

    settings: int
    seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Placed:
    """An entrant's place at a workload.

    Args:
      entrant: its name.
      setting: the one that tuning chose.
      cost: the median over seeds; infinite unless more than half reach the target.
      interval: that median's 95% bootstrap interval over seeds.
      reached: how many seeds reached the target, of how many.
      rank: 1 is first; of ties, the mean.
      ranks: the 95% bootstrap interval of the rank.
      first: in what share of the bootstrap's draws it is first, ties shared.
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
    """The step of the first measurement at or below the target, without interpolation; infinite where there is none."""
    return next((float(step) for step, value in curve if value <= target), math.inf)


def attempts_of(
    runs: Iterable[Ran],
    workload: Workload,
    entrant: str = "train.optimizer",
    setting: str | Sequence[str] = "train.lr",
) -> list[Attempt]:
    """The attempts that runs are.

    Args:
      runs: as `jaxscale.sweep.comparing.read_runs` gives; one without the metric did not reach the target.
      workload: which all of them are of.
      entrant: the binding that says which training algorithm a run is of; an axis of its sweep goes first.
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
    """The setting that each (workload, entrant) chooses: least median steps to the target, then least final value.

    Raises:
      ConfigError: an entrant spent more, or less, than the budget, or has not one run of each setting and seed.
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
                f"{entrant} tried {len(tried)} settings at {workload}, and the tuning budget of every entrant is "
                f"{tuning.settings}"
            )
        for setting, each in tried.items():
            if (have := sorted(a.seed for a in each)) != sorted(tuning.seeds):
                raise ConfigError(
                    f"{entrant} at {workload} has tuning runs of {setting} with seeds {have}, and the budget is one "
                    f"with each of {sorted(tuning.seeds)}"
                )
        chosen[pair] = min(tried, key=lambda s: tuple(np.median([(a.steps, a.final) for a in tried[s]], axis=0)))
    return chosen


def rank(
    attempts: Sequence[Attempt], tuning: Tuning, workload: str, *, cost: str = "steps", draws: int = 4000, seed: int = 0
) -> list[Placed]:
    """The entrants at a workload, best first.

    The bootstrap draws seeds with replacement, the same for all entrants, since a seed is also the order of the data.

    Args:
      attempts: of tuning and of the seeds that count.
      tuning: the budget, and its seeds, which do not count.
      workload: its name.
      cost: "steps" or "seconds".
      draws: of the bootstrap.
      seed: of the bootstrap.

    Raises:
      ConfigError: an entrant has other seeds than the rest, one twice, or none.
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
    """How probably a run of one entrant is faster than a run of another: over all pairs of seeds, ties half."""
    names, _, table = _table(attempts, tuning, workload, cost)
    faster = [[float(np.mean(_less(a[:, None], b[None, :]))) for b in table] for a in table]
    return {a: {b: faster[i][j] for j, b in enumerate(names) if i != j} for i, a in enumerate(names)}


def stability(attempts: Sequence[Attempt], tuning: Tuning, workload: str, *, cost: str = "steps") -> float:
    """How alike the seeds rank the entrants: Kendall's tau-b, mean over pairs of seeds; NaN of fewer than two."""
    _, _, table = _table(attempts, tuning, workload, cost)
    pairs = [kendall_tau(table[:, s], table[:, t]) for s, t in itertools.combinations(range(table.shape[1]), 2)]
    return float(np.mean(pairs)) if pairs else math.nan


def profile(costs: Costs, taus: Sequence[float]) -> dict[str, list[float]]:
    """Performance profiles: the share of workloads that an entrant finishes within `tau` times the best's cost.

    Args:
      costs: by workload and entrant; infinite where the target was not reached, as where an entrant is missing.
      taus: from 1.
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
    """The area under each profile from 1 to `most`, of 1; AlgoPerf's benchmark score."""
    best = {w: min(of.values(), default=math.inf) for w, of in costs.items()}
    names = list(dict.fromkeys(name for of in costs.values() for name in of))

    def area(w: str, name: str) -> float:  # under one workload's step from its ratio on
        value = costs[w].get(name, math.inf)
        return 0.0 if math.isinf(value) else max(0.0, most - max(value / best[w], 1.0)) / (most - 1)

    return {name: sum(area(w, name) for w in costs) / len(costs) for name in names}


def ranks_of(values: np.ndarray) -> np.ndarray:
    """1 for the least; of ties, the mean of their places."""
    return 1 + (values[None] < values[:, None]).sum(1) + ((values[None] == values[:, None]).sum(1) - 1) / 2


def kendall_tau(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Kendall's tau-b of two orders; infinite values are ties at the end. NaN where one of them is all ties."""
    x, y = ranks_of(np.asarray(a, float)), ranks_of(np.asarray(b, float))
    signs_x, signs_y = np.sign(x[:, None] - x[None]), np.sign(y[:, None] - y[None])
    norm = math.sqrt((signs_x**2).sum() * (signs_y**2).sum())
    return float((signs_x * signs_y).sum() / norm) if norm else math.nan


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a < b) + 0.5 * (a == b)


def _interval(values: np.ndarray) -> tuple[float, float]:
    """From the 2.5th to the 97.5th percentile, of values that were drawn: infinite ones are not averaged."""
    low, high = np.quantile(values, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def _by_pair(attempts: Iterable[Attempt]) -> dict[tuple[str, str], list[Attempt]]:
    found: dict[tuple[str, str], list[Attempt]] = {}
    for a in attempts:
        found.setdefault((a.workload, a.entrant), []).append(a)
    return found


def _table(
    attempts: Sequence[Attempt], tuning: Tuning, workload: str, cost: str
) -> tuple[list[str], list[Any], np.ndarray]:
    """Entrants, their chosen settings, and the cost of each at each seed that counts: [entrant, seed]."""
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
