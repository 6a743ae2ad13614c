"""`metrics.jsonl`, with one line per step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO

from jaxscale import reading
from jaxscale.errors import RunError
from jaxscale.seals import Lines, seal_line


class MetricsFile:
    """Appends lines to `metrics.jsonl`, flushing each.

    A run that was killed and resumed repeats the steps since its checkpoint; readers drop the earlier line of a
    repeated step and all lines between.

    Args:
      path: the file.
    """

    def __init__(self, path: Path):
        self._file = open_to_append(path)

    def write(self, row: dict[str, Any]) -> None:
        """Append one line.

        Raises:
          RunError: it cannot be written.
        """
        try:
            self._file.write(json_row(row))
            self._file.flush()
        except OSError as e:
            raise RunError(f"cannot write {self._file.name}: {e.strerror}") from e

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_row(row: dict[str, Any]) -> bytes:
    """Encode one line of JSON with its digest; NaN and infinities become strings, since JSON has none."""
    return seal_line({k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in row.items()})


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of lines for appending; removes an incomplete last line, which a killed process leaves."""
    file = path.open("ab")
    at = file.tell()
    if at and path.read_bytes()[-1:] != b"\n":
        lines = Lines()
        data = path.read_bytes()
        lines.feed(data)
        if lines.end():  # only its newline is missing
            file.write(b"\n")
        else:
            file.truncate(data.rfind(b"\n") + 1)
    return file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`: the last row written for each step, in order of step; damaged lines are left out."""
    return Tail(path).rows()


class Tail:
    """Reads a growing `metrics.jsonl`, each line once.

    Args:
      path: the file.

    Attributes:
      lines: the reader, which lists damaged lines; they are left out.
      without_step: how many lines have no whole number as their step; they are left out, too.
    """

    def __init__(self, path: Path):
        self.path, self._at, self.lines, self.without_step = path, 0, Lines(), 0
        self._rows: dict[int, dict[str, Any]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Return what `read_metrics` would; an incomplete last line is left for the next call.

        Raises:
          RunError: the file cannot be read, or has no digests and is a link out of its folder.
        """
        try:
            with reading.open_file(self.path) as f:
                f.seek(self._at)
                new = f.read()
        except FileNotFoundError:
            return []
        except OSError as e:
            raise RunError(f"{self.path} cannot be read: {e.strerror}") from None
        whole = new.rfind(b"\n") + 1
        self._at += whole
        rows = [*self.lines.feed(new[:whole]), *self.lines.end(new[whole:])]
        if not self.lines.sealed:
            self._check_own()
        for row in rows:
            step = _step(row)
            if step is None:
                self.without_step += 1
                continue
            if step in self._rows:  # the run was resumed from an earlier step: drop what followed
                self._rows = {s: r for s, r in self._rows.items() if s < step}
            numbers = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in row.items()}
            self._rows[step] = {**numbers, "step": step}
        return [self._rows[step] for step in sorted(self._rows)]

    def _check_own(self) -> None:
        try:
            reading.check_own(self.path)
        except OSError as e:
            raise RunError(f"{self.path} cannot be read: {e.strerror}") from None


def _step(row: dict[str, Any]) -> int | None:
    try:
        step = int(row["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return step if reading.is_whole(step) else None
