"""Scaling laws and their fits: parameters with bootstrap intervals, predictions, and errors on held-out runs.

`Chinchilla().fit(table)` is a `Fit`. A law defines how parameters are fitted to weighted rows (`solve`) and how they
predict (`at`); the bootstrap, the intervals and the files are the same for all laws, and here.
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
from jaxscale.plan.printing import Printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

INPUTS = ("parameters", "tokens", "flops")
"""Quantities that laws predict from; a law's setting of that name is the column of the table."""

FAR = 10.0
"""Factor beyond the fitted runs from which on a prediction comes with the warning `UNTRIED`."""

UNTRIED = "no run shows whether the law holds there, and its interval does not: it reflects only how the runs scatter"

REDRAWS = 200
"""How often a bootstrap sample that cannot determine the law is drawn anew."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A number with its bootstrap interval.

    Args:
      value: the number.
      low, high: ends of the interval.
    """

    value: float
    low: float
    high: float

    def __contains__(self, x: float) -> bool:
        return self.low <= x <= self.high

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclasses.dataclass(frozen=True)
class Law(abc.ABC):
    """A scaling law; a subclass is one law, and its fields are the law's settings.

    Settings that name columns mean columns of a sweep's `results.csv`.

    Attributes:
      name: the law's name in commands and files.
      formula: the formula, in a line.
      naming: how the names of parameters relate to the formula, where they differ from its symbols; else "".
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    naming: ClassVar[str] = ""

    def on(self, table: Table) -> Self:
        """Return the law with settings that follow from the table, such as a centre.

        Args:
          table: a row per run.
        """
        return self

    def counted(self, table: Table) -> Table:
        """Return the rows that the law is fitted on and the bootstrap draws from; by default all.

        Args:
          table: a row per run.
        """
        return table

    @abc.abstractmethod
    def settings_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's setting; the bootstrap draws settings, each with all its seeds.

        Args:
          table: a row per run.
        """

    def strata_of(self, table: Table) -> Int[np.ndarray, " n"]:
        """Return the number of each row's stratum, within which the bootstrap draws settings; by default one.

        Args:
          table: a row per run.
        """
        return np.zeros(len(table), np.int64)

    def freedom_of(self, table: Table) -> tuple[int, int] | None:
        """Return the numbers of settings and of fitted parameters, which widen intervals; by default `None`.

        Args:
          table: a row per run.

        Returns:
          `None` for laws with so many settings that intervals need no correction.
        """
        return None

    @abc.abstractmethod
    def check(self, table: Table) -> None:
        """Check that a table can determine the law, before anything is fitted.

        Args:
          table: a row per run.

        Raises:
          ConfigError: it cannot; the message names the missing variation and the nearest design that has it.
        """

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""

    @abc.abstractmethod
    def solve(self, table: Table, weights: Float[np.ndarray, "s n"]) -> Float[np.ndarray, "s k"]:
        """Return the parameters for each weighting of the rows.

        Args:
          table: a row per run, n in all.
          weights: s weightings of the rows: first 1 for every row, then how often each row is in a bootstrap sample.

        Returns:
          the k parameters for each weighting.
        """

    @abc.abstractmethod
    def at(self, params: Mapping[str, Float[np.ndarray, " s"]], **where: float) -> dict[str, Float[np.ndarray, " s"]]:
        """Return predictions by name, for each sample of the parameters.

        Args:
          params: values of each parameter by name.
          **where: what to predict for, by names in `INPUTS`.

        Raises:
          ConfigError: `where` has other names than the law predicts from.
        """

    @abc.abstractmethod
    def errors(self, params: Mapping[str, float], table: Table) -> dict[str, Float[np.ndarray, " m"]]:
        """Return (predicted - measured) / measured, by the name of the prediction.

        Args:
          params: each parameter by name.
          table: a row per run.
        """

    @abc.abstractmethod
    def picture(self, fit: Fit, table: Table) -> Figure:
        """Return a matplotlib figure of a fit and its runs.

        Args:
          fit: a fit of this law.
          table: the table that it was fitted on.
        """

    def fit(self, table: Table, *, samples: int = 200, level: float = 0.9, seed: int = 0) -> Fit:
        """Fit the law to a table.

        Args:
          table: a row per run.
          samples: number of bootstrap samples (Efron 1979). Settings are drawn with replacement, each with all its
            seeds.
          level: level of the intervals, which are percentiles of the samples. Where settings are few they are wider,
            since samples scatter less than data (the expanded percentile interval of Hesterberg 2015, arXiv 1411.5279).
          seed: seed of the draws.

        Raises:
          ConfigError: the table cannot determine the law.
        """
        if not 0 < level < 1:
            raise ConfigError(f"there is no interval of level {level}; use a number between 0 and 1, such as 0.9")
        law = self.on(table)
        law.check(table)
        table = law.counted(table)
        weights = np.concatenate([np.ones((1, len(table))), _draws(law, table, samples, seed)])
        params = law.solve(table, weights)
        return Fit(law, law.names, params[0], params[1:], level, _facts(law, table))


@dataclasses.dataclass(frozen=True)
class Fit(Printable):
    """A fitted law.

    Args:
      law: the law.
      names: names of its k parameters.
      best: values of the parameters on the whole table, (k,).
      samples: values of the parameters on each of s bootstrap samples, (s, k).
      level: level of the intervals.
      facts: facts about the table: its name, number of runs, dropped rows, columns and ranges of `INPUTS`, FLOPs by
        size ("cost"), and the law's `freedom_of`.
    """

    law: Law
    names: tuple[str, ...]
    best: Float[np.ndarray, " k"]
    samples: Float[np.ndarray, "s k"]
    level: float
    facts: Mapping[str, Any]

    @property
    def parameters(self) -> dict[str, Interval]:
        """Each parameter with its interval."""
        return {name: self.interval(x) for name, x in self.everything.items()}

    @property
    def values(self) -> dict[str, float]:
        """Each parameter as fitted."""
        return dict(zip(self.names, map(float, self.best), strict=True))

    @property
    def everything(self) -> dict[str, Float[np.ndarray, " 1+s"]]:
        """Each parameter as fitted, followed by its values on the bootstrap samples."""
        return {n: np.concatenate([self.best[i : i + 1], self.samples[:, i]]) for i, n in enumerate(self.names)}

    @property
    def cost(self) -> Cost:
        """FLOPs of runs like those that the law was fitted on."""
        return Cost.from_json(self.facts["cost"])

    def predict(self, **where: float) -> dict[str, Interval]:
        """Return the law's predictions, as `predict(parameters=1e9, tokens=2e10)`.

        Args:
          **where: what to predict for: the quantities of `INPUTS` that the law predicts from.

        Raises:
          ConfigError: the law predicts from other quantities, or a number is not above 0.
        """
        for name, x in where.items():
            if not x > 0:
                raise ConfigError(f"{name} = {x:g} has no logarithm; give a number above 0")
        return {name: self.interval(x) for name, x in self.law.at(self.everything, **where).items()}

    def interval(self, values: Float[np.ndarray, " 1+s"]) -> Interval:
        """Return a number with its interval.

        Args:
          values: the number as it follows from the fit, then from each bootstrap sample.
        """
        tail, finite = 100 * _tail(self.level, self.facts["freedom"]), values[1:][np.isfinite(values[1:])]
        low, high = np.percentile(finite, [tail, 100 - tail]) if len(finite) else (np.nan, np.nan)
        return Interval(float(values[0]), float(low), float(high))

    def errors(self, table: Table) -> dict[str, Float[np.ndarray, " m"]]:
        """Return (predicted - measured) / measured for a table's runs, by the name of the prediction.

        Args:
          table: a row per run.
        """
        return self.law.errors(self.values, table)

    def beyond(self, **where: float) -> list[str]:
        """Return a sentence for each quantity that is outside of the range of the fitted runs, with the factor.

        Args:
          **where: quantities as for `predict`.
        """
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
        """Return everything as plain values, as in the file that `write` writes."""
        return {
            "law": self.law.name,
            "says": self.law.formula,
            "settings": dataclasses.asdict(self.law),
            "parameters": {n: dataclasses.asdict(i) for n, i in self.parameters.items()},
            "level": self.level,
            "table": dict(self.facts),
            "samples": [[float(x) for x in row] for row in self.samples],
        }

    def write(self, path: str | Path) -> Path:
        """Write the fit to a file that `load_fit` reads.

        Args:
          path: the file.

        Returns:
          `path`.
        """
        path = Path(path)
        path.write_text(json.dumps(self.to_json()) + "\n")
        return path

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from jaxscale.plan.laws.tables import fit_tables  # imports rich

        yield from fit_tables(self)


def load_fit(path: str | Path, laws: Mapping[str, type[Law]]) -> Fit:
    """Return a fit from its file.

    Args:
      path: the file.
      laws: the known laws by name.

    Raises:
      ConfigError: the file cannot be read or is no fit of one of the laws.
    """
    try:
        data = json.loads(Path(path).read_text())
        name, facts = data["law"], data["table"]
        names, values = list(data["parameters"]), [p["value"] for p in data["parameters"].values()]
        samples = np.array(data["samples"], np.float64).reshape(-1, len(names))
    except OSError as e:
        why = (e.strerror or type(e).__name__).lower()
        raise ConfigError(f"{path} cannot be read: {why}; make it with jaxscale laws fit SWEEP --out DIR") from None
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no fitted law ({e}); make one with jaxscale laws fit SWEEP --out DIR") from None
    if name not in laws:
        raise ConfigError(f"{path} is a fit of an unknown law '{name}'{near(name, laws)}")
    try:
        law = laws[name](**data["settings"])
    except (KeyError, TypeError) as e:
        raise ConfigError(f"{path} has other settings than the law '{name}' ({e}); fit it again") from None
    return Fit(law, tuple(names), np.array(values, np.float64), samples, data["level"], facts)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """How well a law that is fitted on small runs predicts large ones.

    Args:
      column: the column that runs are large by.
      above: runs with more than this in the column were held out.
      fitted: number of runs that the law was fitted on.
      judged: number of runs that were held out.
      errors: (predicted - measured) / measured of held-out runs, by the name of the prediction.
    """

    column: str
    above: float
    fitted: int
    judged: int
    errors: Mapping[str, Float[np.ndarray, " m"]]

    @property
    def mean(self) -> dict[str, float]:
        """Mean absolute error by the name of the prediction."""
        return {name: float(np.mean(np.abs(e))) for name, e in self.errors.items()}


def held_out(law: Law, table: Table, column: str = "parameters", count: int = 1) -> HeldOut:
    """Fit a law on runs with small values of a column, and judge it on those with the largest values.

    Args:
      law: the law.
      table: a row per run.
      column: the column.
      count: number of its largest values that are held out.

    Raises:
      ConfigError: `count` is not below the number of values, or the other runs cannot determine the law.
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
    """Return what a fit stores about its table."""
    columns = {what: getattr(law, what, what) for what in INPUTS}
    ranges = {
        what: (float(table.columns[c].min()), float(table.columns[c].max()))
        for what, c in columns.items()
        if c in table.columns and np.isfinite(table.columns[c]).all()
    }
    cost = cost_of(table, columns["parameters"], columns["tokens"])
    about = {"name": table.name, "runs": len(table), "dropped": table.dropped, "columns": columns}
    return {**about, "ranges": ranges, "cost": cost.to_json(), "freedom": law.freedom_of(table)}


def _tail(level: float, freedom: tuple[int, int] | None) -> float:
    """Return the share of samples below an interval, which is also the share above it."""
    from scipy.special import ndtr, stdtrit

    if freedom is None:
        return (1 - level) / 2
    settings, numbers = freedom
    left = max(settings - numbers, 1)
    return float(ndtr(-stdtrit(left, (1 + level) / 2) * np.sqrt(settings / left)))


def _draws(law: Law, table: Table, samples: int, seed: int) -> Float[np.ndarray, "s n"]:
    """Draw bootstrap samples: return how often each row is in each sample.

    Raises:
      ConfigError: `REDRAWS` draws of a sample could not determine the law, so that intervals would mean nothing.
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
                f"the law '{law.name}' depends on single runs of {table.name}: without some of them, {why}; add runs, "
                "or fit without intervals (--samples 0)"
            )
    return out
