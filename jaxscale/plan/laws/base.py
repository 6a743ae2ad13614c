"""A law, and what fitting one gives: parameters with bootstrap intervals, predictions, error on runs it never saw.

A law is a value: `Chinchilla().fit(table)` is a `Fit`. What differs between laws is how parameters follow from weighted
rows (`solve`) and what follows from parameters (`at`); the bootstrap, the intervals and the files are here.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from jaxtyping import Float, Int

from jaxscale.errors import ConfigError, near
from jaxscale.plan.laws.cost import Cost, cost_of
from jaxscale.plan.laws.table import Table
from jaxscale.plan.shown import Shown

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PLACES = ("parameters", "tokens", "flops")
"""Where a law can be asked, by names that every law has for its columns."""

FAR = 10.0
"""So many times beyond the runs a prediction is told to be untried."""

UNTRIED = "no run says whether the law holds there, and its interval does not either: it tells how the runs scatter"

REDRAWS = 200
"""So often a bootstrap sample that cannot determine the law is drawn anew."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A number, and the interval that the bootstrap gives it."""

    value: float
    low: float
    high: float

    def __contains__(self, x: float) -> bool:
        return self.low <= x <= self.high

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclasses.dataclass(frozen=True)
class Law(abc.ABC):
    """What a law has to say for itself; a subclass is one.

    Its fields are its settings. Columns are those of a sweep's `results.csv`.
    """

    name: ClassVar[str]
    says: ClassVar[str]
    """The formula, in a line."""
    where: ClassVar[str] = ""
    """How the parameters' names are those of the formula, where they are not the same."""

    def on(self, table: Table) -> Self:
        """The law with what it takes from the table itself, such as a centre."""
        return self

    def counted(self, table: Table) -> Table:
        """The rows that the law is fitted on, and that the bootstrap draws from; all, for most."""
        return table

    @abc.abstractmethod
    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Which setting each row is a run of: the bootstrap draws settings, and with one all its seeds."""

    def strata_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Groups of rows within which settings are drawn; one of all, for most."""
        return np.zeros(len(table), np.int64)

    def freedom_of(self, table: Table) -> tuple[int, int] | None:
        """Settings that a regression has, and numbers that it fits to them; `None` where settings are many."""
        return None

    @abc.abstractmethod
    def check(self, table: Table) -> None:
        """Says why a table cannot determine the law, before anything is fitted.

        Raises:
          ConfigError: naming the variation that is missing, and the nearest design that has it.
        """

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """Of the parameters."""

    @abc.abstractmethod
    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        """Parameters for each weighting of the rows; the first is of the data as they are."""

    @abc.abstractmethod
    def at(self, params: Mapping[str, Float[np.ndarray, " s"]], **where: float) -> dict[str, Float[np.ndarray, " s"]]:
        """Predictions, by name, for each sample of the parameters."""

    @abc.abstractmethod
    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, Float[np.ndarray, " m"]]:
        """How far predictions are from measurements, as shares of these, by what is predicted."""

    @abc.abstractmethod
    def picture(self, fit: Fit, table: Table) -> Any:
        """A matplotlib figure of the fit over its table."""

    def fit(self, table: Table, *, samples: int = 200, level: float = 0.9, seed: int = 0) -> Fit:
        """Fits the law.

        Args:
          table: a row per run.
          samples: of the bootstrap (Efron 1979): settings are drawn with replacement, their seeds stay together.
          level: of the intervals: percentiles of those samples, wider ones where settings are few, since samples
            scatter less than data do (the expanded percentile interval of Hesterberg 2015, arXiv 1411.5279).
          seed: of the draws.

        Raises:
          ConfigError: the table cannot determine the law.
        """
        if not 0 < level < 1:
            raise ConfigError(f"an interval of level {level} does not exist; use a share such as 0.9")
        law = self.on(table)
        law.check(table)
        table = law.counted(table)
        weights = np.concatenate([np.ones((1, len(table))), _draws(law, table, samples, seed)])
        found = law.solve(table, weights)
        return Fit(law, law.names, found[0], found[1:], level, _facts(law, table))


@dataclasses.dataclass(frozen=True)
class Fit(Shown):
    """A fitted law.

    Args:
      law: the law.
      names: of its parameters.
      best: their values on the whole table, (k,).
      samples: their values on each bootstrap sample, (s, k).
      level: of the intervals.
      facts: of the table: its name, runs, dropped rows, the columns and ranges of `PLACES`, FLOPs by size, freedom.
    """

    law: Law
    names: tuple[str, ...]
    best: Float[np.ndarray, " k"]
    samples: Float[np.ndarray, "s k"]
    level: float
    facts: Mapping[str, Any]

    @property
    def parameters(self) -> dict[str, Interval]:
        """Each with its interval."""
        return {name: self.interval(x) for name, x in self.everything.items()}

    @property
    def values(self) -> dict[str, float]:
        """Each as fitted."""
        return dict(zip(self.names, map(float, self.best), strict=True))

    @property
    def everything(self) -> dict[str, Float[np.ndarray, " 1+s"]]:
        """Each as fitted, then on every bootstrap sample."""
        return {n: np.concatenate([self.best[i : i + 1], self.samples[:, i]]) for i, n in enumerate(self.names)}

    @property
    def cost(self) -> Cost:
        """FLOPs of runs like those that the law was fitted on."""
        return Cost(**self.facts["cost"])

    def predict(self, **where: float) -> dict[str, Interval]:
        """What the law says of a place, as `predict(parameters=1e9, tokens=2e10)`; which it takes, the law knows.

        Raises:
          ConfigError: another place than the law is of, or a number that is not above 0.
        """
        for name, x in where.items():
            if not x > 0:
                raise ConfigError(f"{name} = {x:g} has no logarithm; give a number above 0")
        return {name: self.interval(x) for name, x in self.law.at(self.everything, **where).items()}

    def interval(self, values: Float[np.ndarray, " 1+s"]) -> Interval:
        """Something that follows from the fit, and from each sample."""
        tail, finite = 100 * _tail(self.level, self.facts["freedom"]), values[1:][np.isfinite(values[1:])]
        low, high = np.percentile(finite, [tail, 100 - tail]) if len(finite) else (np.nan, np.nan)
        return Interval(float(values[0]), float(low), float(high))

    def errors(self, table: Table) -> dict[str, Float[np.ndarray, " m"]]:
        """How far predictions are from a table's runs, as shares."""
        return self.law.errors(self.values, table)

    def beyond(self, **where: float) -> list[str]:
        """Sentences on what lies outside of the runs that the law was fitted on, with the factor."""
        ranges = self.facts["ranges"]
        out = []
        for name, x in where.items():
            low, high = ranges.get(name, (x, x))
            if not low * 0.999 <= x <= high * 1.001:
                times = f"{x / high:.3g} times the largest" if x > high else f"{low / x:.3g} times below the smallest"
                far = f"; {UNTRIED}" if max(x / high, low / x) >= FAR else ""
                out.append(f"{name} = {x:.4g} is {times} that the law was fitted on{far}")
        return out

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "law": self.law.name,
            "says": self.law.says,
            "settings": dataclasses.asdict(self.law),
            "parameters": {n: dataclasses.asdict(i) for n, i in self.parameters.items()},
            "level": self.level,
            "table": dict(self.facts),
            "samples": [[float(x) for x in row] for row in self.samples],
        }

    def write(self, path: str | Path) -> Path:
        """Writes what `load_fit` reads."""
        path = Path(path)
        path.write_text(json.dumps(self.to_json()) + "\n")
        return path

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from jaxscale.plan.laws.tables import fit_tables  # imports rich

        yield from fit_tables(self)


def load_fit(path: str | Path, laws: Mapping[str, type[Law]]) -> Fit:
    """A fit from its file.

    Raises:
      ConfigError: it is none.
    """
    try:
        found = json.loads(Path(path).read_text())
        name, facts = found["law"], found["table"]
        names, values = list(found["parameters"]), [p["value"] for p in found["parameters"].values()]
        samples = np.array(found["samples"], np.float64).reshape(-1, len(names))
    except OSError as e:
        why = (e.strerror or type(e).__name__).lower()
        raise ConfigError(f"{path} cannot be read: {why}; make it with jaxscale laws fit SWEEP --out DIR") from None
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no fitted law ({e}); make one with jaxscale laws fit SWEEP --out DIR") from None
    if name not in laws:
        raise ConfigError(f"{path} is of the law '{name}'{near(name, laws)}")
    try:
        law = laws[name](**found["settings"])
    except (KeyError, TypeError) as e:
        raise ConfigError(f"{path} has other settings than the law '{name}' ({e}); fit it again") from None
    return Fit(law, tuple(names), np.array(values, np.float64), samples, found["level"], facts)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """How well a law fitted on the small foretells the large.

    Args:
      column: what was large.
      above: rows with more than this were kept from the fit.
      fitted, judged: runs on either side.
      errors: of the judged, as shares, by what is predicted.
    """

    column: str
    above: float
    fitted: int
    judged: int
    errors: Mapping[str, Float[np.ndarray, " m"]]

    @property
    def mean(self) -> dict[str, float]:
        """The mean absolute error of each."""
        return {name: float(np.mean(np.abs(e))) for name, e in self.errors.items()}


def held_out(law: Law, table: Table, column: str = "parameters", count: int = 1) -> HeldOut:
    """Fits on the runs with less of a column, and predicts those with the `count` largest values of it.

    Raises:
      ConfigError: what is left cannot determine the law.
    """
    values = np.unique(table.distinct(column))
    if not 0 < count < len(values):
        raise ConfigError(
            f"{table.name} has {len(values)} values of '{column}', so {count} of them cannot be held out; use 1 to "
            f"{len(values) - 1}"
        )
    small = table.distinct(column) < values[-count]
    fitted = law.fit(dataclasses.replace(table.where(small), name=f"{table.name} without its largest"), samples=0)
    judged = table.where(~small)
    return HeldOut(column, float(table[column][small].max()), int(small.sum()), len(judged), fitted.errors(judged))


def _facts(law: Law, table: Table) -> dict[str, Any]:
    """Of a table, what outlives it; columns by what they are to the law."""
    columns = {what: getattr(law, what, what) for what in PLACES}
    ranges = {
        what: (float(table.columns[c].min()), float(table.columns[c].max()))
        for what, c in columns.items()
        if c in table.columns and np.isfinite(table.columns[c]).all()
    }
    cost = cost_of(table, columns["parameters"], columns["tokens"])
    about = {"name": table.name, "runs": len(table), "dropped": table.dropped, "columns": columns}
    return {**about, "ranges": ranges, "cost": dataclasses.asdict(cost), "freedom": law.freedom_of(table)}


def _tail(level: float, freedom: tuple[int, int] | None) -> float:
    """The share of samples on either side of an interval."""
    from scipy.special import ndtr, stdtrit

    if freedom is None:
        return (1 - level) / 2
    settings, numbers = freedom
    left = max(settings - numbers, 1)
    return float(ndtr(-stdtrit(left, (1 + level) / 2) * np.sqrt(settings / left)))


def _draws(law: Law, table: Table, samples: int, seed: int) -> Float[np.ndarray, "s n"]:
    """How often each row is in each bootstrap sample.

    Raises:
      ConfigError: hardly any sample determines the law, so that none of its intervals would mean anything.
    """
    random = np.random.default_rng(seed)
    settings, strata = law.settings_of(table), law.strata_of(table)
    groups = [np.unique(settings[strata == s]) for s in np.unique(strata)]
    out = np.zeros((samples, len(table)))
    for i in range(samples):
        for _ in range(REDRAWS):
            counts = np.zeros(settings.max() + 1)
            for members in groups:
                np.add.at(counts, random.choice(members, len(members)), 1)
            weights = counts[settings]
            try:
                law.check(table.where(weights > 0))
            except ConfigError as e:
                why = e
                continue
            out[i] = weights
            break
        else:
            raise ConfigError(
                f"the law '{law.name}' hangs on single runs of {table.name}: without some of them, {why}; add runs, or "
                "ask for no intervals (--samples 0)"
            )
    return out
