"""`metrics.jsonl`: a line a step, append-only, and TensorBoard beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO

from jaxscale import reading
from jaxscale.errors import RunError
from jaxscale.seals import Lines, seal_line


class MetricsFile:
    """Appends lines to `metrics.jsonl`; a line is on its way to disk before the next step starts.

    A run that was killed and resumed repeats the steps since its checkpoint: readers let a step replace itself and
    all that was written after it.
    """

    def __init__(self, path: Path):
        self._file = open_to_append(path)

    def write(self, row: dict[str, Any]) -> None:
        """Appends one line.

        Raises:
          RunError: the disk refuses.
        """
        try:
            self._file.write(json_row(row))
            self._file.flush()
        except OSError as e:
            raise RunError(f"cannot write {self._file.name}: {e.strerror}") from e

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def json_row(row: dict[str, Any]) -> bytes:
    """One line of JSON with its digest; numbers that are not finite as strings, since JSON has none."""
    return seal_line({k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in row.items()})


def open_to_append(path: Path) -> BinaryIO:
    """A file of lines, to be added to; a line at its end that a kill has torn is taken out."""
    file = path.open("ab")
    at = file.tell()
    if at and path.read_bytes()[-1:] != b"\n":
        lines = Lines()
        data = path.read_bytes()
        lines.feed(data)
        if lines.end():  # only its end is missing
            file.write(b"\n")
        else:
            file.truncate(data.rfind(b"\n") + 1)
    return file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, one per step in order of step, the last written of each; torn lines left out."""
    return Tail(path).rows()


class Tail:
    """A `metrics.jsonl` that grows: what was read of it before is not read again.

    Attributes:
      lines: those that are damaged; they are left out.
      without_step: how many lines have no step that is a whole number; they are left out, too.
    """

    def __init__(self, path: Path):
        self.path, self._at, self.lines, self.without_step = path, 0, Lines(), 0
        self._rows: dict[int, dict[str, Any]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """As `read_metrics`; a line that is being written comes with the next call.

        Raises:
          RunError: it is there, and cannot be read, or is without digests and a link out of its folder.
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
            if step in self._rows:  # resumed from before it: what was written since is another future
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


class TensorBoard:
    """Scalars for TensorBoard, through tensorboardX."""

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, row: dict[str, Any]) -> None:
        """One step's numbers."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


def tensorboard_or_none(folder: Path, wanted: bool | None) -> TensorBoard | None:
    """A writer when wanted (`True`) or possible (`None`).

    Raises:
      RunError: wanted, and tensorboardX is not installed.
    """
    if wanted is False:
        return None
    try:
        return TensorBoard(folder)
    except ImportError:
        if wanted:
            raise RunError("train.tensorboard = True needs tensorboardX: pip install 'jaxscale[tb]'") from None
        return None
