"""Progress of a run on the terminal or in a notebook."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.layout import TensorRow, describe
from jaxscale.layout.tensors import tensor_table
from jaxscale.models.base import DescribesLayers
from jaxscale.units import WIDTH, clock

if TYPE_CHECKING:
    from jaxscale.step.config import TrainConfig
    from jaxscale.step.prepare import Prepared


class Reporter:
    """Prints progress with rich: a live bar on a terminal or in a notebook, else a line every ten seconds.

    Args:
      quiet: print nothing.
    """

    def __init__(self, quiet: bool = False):
        from rich.console import Console

        self.console = Console(quiet=quiet, highlight=False)
        # in a notebook a live bar needs ipywidgets; without it, rich warns at every update
        self.live = self.console.is_terminal or self.console.is_jupyter and find_spec("ipywidgets") is not None
        if not (self.console.is_terminal or self.console.is_jupyter):
            self.console = Console(quiet=quiet, highlight=False, width=WIDTH)  # do not wrap lines in a file
        self._quiet = quiet
        self._progress: Any = None
        self._task: Any = None
        self._last_line = 0.0
        self._started = False
        self._unit = ""

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print one line as a warning."""
        self.console.print(f"warning: {text}", markup=False, style="yellow", soft_wrap=True)

    def table(self, title: str, rows: Sequence[TensorRow]) -> None:
        """Print a table of tensors."""
        if not self._quiet:
            self.console.print(tensor_table(title, rows))

    def announce(self, config: TrainConfig, prepared: Prepared, folder: str, first: int) -> None:
        """Print what is trained, on which layout, and from which step.

        Args:
          config: the run's settings.
          prepared: its compiled parts and data.
          folder: its folder.
          first: the step it continues from, or 0.
        """
        blueprint, self._unit = prepared.blueprint, config.objective.unit
        layout = "one device, no mesh" if config.layout is None else str(config.layout)
        self.table(f"parameters, laid out {layout}", describe(blueprint.infos, config.layout))
        if config.start is not None:
            self.say(f"starts from step {config.start.step} of {config.start.path}")
        if (teacher := config.objective.teacher) is not None:
            self.say(f"the teacher is step {teacher.step} of {teacher.path}")
        if blueprint.adaptation is not None:
            self.say(blueprint.adaptation.describe())
        of = f" of {config.seq_len} tokens" if "tokens" in prepared.batch else ""
        since = f", from step {first}" if first else ""
        count = sum(i.size for i in jax.tree.leaves(blueprint.of_model().infos))
        size = f"{count:,}" if count < 1e4 else f"{count / 1e6:.2f}M"
        self.say(
            f"{size} parameters · "
            f"{config.data.name}, {len(prepared.loader.source):,} rows{of} · {config.batch_size} rows a step · "
            f"{config.steps} steps{since} · run folder {folder}"
        )
        self.say(f"objective: {config.objective.describe(config)}")
        if (note := config.algorithm.note(config.layout)) is not None:
            self.say(note)
        if prepared.by_degree is not None:
            self.say(prepared.by_degree.describe())
        if isinstance(config.model, DescribesLayers):
            self.say(config.model.describe(config.layout))

    def start(self, steps: int, done: int) -> None:
        """Start the progress bar.

        Args:
          steps: the last step.
          done: steps taken before.
        """
        self._last_line = time.perf_counter()
        first, self._started = not self._started, True  # the step is compiled only once
        if self._quiet or not self.live:
            if first:
                self.say("compiling the step …")
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            refresh_per_second=4,
            speed_estimate_period=60,
        )
        numbers = "compiling the step …" if first else ""
        self._task = self._progress.add_task("train", total=steps, completed=done, numbers=numbers)
        self._progress.start()

    def step(
        self,
        row: dict[str, Any],
        steps: int,
        seconds_left: float | None,
        peak_share: float | None,
        goodput: float,
    ) -> None:
        """Show one step's numbers.

        Args:
          row: the step's row of `metrics.jsonl`.
          steps: the last step.
          seconds_left: estimate for the remaining steps, if known.
          peak_share: model FLOPs utilisation, 0 to 1, if known.
          goodput: share of the run's wall time that steps took, 0 to 1.
        """
        unit = "tokens" if "tokens_per_second" in row else "rows"
        numbers = f"loss {row['loss']:.3f} · {_short(row[f'{unit}_per_second'])} {unit}/s"
        if "model_flops_per_second" in row:
            numbers += f" · {_short(row['model_flops_per_second'])}FLOP/s"
        if peak_share is not None:
            numbers += f" ({peak_share:.0%} of bf16 peak)"
        numbers += f" · goodput {goodput:.0%}"
        if "eval_loss" in row:
            others = [k for k in row if k.startswith("eval_") and k != "eval_loss"]
            more = [f"{k.removeprefix('eval_')} {row[k]:.3f}" for k in others]
            loss = f"held-out loss {row['eval_loss']:.3f} {self._unit}".rstrip()
            self._above(f"step {row['step']}: {', '.join([loss, *more])}")
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], numbers=numbers)
        elif time.perf_counter() - self._last_line > 10 or row["step"] == steps:
            self._last_line = time.perf_counter()
            remaining = "" if seconds_left is None else f" · {clock(seconds_left)} left"
            self.say(f"step {row['step']}/{steps} · {numbers}{remaining}")

    def _above(self, text: str) -> None:
        console = self._progress.console if self._progress is not None else self.console
        console.print(text, markup=False)

    def stop(self) -> None:
        """Stop the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _short(x: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g} {letter}"
    return f"{x:.0f} "
