"""Rows of one document each, as objectives that compare whole answers need them."""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Int64

from jaxscale.data.batch import Batch, empty_batch
from jaxscale.data.packing import Documents
from jaxscale.errors import DataError, near

TOO_LONG = ("error", "cut", "drop")
"""What becomes of documents longer than a row."""


class OneDocumentRows:
    """A source whose row i is document i, and padding.

    Args:
      documents: the documents.
      seq_len: tokens of a row.
      group: number of consecutive documents that belong together.
      too_long: "error", "cut" (the end is cut off) or "drop" (the whole group is left out).
      setting: name of the setting `too_long`, for errors.
      apart: number of tokens at the end of each document that are no part of its row.

    Raises:
      DataError: a document is too long, or all are left out.
    """

    def __init__(self, documents: Documents, seq_len: int, *, group: int, too_long: str, setting: str, apart: int = 0):
        self.documents, self.seq_len = documents, seq_len
        self.grouping = "pairs" if group == 2 else "documents"
        self.name, self.vocab_size = documents.name, documents.vocab_size
        described = f"{documents.fingerprint} one document {seq_len} {group} {too_long}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()
        self._apart, lengths = apart, documents.lengths - apart
        long = lengths > seq_len
        self.numbers = np.arange(len(long))
        if not long.any():
            return
        if too_long == "error":
            longest = int(lengths.max())
            raise DataError(
                f"{int(long.sum())} of {len(long)} documents of '{self.name}' are longer than train.seq_len = "
                f"{seq_len} (the longest has {longest} tokens); set train.seq_len = {longest}, or {setting} = 'cut' or "
                "'drop'"
            )
        if too_long == "cut":
            assert documents.learned is not None
            first = documents.starts[long]
            lost = sum(not documents.learned[np.arange(at, at + seq_len)].any() for at in first)
            if lost:
                raise DataError(
                    f"{lost} documents of '{self.name}' have prompts that fill train.seq_len = {seq_len} tokens, so "
                    f"nothing to learn is left; use a larger one, or {setting} = 'drop'"
                )
        if too_long == "drop":
            whole = ~long.reshape(-1, group).any(1)
            self.numbers = np.flatnonzero(np.repeat(whole, group))
            if not len(self.numbers):
                raise DataError(
                    f"all documents of '{self.name}' are longer than train.seq_len = {seq_len}; use a larger one"
                )

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        batch = empty_batch(len(ids), self.seq_len)
        for row, number in enumerate(self.numbers[ids]):
            self.write(batch, row, *self.document(int(number)))
        return batch

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a document's token ids, with the token that opens it, and which of them are learned.

        Args:
          number: of the document.
        """
        documents = self.documents
        start = int(documents.starts[number]) - 1
        at = np.arange(start, start + int(documents.lengths[number]) - self._apart + 1)
        assert documents.learned is not None and documents.opened, "these documents have masks"
        return documents.tokens[at], documents.learned[at]

    def write(self, batch: Batch, row: int, ids: np.ndarray, learned: np.ndarray) -> None:
        """Write a document into a row.

        Args:
          batch: arrays by name, zeros in this row.
          row: the row.
          ids: token ids, the first of which is an input alone; a longer document is cut off.
          learned: which of them are learned.
        """
        n = min(len(ids) - 1, self.seq_len)
        batch["tokens"][row, :n], batch["targets"][row, :n] = ids[:n], ids[1 : n + 1]
        batch["weights"][row, :n] = learned[1 : n + 1]
        batch["segment_ids"][row, :n], batch["positions"][row, :n] = 1, np.arange(n)


def check_too_long(corpus: str, value: str) -> None:
    """Check the setting `too_long`.

    Args:
      corpus: name of the corpus.
      value: the setting.

    Raises:
      DataError: it does not exist.
    """
    if value not in TOO_LONG:
        raise DataError(f"{corpus}.too_long = {value!r} does not exist{near(str(value), TOO_LONG)}")
