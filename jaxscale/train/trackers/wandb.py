"""Weights & Biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.step.trackers import Histogram, TrackedRun, Tracker, Tracking, check_text, nonfinite

_MODES = ("online", "offline", "disabled")


@register
@dataclasses.dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases (https://docs.wandb.ai): https://wandb.ai, or your own server.

    The API key is taken as wandb takes it (`wandb login`, or WANDB_API_KEY), never from a config. Local files are in
    `wandb/` of the run folder.

    Args:
      project: the project's name.
      entity: the user or team; `None` is the account's default.
      mode: "online", "offline" (upload later with `wandb sync`) or "disabled"; `None` as WANDB_MODE says, else online.
      tags: labels of the run.

    Raises:
      ConfigError: there is no such mode, or another setting is not text.
    """

    project: str = "jaxscale"
    entity: str | None = None
    mode: str | None = None
    tags: tuple[str, ...] = ()
    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def __post_init__(self) -> None:
        check_text(self, "entity", "mode")
        if not isinstance(self.tags, tuple | list) or not all(isinstance(tag, str) and tag for tag in self.tags):
            raise ConfigError(f"Wandb.tags = {self.tags!r}: must be a tuple of texts, such as ('baseline',)")
        if self.mode is not None and self.mode not in _MODES:
            raise ConfigError(f"Wandb.mode = {self.mode!r} does not exist{near(str(self.mode), _MODES)}")

    def variables(self) -> tuple[str, ...]:
        """Return the variable of the API key, which is needed online, and that of the mode."""
        return {None: ("WANDB_API_KEY", "WANDB_MODE"), "online": ("WANDB_API_KEY",)}.get(self.mode, ())

    def start(self, run: TrackedRun) -> Tracking:
        """Start a run, or continue the one with the stored id."""
        import wandb

        mode = self.mode or wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):  # a prompt would wait in this thread
            raise RuntimeError('there is no API key: run "wandb login", set WANDB_API_KEY, or Wandb.mode = "offline"')
        stored = {"id": run.stored.get("id", run.id), "project": run.stored.get("project", self.project)}
        record = wandb.init(
            project=stored["project"],
            entity=self.entity,
            dir=str(run.folder),
            id=stored["id"],
            name=run.name,
            group=run.group,
            config=dict(run.settings),
            tags=list(self.tags),
            mode=self.mode,  # type: ignore[arg-type]
            resume="allow" if mode == "online" else None,  # offline, `wandb sync` joins runs of one id
            reinit="create_new",  # several runs of one process, as the trials of a sweep
            settings=wandb.Settings(console="off", silent=True),
        )
        record.define_metric("step")
        record.define_metric("*", step_metric="step")  # steps may repeat, which wandb's own may not
        return _Run(record, stored)


class _Run(Tracking):
    def __init__(self, record: Any, stored: Mapping[str, str]):
        self._record, self.stored = record, stored

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log numbers; names before a "/" are sections."""
        self._record.log({**row, "step": step})

    def artifact(self, path: Path, step: int) -> None:
        """Log a picture as an image, and save other files with the run."""
        if path.suffix == ".png":
            import wandb

            self._record.log({path.stem: wandb.Image(str(path)), "step": step})
        else:
            self._record.save(str(path), base_path=str(path.parent), policy="now")

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms."""
        import wandb

        panels = {k: wandb.Histogram(np_histogram=(h.counts.tolist(), h.edges.tolist())) for k, h in histograms.items()}
        self._record.log({**panels, **nonfinite(histograms), "step": step})

    def finish(self, status: str) -> None:
        """Upload the rest, and mark a failed run as such."""
        self._record.finish(exit_code=int(status == "failed"))
