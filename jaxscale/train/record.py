"""Write a run's folder, apart from checkpoints: `run.json`, `config.gin`, metrics, samples and the loss curve."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxscale.errors import DataError, RunError
from jaxscale.step.histograms import on_host
from jaxscale.step.prepare import Prepared
from jaxscale.train import expert_load
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.files import CONFIG, INFO, write_json
from jaxscale.train.goodput import Goodput
from jaxscale.train.metrics import MetricsFile
from jaxscale.train.run import HF, RunFolder, about, bring_companions, write_config
from jaxscale.train.tracking import Trackers, tracked

LOSS = "loss.png"


class Record:
    """Records a run's progress in its folder; only the main process writes.

    Args:
      run: the run.
      prepared: its compiled parts and data.
      checkpoints: its checkpoints; their `run` is set to the run's id.
      warn: prints a warning.
      goodput: counts the run's time.
    """

    def __init__(
        self,
        run: RunFolder,
        prepared: Prepared,
        checkpoints: Checkpoints,
        warn: Callable[[str], None],
        goodput: Goodput,
    ):
        self.run, self.prepared, self.checkpoints, self.warn = run, prepared, checkpoints, warn
        self.goodput = goodput
        self._written: dict[str, Any] = {}
        self._trackers: Trackers | None = None

    def begin(self, first: int) -> list[Any]:
        """Write the config and the status "running", from step `first`.

        Returns:
          open files that take one row per step.
        """
        run, config = self.run, self.run.config
        if not run.is_main:
            return []
        if config.start is not None and not (run.path / HF).exists():
            with contextlib.suppress(RunError, DataError):  # a resumed run's start may be deleted
                bring_companions(config.start.run, run)
        lost = write_config(run.path, config, first)
        for setting in lost:
            self.warn(f"{setting} came from Python and cannot be written to config.gin; resume this run from Python")
        if (run.path / INFO).exists():
            self.goodput.resumed(run.info, run.metrics(), first)
        self.status("running", first)
        self.goodput.row()  # what is in run.json is in no row
        metrics = MetricsFile(run.path / "metrics.jsonl")
        if not config.trackers:
            return [metrics]
        described = tracked(config, run.path, self._written["id"], first)
        self._trackers = Trackers(config.trackers, described, self.warn)
        self._trackers.artifact(run.path / CONFIG, first)
        return [metrics, self._trackers]

    def histograms(self, step: int, counts: Any) -> None:
        """Send histograms to the trackers.

        Args:
          step: the step, from 1.
          counts: what the step counted (see `jaxscale.step.histograms.count`).
        """
        if self._trackers is not None:
            self._trackers.histograms(step, on_host(jax.device_get(counts)))

    def experts(self, step: int, tables: Any) -> None:
        """Append how tokens were routed to `experts.jsonl`, and send its numbers to the trackers.

        Args:
          step: the step, from 1.
          tables: the step's statistics by layer (see `jaxscale.nn.stats`).
        """
        if not self.run.is_main:
            return
        line = expert_load.line_of(step, jax.device_get(tables))
        file = MetricsFile(self.run.path / expert_load.FILE)
        file.write(line)
        file.close()
        if self._trackers is not None:
            self._trackers.write({"step": step, **expert_load.numbers_of(line)})

    def progress(self, step: int) -> None:
        """Send the loss and the loads of experts so far to the trackers as pictures, which their threads draw."""
        if self._trackers is not None:
            self._trackers.artifact(self.run.path / LOSS, step, self.run.plot)
            if (self.run.path / expert_load.FILE).exists():
                self._trackers.artifact(self.run.path / expert_load.PICTURE, step, self._draw_experts)

    def finish(self) -> None:
        """Finish the trackers, after the last picture and sample; waits for a limited time."""
        if self._trackers is not None:
            self._trackers.artifact(self.run.path / INFO, self._written["step"])
            self._trackers.finish(self._written["status"])

    def status(self, status: str, step: int, error: BaseException | None = None) -> None:
        """Write `run.json`; called by the main process only.

        Args:
          status: "running", "finished", "paused", "stopped" or "failed".
          step: the run's step.
          error: why it failed, if it did.

        Raises:
          RunError: it cannot be written.
        """
        before = self._written  # rather than the file, which may have been damaged since
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
            "goodput": self.goodput.about(),
            **({"error": _described(error)} if error is not None else {}),
        }
        write_json(self.run.path / INFO, info)
        self._written = info

    def is_open(self) -> bool:
        """Whether `run.json` does not say that the run ended well."""
        return not (self.run.path / INFO).exists() or self.run.info.get("status") in ("running", "failed")

    def complete(self, status: str, step: int) -> None:
        """Write `run.json` and the picture of a run that took its last step in an earlier process; as `status`.

        Args:
          status: "finished" or "paused".
          step: the run's step.
        """
        if (self.run.path / INFO).exists():
            self.goodput.resumed(self.run.info, self.run.metrics(), step)
        self.status(status, step)
        self.picture()

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Append a sampled text to `samples.jsonl`, which comparisons of runs read."""
        if self.run.is_main:
            samples = MetricsFile(self.run.path / "samples.jsonl")
            samples.write({"step": step, "prompt": prompt, "text": text})
            samples.close()
            if self._trackers is not None:
                self._trackers.artifact(self.run.path / "samples.jsonl", step)

    def picture(self) -> None:
        """Write `loss.png`, and `experts.png` of a run with experts, or warn why that is not possible."""
        if not self.run.is_main:
            return
        pictures: dict[str, Callable[[Path], Any]] = {LOSS: self.run.plot}
        if (self.run.path / expert_load.FILE).exists():
            pictures[expert_load.PICTURE] = self._draw_experts
        for name, draw in pictures.items():
            try:
                draw(self.run.path / name)
            except RunError as e:
                self.warn(f"{e}")
                return
            if self._trackers is not None:
                self._trackers.artifact(self.run.path / name, self._written["step"])

    def _draw_experts(self, path: Path) -> None:
        expert_load.draw_experts(expert_load.read_experts(self.run.path / expert_load.FILE), self.run.path.name, path)

    def _started_from(self, before: dict[str, Any]) -> dict[str, Any]:
        """Entry with the run and checkpoint of the first parameters; looked up once, since that run may be deleted."""
        config = self.run.config
        starts = {"start": config.start, "teacher": config.objective.teacher}
        return {name: before.get(name) or start.about() for name, start in starts.items() if start is not None}


def _described(error: BaseException) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
