"""Questions with choices, answered by the likelihood of each."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxscale.errors import DataError, near
from jaxscale.infer.loaded import load_model, prompt_ids, say_length
from jaxscale.infer.score import log_probabilities
from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run


class Question(NamedTuple):
    """A question with choices.

    Args:
      context: what comes before the choice.
      choices: texts.
      answer: number of the right one, from 0.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(file: str | Path) -> list[Question]:
    """Questions from a JSONL file: `question` (or `context`), `choices`, and `answer`, its number from 0 or its text.

    Raises:
      DataError: naming the line.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")  # not where Unicode sees the end of a line
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read {file} ({e}); give a JSONL file with a question a line") from None
    found = [_question(line, f"{file}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{file} has no question")
    return found


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise DataError(f"{where} is no JSON ({e})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object with the fields question, choices and answer")
    asked = next((row[n] for n in ("question", "context") if n in row), None)
    there = {"question": asked is not None, "choices": "choices" in row, "answer": "answer" in row}
    for name in (n for n in there if not there[n]):
        raise DataError(f"{where} has no field '{name}'{near(name, row)}")
    choices, answer = row["choices"], row["answer"]
    if (
        not isinstance(asked, str)
        or not isinstance(choices, list)
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise DataError(f"{where}: the question must be a text, and choices a list of texts that are not empty")
    if len(choices) < 2:
        raise DataError(f"{where} has {len(choices)} choice(s); give at least two")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(f"{where}: answer {answer!r} is neither one of the choices nor its number from 0")
    return Question(asked, tuple(choices), answer)


@dataclasses.dataclass(frozen=True)
class Choices:
    """How often a model gives the right choice the highest log-likelihood.

    Args:
      right, right_normalised: of each question, whether so; by the sum, and by the sum over the choice's length in
        characters.
      nats: minus the log-likelihood of each choice.
      cut: choices whose question was too long and lost its beginning.
      length: tokens that the model sees.
      step: of the checkpoint.
    """

    right: tuple[bool, ...]
    right_normalised: tuple[bool, ...]
    nats: tuple[tuple[float, ...], ...]
    cut: int
    length: int
    step: int

    @property
    def accuracy(self) -> tuple[float, float]:
        """The share of right ones, and its standard error (of one question, `nan`)."""
        return _share(self.right)

    @property
    def accuracy_normalised(self) -> tuple[float, float]:
        """By likelihoods over lengths; and its standard error."""
        return _share(self.right_normalised)

    def results(self) -> dict[str, Any]:
        """All of it, for JSON."""
        out: dict[str, Any] = {"questions": len(self.right), "cut": self.cut, "length": self.length, "step": self.step}
        for name in ("accuracy", "accuracy_normalised"):
            out[name], error = getattr(self, name)
            out[f"{name}_error"] = None if math.isnan(error) else error
        return out | {"right": self.right, "right_normalised": self.right_normalised, "nats": self.nats}


def _share(right: Sequence[bool]) -> tuple[float, float]:
    p, n = sum(right) / len(right), len(right)
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan


def multiple_choice(
    run: Run,
    questions: Sequence[Question],
    *,
    separator: str = " ",
    length: int | None = None,
    layout: Layout | None = None,
    step: int | None = None,
    rows: int = 8,
    weights: WeightFormat | None = None,
) -> Choices:
    """Which choice a run's model finds likeliest behind each question.

    A choice's log-likelihood is the sum over its tokens in `context + separator + choice`: those from the first on that
    the context alone does not have. The first of equals is taken.

    Args:
      run: the run.
      questions: at least one.
      separator: stands before each choice.
      length: how many tokens the model sees; what is longer loses its beginning.
      layout, step, rows, weights: as in `jaxscale.infer.evaluate.perplexity`.

    Raises:
      DataError, ConfigError, CheckpointError, RunError: as `jaxscale.infer.evaluate.perplexity`.
    """
    length = run.config.seq_len if length is None else length
    say_length(run, length)
    texts, first = [], []
    for q in questions:
        alone = prompt_ids(run, q.context)
        for choice in q.choices:
            whole = prompt_ids(run, q.context + separator + choice)
            if whole[0] != alone[0]:  # nothing opens a text, and there is no context
                whole = np.concatenate([run.end_ids[:1], whole]).astype(np.int32)
                alone = whole[:1]
            n = min(len(alone), len(whole) - 1)
            differs = np.flatnonzero(alone[:n] != whole[:n])
            texts.append(whole)
            first.append(int(differs[0] if len(differs) else n) - 1)
    loaded = load_model(run, layout, step, weights=weights)
    found = log_probabilities(
        loaded, texts, first=first, length=length, rows=rows, loss=run.config.token_loss, apart=run.config.segments
    )
    sums = iter([math.fsum(x.tolist()) for x in found])
    by_question = [[next(sums) for _ in q.choices] for q in questions]
    chosen = lambda values, q: int(np.argmax(values)) == q.answer  # noqa: E731
    right = tuple(chosen(x, q) for x, q in zip(by_question, questions, strict=True))
    over = [
        [v / len(c) for v, c in zip(x, q.choices, strict=True)] for x, q in zip(by_question, questions, strict=True)
    ]
    normalised = tuple(chosen(x, q) for x, q in zip(over, questions, strict=True))
    cut = sum(len(t) - 1 > length for t in texts)
    nats = tuple(tuple(-v for v in x) for x in by_question)
    return Choices(right, normalised, nats, cut, length, loaded.step)
