"""Distillation on the student's own samples, in the loop of reinforcement learning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxscale.data.prompts import Prompts
from jaxscale.rl.loop import grpo
from jaxscale.run import Run
from jaxscale.step import OnPolicyDistill, TrainConfig
from jaxscale.train.run import RunFolder
from jaxscale.train.start import FromRun


def distill(
    run: RunFolder | TrainConfig | str | Path,
    *,
    teacher: RunFolder | str | Path,
    prompts: Prompts | Sequence[str],
    reward: Callable[..., Any] | None = None,
    **settings: Any,
) -> Run:
    """Train a run's model on its own samples of prompts to predict what a teacher would; leaves a run folder.

    Args:
      run: as in `grpo`.
      teacher: the teacher's run or its folder; its tokens must be those of the student.
      prompts: as in `grpo`.
      reward: measured beside, and learned if `rewards` is set (see `OnPolicyDistill`).
      **settings: fields of `OnPolicyDistill`, and as in `grpo`.

    Returns:
      the new run, with its last state in memory.

    Raises:
      ConfigError: settings do not fit together.
      RunError: as in `grpo`.
    """
    path = teacher.path if isinstance(teacher, RunFolder) else Path(teacher)
    names = {f.name for f in dataclasses.fields(OnPolicyDistill)}
    own = {k: settings.pop(k) for k in list(settings) if k in names}
    # frozen fields stand for the attributes of `Start`
    objective = OnPolicyDistill(FromRun(str(path)), **own)  # type: ignore[arg-type]
    return grpo(run, prompts=prompts, reward=reward, objective=objective, **settings)
