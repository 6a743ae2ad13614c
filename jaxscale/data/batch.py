"""What flows from data to training: batches of packed rows, and the two interfaces that produce them.

A *corpus* names documents, a *source* is a corpus after tokenizing, splitting and packing, and a
`Loader` (loader.py) is a source in a seeded order. Shape letters: B batch, S sequence.
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

`tokens`       int32    what the model reads
`targets`      int32    what it should predict at the same place
`weights`      float32  the loss weight of each target: 1, and 0 for padding and for what is not learned (prompts)
`segment_ids`  int32    1, 2, ... for each document within the row, 0 for padding
`positions`    int32    place within the segment, from 0 at the start of its piece in this row

Conversations open and end as their template says. Of other documents,
the end-of-document token (eos) opens a segment: it is the input at position 0 and the document's first token is
its target. The eos that ends a document is the target of that document's last token. Only the rest of a document
that began in another row has another token at position 0: the last target of the row before.
"""

KEYS = ("tokens", "targets", "weights", "segment_ids", "positions")


class Source(Protocol):
    """Rows by number. `len` is the rows of one epoch; `rows` is random access and keeps no state."""

    name: str
    fingerprint: str  # hex; equal means equal rows under equal numbers
    seq_len: int
    vocab_size: int

    def __len__(self) -> int: ...

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch: ...


@runtime_checkable
class Ordered(Protocol):
    """What a source may add to decide its own order (a mixture does); the others are shuffled by epoch."""

    def order(self, rows: Int64[np.ndarray, " b"], seed: int) -> Int64[np.ndarray, " b"]:
        """The ids of the global rows `rows` (0, 1, ... without end), a pure function of them and `seed`."""
        ...


@runtime_checkable
class OrdersGroups(Ordered, Protocol):
    """One that also orders rows of which several, one after the other, belong together."""

    def in_groups(self, group: int) -> Callable[[np.ndarray, int], np.ndarray]:
        """As `order`, of whole groups."""
        ...

    def group_starts(self, group: int) -> Int64[np.ndarray, " g"]:
        """The first id of every whole group."""
        ...


class Corpus(Protocol):
    """Named documents, of which a tokenizer and a packing make a source."""

    @property
    def name(self) -> str: ...

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """The rows of one split ("train" or "heldout"); `cache` is where token files are kept.

        A corpus may also have `token_ids(tokenizer) -> int | None`: the `vocab_size` of its sources, if that is known
        without opening it.
        """
        ...


def empty_batch(rows: int, seq_len: int) -> Batch:
    """A batch of padding: every array zero, shape (rows, seq_len)."""
    return {key: np.zeros((rows, seq_len), np.float32 if key == "weights" else np.int32) for key in KEYS}
