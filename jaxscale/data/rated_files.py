"""A corpus of answers that are rated good or bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from jaxscale.config import register
from jaxscale.data.answer_files import AnswerFiles
from jaxscale.data.batch import Batch, Source, empty_batch
from jaxscale.data.chat import ChatTemplate
from jaxscale.data.conversations import Learned
from jaxscale.data.one_document_rows import OneDocumentRows
from jaxscale.data.preference_files import answer, check_fields
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError


@register(name="rated_files")
@dataclass(frozen=True)
class RatedFiles(AnswerFiles):
    """Answers that are rated good or bad in JSON-lines files, plain or compressed by gzip or Zstandard.

    Each line is an answer, a text or messages, with its rating:

        {"prompt": "2 + 2 = ", "completion": "4", "label": true}

    A line gives two rows of one document each: the prompt with its answer, and the prompt with the answer of the next
    line of the split, from which `@KTO()` estimates its baseline. Rows also have `desirable`, 1 or 0.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
      template: a folder or file with the chat template; by default the tokenizer's folder.
      too_long: what becomes of answers longer than a row: "error", "cut" (the end is cut off) or "drop". Prompts with
        another line's answer are cut off.
      heldout: fraction of lines held out.

    Raises:
      DataError: `too_long` does not exist.
    """

    name: ClassVar[str] = "rated_files"

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return the rows of one split; `packing` has no effect."""
        return _Rated(self.rows_of_documents(tokenizer, seq_len, split, cache))

    def of_line(self, record: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate]) -> list[Learned]:
        """Return the answer of a line; the mask of its first token, which is never a target, is its rating."""
        check_fields(record, _FIELDS, (*_FIELDS, "tools"))
        label = record["label"]
        if not isinstance(label, bool) and label not in (0, 1):
            raise DataError(f"'label' is {label!r}; give true or false")
        ids, learned = answer(record, "completion", tokenizer, template)
        learned = learned.copy()
        learned[0] = bool(label)
        return [(ids, learned)]


class _Rated:
    """A source whose rows 2i and 2i + 1 are document i, and its prompt with the answer of document i + 1."""

    grouping = "rated answers"

    def __init__(self, answers: OneDocumentRows):
        self._answers = answers
        self.name, self.vocab_size, self.seq_len = answers.name, answers.vocab_size, answers.seq_len
        self.fingerprint = answers.fingerprint

    def __len__(self) -> int:
        return 2 * len(self._answers)

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        batch = empty_batch(len(ids), self.seq_len)
        batch["desirable"] = np.zeros(len(ids), np.float32)
        for row, number in enumerate(np.asarray(ids)):
            own, learned = self._document(int(number) // 2)
            batch["desirable"][row] = learned[0]
            if number % 2:
                other, of_other = self._document((int(number) // 2 + 1) % len(self._answers))
                cut, begin = (1 + int(np.argmax(x[1:] > 0)) for x in (learned, of_other))
                own = np.concatenate([own[:cut], other[begin:]])
                learned = np.concatenate([learned[:cut], of_other[begin:]])
            self._answers.write(batch, row, own, learned)
        return batch

    def _document(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        return self._answers.document(int(self._answers.numbers[place]))


_FIELDS = ("prompt", "completion", "label")
