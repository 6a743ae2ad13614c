"""Batches of packed rows, and the two interfaces that produce them.

A *corpus* is a set of named documents, a *source* is a corpus after tokenizing, splitting and packing, and a
`Loader` (loader.py) reads a source in a seeded order. Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

if TYPE_CHECKING:
    from jaxscale.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
"""Five arrays of shape (B, S):

`tokens`       int32    the model's input
`targets`      int32    the token to predict at each position
`weights`      float32  the loss weight of each target: 1, and 0 for padding and for tokens not to learn (prompts)
`segment_ids`  int32    1, 2, ... for each document within the row, 0 for padding
`positions`    int32    position within the segment, from 0 at the start of its piece in this row

In other documents than conversations, whose template adds its own tokens, the end-of-document token (eos) opens a
segment: it is the input at position 0, and the document's first token is its target. The eos that ends a document is
the target of the document's last token. Only if a document continues from another row is the token at position 0
another: the last target of that row.
"""

KEYS = ("tokens", "targets", "weights", "segment_ids", "positions")


class Source(Protocol):
    """Random access to the rows of one split of a corpus. `len` is the number of rows of one epoch."""

    name: str
    fingerprint: str  # hex; equal means equal rows under equal numbers
    seq_len: int
    vocab_size: int

    def __len__(self) -> int: ...

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; a pure function.

        Args:
          ids: row numbers from 0 to `len` - 1, (B,) int64.

        Returns:
          Arrays by name, (B, ...).
        """
        ...


@runtime_checkable
class Ordered(Protocol):
    """A source that decides the order of its rows (a mixture does); other sources are shuffled by epoch."""

    def order(self, rows: Int64[np.ndarray, " b"], seed: int) -> Int64[np.ndarray, " b"]:
        """Return the row numbers of the source that training reads as global rows; a pure function.

        Args:
          rows: numbers of rows in the endless order of training: 0, 1, ...
          seed: seed of the order.
        """
        ...


@runtime_checkable
class OrdersGroups(Ordered, Protocol):
    """An ordered source that can also order groups of consecutive rows."""

    def in_groups(self, group: int) -> Callable[[np.ndarray, int], np.ndarray]:
        """Return a function like `order` that keeps the rows of a group together.

        Args:
          group: number of rows in a group.
        """
        ...

    def group_starts(self, group: int) -> Int64[np.ndarray, " g"]:
        """Return the first row number of every whole group.

        Args:
          group: number of rows in a group.
        """
        ...


@runtime_checkable
class OrdersBatches(Ordered, Protocol):
    """An ordered source whose order may depend on the step that reads a row."""

    def in_batches(self, batch_size: int, group: int) -> Callable[[np.ndarray, int], np.ndarray]:
        """Return a function like `order`, for global rows of which step s reads those from s * batch_size on.

        Args:
          batch_size: number of rows of a step.
          group: number of consecutive rows that stay together; divides `batch_size`.
        """
        ...


class Corpus(Protocol):
    """A set of named documents, of which a tokenizer and a packing make a source."""

    @property
    def name(self) -> str:
        """Name of the corpus, for messages and caches."""
        ...

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return the rows of one split.

        A corpus may also have `token_ids(tokenizer) -> int | None`, which returns the `vocab_size` of its sources if it
        is known without opening them.

        Args:
          tokenizer: turns text into token ids; corpora that consist of token ids do not use it.
          seq_len: tokens of a row.
          split: "train" or "heldout".
          packing: how documents fill rows, a key of `PACKINGS`.
          cache: folder in which token files are stored; `None` is the default (see `cache_folder`).

        Raises:
          DataError: the corpus cannot be read, needs a tokenizer, or has no row in this split.
        """
        ...


def empty_batch(rows: int, seq_len: int) -> Batch:
    """Return a batch of padding: every array zero, of shape (rows, seq_len).

    Args:
      rows: number of rows.
      seq_len: tokens of a row.
    """
    return {key: np.zeros((rows, seq_len), np.float32 if key == "weights" else np.int32) for key in KEYS}
