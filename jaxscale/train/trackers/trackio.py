"""Trackio."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.step.trackers import Histogram, TrackedRun, Tracker, Tracking, check_text, nonfinite


@register
@dataclasses.dataclass(frozen=True)
class Trackio(Tracker):
    """Trackio (https://github.com/gradio-app/trackio): a local database, or a Hugging Face Space.

    `trackio show` opens the dashboard. TRACKIO_DIR is the folder of the database.

    Args:
      project: the project's name.
      space: a Space such as "user/space" to log to, with the token of `hf auth login`; `None` stays on this machine.

    Raises:
      ConfigError: a setting is not text.
    """

    project: str = "jaxscale"
    space: str | None = None
    package: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    def __post_init__(self) -> None:
        check_text(self, "space")

    def variables(self) -> tuple[str, ...]:
        """Return the variable of the token, which a Space needs."""
        return () if self.space is None else ("HF_TOKEN",)

    def start(self, run: TrackedRun) -> Tracking:
        """Start a run, or continue the one of the stored name; the run's id makes the name unique in the project."""
        import trackio

        name = run.stored.get("name", f"{run.name}-{run.id[:6]}")
        record = trackio.init(
            project=run.stored.get("project", self.project),
            name=name,
            group=run.group,
            space_id=self.space,
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )
        return _Run(record, {"name": name, "project": record.project})


class _Run(Tracking):
    def __init__(self, record: Any, stored: Mapping[str, str]):
        self._record, self.stored = record, stored

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log numbers."""
        self._record.log(dict(row), step=step)

    def artifact(self, path: Path, step: int) -> None:
        """Log a picture as an image, and other files as text with their whole names ("run" is reserved)."""
        import trackio

        if path.suffix == ".png":
            self._record.log({path.stem: trackio.Image(str(path))}, step=step)
        else:
            self._record.log({path.name: trackio.Markdown(f"```\n{path.read_text()}\n```")}, step=step)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms."""
        import trackio

        panels = {k: trackio.Histogram(np_histogram=(h.counts, h.edges)) for k, h in histograms.items()}
        self._record.log({**panels, **nonfinite(histograms)}, step=step)

    def finish(self, status: str) -> None:
        """Write the rest."""
        self._record.finish()
