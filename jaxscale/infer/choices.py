"""Multiple-choice questions, answered by the likelihood of each choice."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxscale.errors import DataError, near
from jaxscale.infer.loaded import check_length, load_model, prompt_ids, warn_length
from jaxscale.infer.score import log_probabilities
from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

if TYPE_CHECKING:
    from jaxscale.run import Run


class Question(NamedTuple):
    """A multiple-choice question.

    Args:
      context: the text before the choice.
      choices: the choices' texts.
      answer: the index of the right one.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(file: str | Path) -> list[Question]:
    """Read questions from a JSONL file.

    Args:
      file: each line is an object with `question` (or `context`), `choices`, and `answer`, its index or its text.

    Raises:
      DataError: the file cannot be read, or a line is not a question; the message names the line.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")  # `splitlines` would also split at Unicode line ends
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read {file} ({e}); name a JSONL file with a question in each line") from None
    questions = [_question(line, f"{file}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise DataError(f"{file} has no question")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise DataError(f"{where} is not JSON ({e})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object with the fields question, choices and answer")
    context = next((row[n] for n in ("question", "context") if n in row), None)
    present = {"question": context is not None, "choices": "choices" in row, "answer": "answer" in row}
    for name in (n for n in present if not present[n]):
        raise DataError(f"{where} has no field '{name}'{near(name, row)}")
    choices, answer = row["choices"], row["answer"]
    if (
        not isinstance(context, str)
        or not isinstance(choices, list)
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise DataError(f"{where}: question must be a string, and choices a list of strings that are not empty")
    if len(choices) < 2:
        raise DataError(f"{where} has {len(choices)} choice(s); a question needs at least two")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        most = len(choices) - 1
        raise DataError(f"{where}: answer {answer!r} is neither one of the choices nor an index from 0 to {most}")
    return Question(context, tuple(choices), answer)


@dataclasses.dataclass(frozen=True)
class Choices:
    """A model's answers to multiple-choice questions.

    Args:
      right: whether the right choice of each question has the highest log-likelihood.
      right_normalised: whether it has the highest log-likelihood divided by the choice's length in characters.
      nats: minus the log-likelihood of each choice of each question.
      cut: how many choices were too long, so that the question lost its beginning.
      length: tokens that the model sees at once.
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
        """The share of right answers, and its standard error (`nan` for one question)."""
        return _share(self.right)

    @property
    def accuracy_normalised(self) -> tuple[float, float]:
        """The same for log-likelihoods divided by length."""
        return _share(self.right_normalised)

    def results(self) -> dict[str, Any]:
        """Return fields and accuracies, for JSON."""
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
    """Answer each question by the choice that the run's model finds likeliest after it.

    A choice's log-likelihood is the sum over the tokens of `context + separator + choice` from the first one that
    differs from the tokens of the context alone. Of equal choices the first is the answer.

    Args:
      run: the run.
      questions: at least one.
      separator: the text before each choice.
      length: how many tokens the model sees; longer texts lose their beginning.
      layout: as in `jaxscale.infer.evaluate.perplexity`, like all that follow.
      step: likewise.
      rows: likewise.
      weights: likewise.

    Raises:
      DataError: a text cannot be encoded.
      ConfigError: as in `jaxscale.infer.evaluate.perplexity`.
      CheckpointError: there is no such checkpoint.
      RunError: the run has no checkpoint.
      LayoutError: the layout does not divide `length`.
    """
    length = run.config.seq_len if length is None else length
    warn_length(run, length)
    sequences, first = [], []
    for q in questions:
        context = prompt_ids(run, q.context)
        for choice in q.choices:
            ids = prompt_ids(run, q.context + separator + choice)
            if ids[0] != context[0]:  # no opening token, and an empty context
                ids = np.concatenate([run.end_ids[:1], ids]).astype(np.int32)
                context = ids[:1]
            n = min(len(context), len(ids) - 1)
            differs = np.flatnonzero(context[:n] != ids[:n])
            sequences.append(ids)
            first.append(int(differs[0] if len(differs) else n) - 1)
    loaded = load_model(run, layout, step, weights=weights)
    check_length(run, loaded.layout, length)
    logprobs = log_probabilities(
        loaded, sequences, first=first, length=length, rows=rows, loss=run.config.token_loss, apart=run.config.segments
    )
    sums = iter([math.fsum(x.tolist()) for x in logprobs])
    by_question = [[next(sums) for _ in q.choices] for q in questions]
    by_length = [
        [v / len(c) for v, c in zip(x, q.choices, strict=True)] for x, q in zip(by_question, questions, strict=True)
    ]
    right, normalised = (
        tuple(int(np.argmax(x)) == q.answer for x, q in zip(values, questions, strict=True))
        for values in (by_question, by_length)
    )
    cut = sum(len(ids) - 1 > length for ids in sequences)
    nats = tuple(tuple(-v for v in x) for x in by_question)
    return Choices(right, normalised, nats, cut, length, loaded.step)
