"""What a run writes into its folder beside its states: who it is, its settings, how it ended, a sample, a picture."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from jaxscale.errors import DataError, RunError
from jaxscale.step.prepare import Prepared
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.files import INFO, write_json
from jaxscale.train.metrics import MetricsFile, tensorboard_or_none
from jaxscale.train.run import HF, RunFolder, about, bring_companions, write_config


class Record:
    """Writes down what becomes of a run; only the process that `RunFolder.is_main` does.

    Args:
      run: whose folder it is.
      prepared: its data.
      checkpoints: its own; given the run's id, which they carry.
      warn: takes a sentence for the user.
    """

    def __init__(self, run: RunFolder, prepared: Prepared, checkpoints: Checkpoints, warn: Callable[[str], None]):
        self.run, self.prepared, self.checkpoints, self.warn = run, prepared, checkpoints, warn
        self._written: dict[str, Any] = {}

    def begin(self, first: int) -> list[Any]:
        """Says in the folder that the run is under way, from step `first`.

        Returns:
          open files, which take a row a step.
        """
        run, config = self.run, self.run.config
        if not run.is_main:
            return []
        if config.start is not None and not (run.path / HF).exists():
            with contextlib.suppress(RunError, DataError):  # of a run that goes on, that one may be gone
                bring_companions(config.start.run, run)
        lost = write_config(run.path, config, first)
        for setting in lost:
            self.warn(f"{setting} came from Python and is not in config.gin; resume this run from Python")
        self.status("running", first)
        board = tensorboard_or_none(run.path / "tensorboard", config.tensorboard)
        return [MetricsFile(run.path / "metrics.jsonl"), *([board] if board else [])]

    def status(self, status: str, step: int, error: BaseException | None = None) -> None:
        """Writes `run.json`; called by one process.

        Raises:
          RunError: the disk refuses.
        """
        before = self._written  # what is on disk may be damaged by now, and the run need not fail for that
        if not before and (self.run.path / INFO).exists():
            before = self.run.info
        self.checkpoints.run = before.get("id", self.checkpoints.run) or os.urandom(8).hex()
        info = {
            "id": self.checkpoints.run,
            **about(self.run.config, self.prepared.fingerprint),
            **self._started_from(before),
            "status": status,
            "step": step,
            "started": before.get("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")),
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **({"error": f"{type(error).__name__}: {error}"} if error is not None else {}),
        }
        write_json(self.run.path / INFO, info)
        self._written = info

    def sample(self, step: int, prompt: str, text: str) -> None:
        """A line of `samples.jsonl`, for who compares runs later."""
        if self.run.is_main:
            samples = MetricsFile(self.run.path / "samples.jsonl")
            samples.write({"step": step, "prompt": prompt, "text": text})
            samples.close()

    def picture(self) -> None:
        """Draws `loss.png`, or warns why there is none."""
        if not self.run.is_main:
            return
        try:
            self.run.plot(self.run.path / "loss.png")
        except RunError as e:
            self.warn(f"{e}")

    def _started_from(self, before: dict[str, Any]) -> dict[str, Any]:
        """The run and the checkpoint that the first parameters are of; looked up once, since that run may go."""
        start = self.run.config.start
        if start is None:
            return {}
        return {"start": before["start"] if "start" in before else start.about()}
