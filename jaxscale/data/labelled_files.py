"""A corpus of texts with labels: classes, or numbers to predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Int64

from jaxscale.config import register
from jaxscale.data.batch import Batch, Source
from jaxscale.data.chat import ChatTemplate
from jaxscale.data.conversations import ConversationFiles, Learned
from jaxscale.data.one_document_rows import OneDocumentRows, check_too_long
from jaxscale.data.preference_files import answer, check_fields
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

BITS = 32
"""Tokens at the end of each document of the token file whose mask is the label's bits (float32)."""


@register(name="labelled_files")
@dataclass(frozen=True)
class LabelledFiles(ConversationFiles):
    """Texts with labels in JSON-lines files, plain or compressed by gzip or Zstandard.

    Each line is a text with its label, a class counted from 0 or any number:

        {"text": "A fine film.", "label": 1}

    A line gives a row of one document, with the array `label`, float32. For `@Classification()`.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
      too_long: what becomes of texts longer than a row: "error", "cut" (the end is cut off) or "drop".
      heldout: fraction of lines held out.

    Raises:
      DataError: `too_long` does not exist.
    """

    glob: str
    too_long: str = "error"
    heldout: float = 0.05
    name: ClassVar[str] = "labelled_files"
    template: ClassVar[None] = None  # type: ignore[misc]
    turns: ClassVar[str] = "all"  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_too_long(self.name, self.too_long)

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
        documents = self.prepared(tokenizer, cache).documents(split, self.heldout, self.name)
        setting = f"{self.name}.too_long"
        return Labelled(
            OneDocumentRows(documents, seq_len, group=1, too_long=self.too_long, setting=setting, apart=BITS)
        )

    def of_line(self, record: Mapping[str, Any], tokenizer: Any, template: Callable[[], ChatTemplate]) -> list[Learned]:
        """Return the text of a line, and after it `BITS` tokens whose mask is the label."""
        check_fields(record, ("text", "label"), ("text", "label"))
        text, label = record["text"], record["label"]
        if not isinstance(text, str):
            raise DataError(f"'text' is {text!r}; give a text")
        ids, learned = answer({"prompt": "", "completion": text}, "text", tokenizer, template)
        filled = np.full(BITS, tokenizer.eos_id, np.int32)
        return [(np.concatenate([ids, filled]), np.concatenate([learned, bits_of(label)]))]


class Labelled:
    """A source whose rows are texts with labels.

    Args:
      texts: the rows of the texts.
    """

    def __init__(self, texts: OneDocumentRows):
        self._texts = texts
        self.name, self.vocab_size, self.seq_len = texts.name, texts.vocab_size, texts.seq_len
        self.fingerprint = texts.fingerprint

    def __len__(self) -> int:
        return len(self._texts)

    @functools.cached_property
    def labels(self) -> Float32[np.ndarray, " n"]:
        """The label of each row, float32."""
        documents, numbers = self._texts.documents, self._texts.numbers
        assert documents.learned is not None, "these documents have masks"
        begin = documents.starts[numbers] + documents.lengths[numbers] - BITS
        at = begin[:, None] + np.arange(BITS)
        bits = np.asarray(documents.learned[at.reshape(-1)]).reshape(-1, BITS)
        return np.packbits(bits.astype(np.uint8), axis=1).view(np.float32)[:, 0]

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        return {**self._texts.rows(ids), "label": self.labels[ids]}


def bits_of(label: object) -> Bool[np.ndarray, " 32"]:
    """Return the bits of a label's float32.

    Args:
      label: a number.

    Raises:
      DataError: it is not a finite number.
    """
    if not isinstance(label, bool | int | float) or not abs(label) < float(np.finfo(np.float32).max):
        raise DataError(f"'label' is {label!r}; give a number, for classes 0, 1, 2 and so on")
    return np.unpackbits(np.array([label], np.float32).view(np.uint8)).astype(bool)
