"""TensorBoard event files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.step.trackers import Histogram, TrackedRun, Tracker, Tracking, nonfinite


@register
@dataclasses.dataclass(frozen=True)
class TensorBoard(Tracker):
    """Event files for TensorBoard, in `tensorboard/` of the run folder; `tensorboard --logdir runs` displays them.

    Written with tensorboardX (https://github.com/lanpa/tensorboardX).
    """

    package: ClassVar[str] = "tensorboardX"
    extra: ClassVar[str] = "tb"

    def start(self, run: TrackedRun) -> Tracking:
        """Open an event file; a resumed run replaces the steps after its checkpoint."""
        from tensorboardX import SummaryWriter

        purge = {"purge_step": run.first + 1} if run.first else {}
        suffix = f".from-{run.first}"  # else a file of the same second would be overwritten
        writer = SummaryWriter(str(run.folder / "tensorboard"), filename_suffix=suffix, **purge)
        return _Events(writer)


class _Events(Tracking):
    def __init__(self, writer: Any):
        self._writer = writer

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def artifact(self, path: Path, step: int) -> None:
        """Write a picture as an image, and other files as text."""
        if path.suffix == ".png":
            import numpy as np
            from PIL import Image

            self._writer.add_image(path.stem, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")
        else:
            indented = "\n".join(f"    {line}" for line in path.read_text().splitlines())  # Markdown: as it is
            self._writer.add_text(path.name, indented, step)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms; their sums and sums of squares are those of the bins' middles."""
        for name, h in histograms.items():
            sums = [float(h.counts @ h.middles**power) for power in (1, 2)]
            first, last, total = float(h.edges[0]), float(h.edges[-1]), int(h.counts.sum())
            limits, counts = h.edges[1:].tolist(), h.counts.tolist()
            self._writer.add_histogram_raw(name, first, last, total, *sums, limits, counts, step)
        self.log(step, nonfinite(histograms))

    def finish(self, status: str) -> None:
        """Flush and close."""
        self._writer.close()
