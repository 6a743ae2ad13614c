"""The table of a sweep: a row per trial; a column per binding, then the measured columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale.errors import RunError
from jaxscale.reading import clipped
from jaxscale.run import Run
from jaxscale.sweep.axes import split
from jaxscale.sweep.base import BAD, RUNNING, WAITING, Record
from jaxscale.sweep.journal import read_records
from jaxscale.sweep.outcomes import score
from jaxscale.train.files import read_gin, write_listed
from jaxscale.working_copy import as_named, local

FILE = "results.csv"
FIRST = ("state", "steps", "tokens", "parameters", "flops", "loss", "eval_loss")
LAST = ("seconds", "error", "run")


def rows_of(records: Sequence[Record], folder: Path) -> list[dict[str, Any]]:
    """Return a dict per trial, all with the same keys in the same order; `None` for a missing metric.

    Args:
      records: records of the trials.
      folder: the sweep's folder; the `run` column names runs in it, and gives the whole path of runs elsewhere.
    """
    bound = dict.fromkeys(name for record in records for name in split(record.trial.bindings))
    measured = dict.fromkeys(name for record in records for name in sorted(record.metrics))
    others = [name for name in measured if name not in FIRST]
    rows = []
    for record in records:
        values = split(record.trial.bindings)
        ends = {
            "seconds": record.seconds,
            "error": record.error,
            "run": record.run and (record.run.name if record.run.parent == folder else str(record.run)),
        }
        numbers = {"state": record.state, **record.metrics}
        row = {name: values.get(name) for name in bound}
        row |= {name: numbers.get(name) for name in (*FIRST, *others)}
        rows.append(row | ends)
    return rows


def write_results(folder: Path, records: Sequence[Record]) -> None:
    """Write `results.csv` atomically, and its digest to `digests.json`."""
    rows = rows_of(records, folder)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [*FIRST, *LAST], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_listed(folder, FILE, out.getvalue())


class Result:
    """A sweep's folder, finished or not.

    Args:
      path: the folder, or its URL in a bucket.
      objective: the metric that its search minimises; by default that in its `sweep.gin`.
      records: records of its trials; by default those in the folder, which for a sweep shared by several machines
        are this machine's only.

    Attributes:
      stopped_by: the signal, such as "SIGTERM", that stopped the sweep in this process.

    Raises:
      RunError: the folder is not a sweep.
    """

    def __init__(self, path: str | Path, objective: str | None = None, records: Sequence[Record] | None = None):
        self.path, self._records = local(path), records
        self.objective = objective or _objective(self.path)
        self.stopped_by: str | None = None

    def __repr__(self) -> str:
        return f"Result({as_named(self.path)!r})"

    def records(self) -> list[Record]:
        """Return the record of each trial so far."""
        return read_records(self.path, self.objective) if self._records is None else list(self._records)

    def done(self) -> bool:
        """Whether no trial runs or waits."""
        return not any(r.state in (RUNNING, WAITING) for r in self.records())

    def table(self) -> list[dict[str, Any]]:
        """Return a dict per trial, as the rows of `results.csv`."""
        return rows_of(self.records(), self.path)

    def best(self) -> dict[str, Any]:
        """Return the row with the lowest objective.

        Raises:
          RunError: no trial has a finite objective.
        """
        records = self.records()
        best = best_of(records)
        if best is None:
            raise RunError(f"no trial of {as_named(self.path)} has a finite {clipped(self.objective)} yet")
        return rows_of(records, self.path)[records.index(best)]

    def run(self, row: dict[str, Any] | None = None) -> Run:
        """Return the run of a row of the table.

        Args:
          row: a row of `table()`; by default `best()`.
        """
        return Run(self.path / (row or self.best())["run"])


def best_of(records: Sequence[Record]) -> Record | None:
    """Return the record with the lowest finite objective that did not fail; `None` if there is none."""
    best = min((r for r in records if r.state not in BAD), key=score, default=None)
    return None if best is None or score(best) == math.inf else best


def _objective(folder: Path) -> str:
    try:
        lines = read_gin(folder / "sweep.gin").splitlines()
        return str(
            gin_config.parse(next(ln.partition(" = ")[2] for ln in lines if ln.startswith("sweep.objective = ")))
        )
    except (OSError, StopIteration):
        raise RunError(f"{as_named(folder)} is not a sweep: it has no readable sweep.gin") from None
