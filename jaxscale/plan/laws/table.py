"""Tables that laws are fitted on: a row per run, with columns named as in a sweep's `results.csv`."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxscale import digests
from jaxscale.errors import ConfigError, near

if TYPE_CHECKING:
    from jaxscale.models import ModelConfig

RESULTS = "results.csv"
BODY = "parameters_without_embeddings"
"""The column of parameters that have no dimension named "vocab"."""

_SAME = 1e-6
"""Values whose logarithms are closer than this are equal, since products of floats round."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Runs that finished with a finite loss.

    Args:
      columns: numbers by column, each of shape (n,); NaN where a run has none.
      name: the folder or file that the runs are from, for messages.
      dropped: number of rows that were left out: failed, unfinished, or without a finite loss.
    """

    columns: Mapping[str, Float[np.ndarray, " n"]]
    name: str = "the table"
    dropped: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, column: str) -> Float[np.ndarray, " n"]:
        """Return a column of positive numbers.

        Raises:
          ConfigError: there is no such column, or it has a value that is no positive number.
        """
        if column not in self.columns:
            raise ConfigError(f"{self.name} has no column '{column}'{near(column, self.columns)}")
        values = self.columns[column]
        if not (np.isfinite(values) & (values > 0)).all():
            bad = int(np.flatnonzero(~(np.isfinite(values) & (values > 0)))[0])
            raise ConfigError(
                f"column '{column}' of {self.name} has {values[bad]} in row {bad + 1}; laws need numbers above 0"
            )
        return values

    def where(self, rows: Bool[np.ndarray, " n"]) -> Table:
        """Return a table of some rows.

        Args:
          rows: which rows.
        """
        return dataclasses.replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def distinct(self, *columns: str) -> Int[np.ndarray, " n"]:
        """Return for each row the number of its combination of values, from 0 in ascending order.

        Args:
          *columns: columns whose values make the combination.

        Raises:
          ConfigError: as for a column.
        """
        keys = np.stack([np.round(np.log(self[c]) / _SAME) for c in columns], axis=1)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


Rows = list[Mapping[str, Any]]
ReadConfig = Callable[[Path], Any]


def read_rows(source: str | Path, *, body: ReadConfig | None = None) -> Rows:
    """Return the rows of a sweep's folder or of a CSV file, as they are.

    Args:
      source: the folder or file.
      body: reads the settings of a run from its folder (`jaxscale.run.read_config`). With it, a column
        `parameters_without_embeddings` is added, counted from the models of a sweep's runs; modules that define parts
        of them have to be imported before.

    Raises:
      ConfigError: there is no such file, or it is no CSV.
      AlteredFile: the file of a sweep differs from its seal.
    """
    path = Path(source)
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no {file}; give a sweep's folder, or a CSV with a row per run")
    digests.check(file.parent, [file.name])
    try:
        with file.open(newline="", encoding="utf-8") as f:
            rows: Rows = list(csv.DictReader(f))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"{file} cannot be read as CSV: {e}") from None
    return _with_body(rows, path, body) if body and path.is_dir() and rows and BODY not in rows[0] else rows


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write rows to a CSV file that `read_rows` reads, for example to save a sweep's table without its runs.

    Args:
      rows: the rows.
      path: the file.

    Returns:
      `path`.
    """
    path = Path(path)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_table(
    source: str | Path | Iterable[Mapping[str, Any]], *, loss: str = "eval_loss", body: ReadConfig | None = None
) -> Table:
    """Read runs for a law.

    Args:
      source: a sweep's folder or a CSV file, as for `read_rows`; or rows as dicts.
      loss: the column of losses; rows without a finite number in it are left out.
      body: as for `read_rows`.

    Raises:
      ConfigError: there is no such file, or no finished row has the column.
    """
    if isinstance(source, str | Path):
        rows, name = read_rows(source, body=body), str(source)
    else:
        rows, name = list(source), "the table"
    done = [row for row in rows if str(row.get("state") or "finished") == "finished"]
    columns: dict[str, np.ndarray] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = np.array([_number(row.get(key)) for row in done], np.float64)
        if np.isfinite(values).any() or not done:
            columns[key] = values
    if {"tokens", "steps"} <= columns.keys() and "batch" not in columns:
        columns["batch"] = columns["tokens"] / columns["steps"]
    if loss not in columns:
        raise ConfigError(f"{name} has no finished row with a column '{loss}'{near(loss, columns)}")
    whole = Table(columns, name)
    finite = np.isfinite(columns[loss])
    return dataclasses.replace(whole.where(finite), dropped=len(rows) - int(finite.sum()))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _with_body(rows: Rows, folder: Path, read_config: ReadConfig) -> Rows:
    """Return rows with the column `BODY`, for finished runs whose folder exists."""
    counts: dict[Any, int] = {}
    out: Rows = []
    for row in rows:
        run = folder / str(row.get("run") or "")
        if row.get("state") == "finished" and row.get("run") and (run / "config.gin").is_file():
            model = read_config(run).model
            if model not in counts:
                counts[model] = parameters_without_embeddings(model)
            row = {**row, BODY: counts[model]}
        out.append(row)
    return out


def parameters_without_embeddings(model: ModelConfig) -> int:
    """Count the parameters that have no dimension named "vocab", as Kaplan et al. 2020 do.

    Args:
      model: a model config.
    """
    import jax
    from flax import nnx

    from jaxscale.layout import abstract

    _, infos = abstract(lambda: model.make(nnx.Rngs(0)))
    return sum(i.size for i in jax.tree.leaves(infos) if "vocab" not in i.axes)
