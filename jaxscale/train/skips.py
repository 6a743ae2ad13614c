"""`skipped.jsonl`: which steps of a run were skipped, and why; a resumed run skips the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxscale.errors import RunError
from jaxscale.seals import Lines
from jaxscale.train.files import altered_lines
from jaxscale.train.metrics import json_row, open_to_append

SKIPS = "skipped.jsonl"
"""Name of the file."""


class Skips:
    """The skipped steps of one run: a line per step that a guard rejected, and a line per rollback.

    A line is on disk before the run continues, so that a run that is killed and resumed skips the same steps.

    Args:
      path: the file; made when the first line is written.

    Raises:
      RunError: it cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.passed: set[int] = set()
        """Steps whose batches are skipped."""
        for row in read_skips(path):
            self.passed.update(row.get("passed_over", ()))

    def refused(self, step: int, guard: str, numbers: dict[str, Any], rows: np.ndarray) -> None:
        """Record a step that a guard rejected.

        Args:
          step: the step.
          guard: the guard's name.
          numbers: the step's metrics, of which `loss` and `grad_norm` are recorded.
          rows: indices of the rows of the source in its batch.
        """
        recorded: dict[str, Any] = {k: numbers[k] for k in ("loss", "grad_norm") if k in numbers}
        self._write({"step": step, "guard": guard, **recorded, "rows": rows.tolist()})

    def pass_over(self, steps: Iterable[int], back_to: int, why: str) -> None:
        """Record a rollback to a checkpoint, and the steps to skip from there on.

        Args:
          steps: the steps to skip; those up to `back_to` are left out.
          back_to: the checkpoint's step.
          why: the reason.
        """
        over = sorted(s for s in steps if s > back_to)
        self.passed.update(over)
        self._write({"back_to": back_to, "passed_over": over, "why": why})

    def _write(self, row: dict[str, Any]) -> None:
        if jax.process_index() != 0:
            return
        try:
            with open_to_append(self.path) as file:
                file.write(json_row({**row, "time": time.time()}))
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise RunError(f"cannot write {self.path}: {e.strerror}") from e


def read_skips(path: Path) -> list[dict[str, Any]]:
    """Read a `skipped.jsonl`, in the order written; an incomplete last line is left out.

    Raises:
      RunError: it cannot be read.
      AlteredFile: a line is not what was written.
    """
    lines = Lines()
    try:
        rows = lines.feed(path.read_bytes()) if path.exists() else []
    except OSError as e:
        raise RunError(f"cannot read {path}: {e.strerror}") from e
    if lines.damaged:
        raise altered_lines(path, lines)
    return rows + lines.end()
