"""A corpus of preferences: pairs of answers, of which the first is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.data.answer_files import AnswerFiles
from jaxscale.data.chat import ChatTemplate
from jaxscale.data.conversations import Learned, tokenized
from jaxscale.errors import DataError, near


@register(name="preference_files")
@dataclass(frozen=True)
class PreferenceFiles(AnswerFiles):
    """Pairs of answers to a prompt in JSON-lines files, plain or compressed by gzip or Zstandard.

    Each line is a pair, in one of three forms, of which the last two are conversations written by the model's chat
    template (those of TRL's data sets):

        {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}
        {"prompt": [MESSAGES], "chosen": [MESSAGES], "rejected": [MESSAGES]}
        {"chosen": [MESSAGES], "rejected": [MESSAGES]}

    In the last form, the prompt is what both conversations begin with. A line gives two rows, first the chosen answer,
    of one document each; only answers have weights. For `@DPO()`, `@IPO()`, `@ORPO()` and `@SimPO()`.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
      template: a folder or file with the chat template; by default the tokenizer's folder.
      too_long: what becomes of pairs longer than a row: "error", "cut" (the end is cut off) or "drop".
      heldout: fraction of lines held out.

    Raises:
      DataError: `too_long` does not exist.
    """

    name: ClassVar[str] = "preference_files"
    group: ClassVar[int] = 2

    def of_line(self, record: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate]) -> list[Learned]:
        """Return the chosen and the rejected answer of a line, each with the prompt."""
        check_fields(record, ("chosen", "rejected"), (*_PAIR, "tools"))
        answers = [record["chosen"], record["rejected"]]
        prompt = record.get("prompt")
        if prompt is None:
            if not all(isinstance(x, list) for x in answers):
                raise DataError("a pair of texts needs a 'prompt', which may be empty")
            shared = 0
            while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
                shared += 1
            prompt, answers = answers[0][:shared], [x[shared:] for x in answers]
        if answers[0] == answers[1]:
            raise DataError("'chosen' and 'rejected' are the same, so there is nothing to prefer")
        more = {"prompt": prompt, "tools": record.get("tools")}
        return [
            answer({**more, "completion": x}, key, tokenizer, template)
            for key, x in zip(_PAIR[:2], answers, strict=True)
        ]


_PAIR = ("chosen", "rejected", "prompt")


def check_fields(record: Mapping[str, Any], needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Check that a line has the fields that it needs.

    Args:
      record: the line.
      needed: fields that must be there.
      known: fields that can be there, for suggestions.

    Raises:
      DataError: a field is missing.
    """
    missing = [key for key in needed if key not in record]
    if missing:
        unknown = next((key for key in record if key not in known), "")
        raise DataError(f"it has no '{missing[0]}'; give {', '.join(needed)}{near(unknown, known) if unknown else ''}")


def answer(record: Mapping[str, Any], key: str, tokenizer: Any, template: Callable[[], ChatTemplate]) -> Learned:
    """Return a prompt with an answer: token ids, and a mask of the answer's.

    Args:
      record: "prompt" and "completion", two texts or two lists of messages.
      key: name of the answer in the line, for errors.
      tokenizer: turns texts into token ids.
      template: returns the chat template.

    Raises:
      DataError: the answer is empty, or is not of the prompt's kind.
    """
    prompt, completion = record["prompt"], record["completion"]
    if not completion:
        raise DataError(f"'{key}' is empty, so there is nothing to learn from")
    if isinstance(prompt, list) != isinstance(completion, list) or not isinstance(completion, list | str):
        raise DataError(f"'prompt' and '{key}' must be two texts, or two lists of messages")
    if isinstance(prompt, list) and not prompt:
        raise DataError("the prompt has no message")
    ids, learned = tokenized(record, tokenizer, template, "all")
    if not learned[1:].any():
        raise DataError(f"'{key}' has no message of the assistant, so there is nothing to learn from")
    return ids, learned
