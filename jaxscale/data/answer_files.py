"""Base of corpora of JSON lines whose rows are one document each: a prompt with an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jaxscale.data.batch import Source
from jaxscale.data.conversations import ConversationFiles
from jaxscale.data.one_document_rows import OneDocumentRows, check_too_long
from jaxscale.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFiles(ConversationFiles):
    """Base of corpora of prompts with answers.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
      template: a folder or file with the chat template; by default the tokenizer's folder.
      too_long: what becomes of documents longer than a row: "error", "cut" (the end is cut off) or "drop".
      heldout: fraction of lines held out.

    Raises:
      DataError: `too_long` does not exist.
    """

    glob: str
    template: str | None = None
    too_long: str = "error"
    heldout: float = 0.05
    group: ClassVar[int] = 1
    """Number of documents of a line."""
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
        return self.rows_of_documents(tokenizer, seq_len, split, cache)

    def rows_of_documents(
        self, tokenizer: Tokenizer | None, seq_len: int, split: str, cache: str | Path | None
    ) -> OneDocumentRows:
        """Return rows of one document each.

        Args:
          tokenizer: turns texts into token ids.
          seq_len: tokens of a row.
          split: "train" or "heldout".
          cache: folder in which token files are stored; `None` is the default.

        Raises:
          DataError: the files cannot be read, or a document is too long.
        """
        documents = self.prepared(tokenizer, cache).documents(split, self.heldout, self.name, group=self.group)
        setting = f"{self.name}.too_long"
        return OneDocumentRows(documents, seq_len, group=self.group, too_long=self.too_long, setting=setting)
