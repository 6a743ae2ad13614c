"""Packs documents into rows of equal length: `stream` cuts them anywhere, `fit` keeps them whole.

Rows depend on the documents' lengths alone and not on a seed, so row i is the same for every process.
Rows consist of *pieces* (consecutive targets of one document in a row) and are gathered without a loop over rows.

In a document's segment each of its tokens, its eos included, is a target once. The input at each position is the token
before, and for the first token an eos:

    tokens   eos a b c eos d e
    targets  a   b c eos d e eos
    segment  1   1 1 1   2 2 2
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64, Integer

from jaxscale.data.batch import Batch, Source, empty_batch
from jaxscale.data.checked import Checked
from jaxscale.data.joined import Joined
from jaxscale.errors import DataError, near


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one split: document i is `tokens[starts[i] : starts[i] + lengths[i]]`.

    Args:
      name: name of the corpus.
      fingerprint: digest of the documents, in hexadecimal.
      vocab_size: number of token ids.
      eos_id: the token that ends a document and, as an input, opens one.
      tokens: token ids of all documents, usually memory-mapped.
      starts: index of each document's first target.
      lengths: number of each document's targets, its eos included, so at least 1.
      learned: 0 or 1 for each of `tokens`, whether it is learned; `None` means that all are.
      opened: whether documents open with a token of their own, the one before `starts`, instead of an eos.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int
    tokens: Integer[np.ndarray, " t"] | Checked | Joined
    starts: Int64[np.ndarray, " n"]
    lengths: Int64[np.ndarray, " n"]
    learned: Integer[np.ndarray, " t"] | Checked | None = None
    opened: bool = False


def pack(documents: Documents, packing: str, seq_len: int) -> Source:
    """Return the rows of documents.

    Args:
      documents: the documents.
      packing: a key of `PACKINGS`.
      seq_len: tokens of a row.

    Raises:
      DataError: the packing does not exist, or the documents are too short for a row.
    """
    if packing not in PACKINGS:
        raise DataError(f"packing '{packing}' does not exist{near(packing, PACKINGS)}")
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} is too small; use 1 or more.")
    source = PACKINGS[packing](documents, seq_len)
    if not len(source):
        total = int(documents.lengths.sum())
        raise DataError(
            f"'{documents.name}' has {total} token(s) in this split, too few for a row of seq_len={seq_len}; use a "
            f"seq_len of at most {total}, or more text."
        )
    return source


class _Packed:
    """Base of the packings."""

    packing: str
    grouping = "documents"

    def __init__(self, documents: Documents, seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        self.name, self.vocab_size = documents.name, documents.vocab_size
        # The 2 is the version of the format: an eos opens a segment.
        described = f"{documents.fingerprint} {self.packing} {seq_len} 2"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    def _pairs(
        self, index: Int64[np.ndarray, " n"], opening: Int64[np.ndarray, " k"]
    ) -> tuple[Integer[np.ndarray, " n"], Integer[np.ndarray, " n"]]:
        """Return inputs and targets.

        Args:
          index: indices of the targets in `documents.tokens`.
          opening: positions in `index` of targets that begin a document.
        """
        documents = self.documents
        tokens = documents.tokens[index - 1]  # replaced below where the token before is not the document's
        if not documents.opened:
            tokens[opening] = documents.eos_id
        return tokens, documents.tokens[index]

    def _weights(self, index: Int64[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
        """Return the weights of the targets at `index`."""
        learned = self.documents.learned
        return np.ones(len(index), np.float32) if learned is None else learned[index].astype(np.float32)


class Stream(_Packed):
    """Rows are consecutive windows of `seq_len` targets in the concatenation of all documents.

    Every token is a target once, except in the last partial window, which is dropped. A document's eos is the target of
    its last token, and then the input that opens the next segment.

    Args:
      documents: the documents.
      seq_len: tokens of a row.
    """

    packing = "stream"

    def __init__(self, documents: Documents, seq_len: int):
        super().__init__(documents, seq_len)
        # In the concatenation, document i covers bounds[i] .. bounds[i + 1].
        self._bounds = np.concatenate([[0], np.cumsum(documents.lengths)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._bounds[-1]) // self.seq_len

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        shape = (-1, self.seq_len)
        _, nth, document, low, length = self._pieces(ids)
        piece, position = _spread(length)  # one entry per target, row by row
        skipped = low - self._bounds[document]  # tokens of the document before the piece
        index = (self.documents.starts[document] + skipped)[piece] + position
        tokens, targets = self._pairs(index, (np.cumsum(length) - length)[skipped == 0])
        return {
            "tokens": tokens.astype(np.int32).reshape(shape),
            "targets": targets.astype(np.int32).reshape(shape),
            "weights": self._weights(index).reshape(shape),
            "segment_ids": (nth + 1).astype(np.int32)[piece].reshape(shape),
            "positions": position.astype(np.int32).reshape(shape),
        }

    def pairs(self, ids: Int64[np.ndarray, " b"]) -> Int64[np.ndarray, " b"]:
        """See `jaxscale.data.even_rows.CountsPairs`."""
        row, _, _, _, length = self._pieces(ids)
        return _pairs(row, length, len(ids))

    def _pieces(self, ids: Int64[np.ndarray, " b"]) -> tuple[Int64[np.ndarray, " p"], ...]:
        """Return for each piece: its row in `ids`, number within the row, document, first target, and length."""
        bounds = self._bounds
        begin = np.asarray(ids, np.int64) * self.seq_len
        end = begin + self.seq_len
        first = np.searchsorted(bounds, begin, side="right") - 1
        row, nth = _spread(np.searchsorted(bounds, end, side="left") - first)
        document = first[row] + nth
        low = np.maximum(bounds[document], begin[row])
        return row, nth, document, low, np.minimum(bounds[document + 1], end[row]) - low


class Fit(_Packed):
    """Rows are several whole documents, by best fit, and padding with weight 0.

    A document of n tokens takes n positions: its eos opens it as an input and ends it as a target. A document longer
    than a row is cut into rows that share one token (the first row's last target is the second's first input), so every
    token is a target exactly once; its remainder is packed like a document. (Best-fit packing: Ding et al. 2024, "Fewer
    truncations improve language modeling", arXiv:2404.10830.)

    Args:
      documents: the documents.
      seq_len: tokens of a row.
    """

    packing = "fit"

    def __init__(self, documents: Documents, seq_len: int):
        super().__init__(documents, seq_len)
        document, nth = _spread(-(-documents.lengths // seq_len))
        length = np.minimum(documents.lengths[document] - nth * seq_len, seq_len)
        row, order = best_fit(length, seq_len)
        self._start = (documents.starts[document] + nth * seq_len)[order]  # one entry per piece, row by row
        self._length = length[order]
        self._opens = (nth == 0)[order]
        count = int(row.max()) + 1 if len(row) else 0
        self._first = np.searchsorted(row[order], np.arange(count + 1))  # row i has pieces first[i] .. first[i + 1]

    def __len__(self) -> int:
        return len(self._first) - 1

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        row, nth, piece = self._pieces(ids)
        length = self._length[piece]
        before = np.cumsum(length) - length  # targets before each piece, over all rows
        column = before - before[nth == 0][row]  # those before it in its row
        owner, position = _spread(length)  # one entry per target
        index = self._start[piece][owner] + position
        tokens, targets = self._pairs(index, before[self._opens[piece]])
        place = (row * self.seq_len + column)[owner] + position

        batch = empty_batch(len(ids), self.seq_len)
        batch["tokens"].reshape(-1)[place] = tokens
        batch["targets"].reshape(-1)[place] = targets
        batch["weights"].reshape(-1)[place] = self._weights(index)
        batch["segment_ids"].reshape(-1)[place] = (nth + 1)[owner]
        batch["positions"].reshape(-1)[place] = position
        return batch

    def pairs(self, ids: Int64[np.ndarray, " b"]) -> Int64[np.ndarray, " b"]:
        """See `jaxscale.data.even_rows.CountsPairs`."""
        row, _, piece = self._pieces(ids)
        return _pairs(row, self._length[piece], len(ids))

    def _pieces(self, ids: Int64[np.ndarray, " b"]) -> tuple[Int64[np.ndarray, " p"], ...]:
        """Return for each piece: its row in `ids`, number within the row, and number among all pieces."""
        first = self._first[ids]
        row, nth = _spread(self._first[np.asarray(ids) + 1] - first)
        return row, nth, first[row] + nth


def _pairs(row: Int64[np.ndarray, " p"], length: Int64[np.ndarray, " p"], rows: int) -> Int64[np.ndarray, " b"]:
    """Return the pairs of queries and keys in the pieces of each row."""
    total = np.zeros(rows, np.int64)
    np.add.at(total, row, length * (length + 1) // 2)
    return total


PACKINGS: dict[str, Callable[[Documents, int], Source]] = {"stream": Stream, "fit": Fit}


def best_fit(
    lengths: Int64[np.ndarray, " p"], capacity: int
) -> tuple[Int64[np.ndarray, " p"], Int64[np.ndarray, " p"]]:
    """Assign pieces to rows by best-fit decreasing.

    Each piece, longest first, goes into the row with the least free space that is enough. Pieces of equal length go
    into rows of equal free space, so that whole groups are assigned at once, and the time grows with the number of
    distinct lengths and not of pieces.

    Args:
      lengths: lengths of the pieces, 1 .. capacity.
      capacity: length of a row.

    Returns:
      The row of each piece, and the order of the pieces by row (longest first within a row).
    """
    row = np.zeros(len(lengths), np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    open_rows: dict[int, list[np.ndarray]] = defaultdict(list)  # free space -> groups of rows
    is_open = np.zeros(capacity + 1, bool)
    opened, done = 0, 0

    def put_back(rows: np.ndarray, free: int) -> None:
        if len(rows) and free:
            open_rows[free].append(rows)
            is_open[free] = True

    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces = longest_first[done : done + count]
        done += count
        while len(pieces):
            free = length + int(is_open[length:].argmax())
            if is_open[free]:
                rows = open_rows[free].pop()
                is_open[free] = bool(open_rows[free])
            else:
                free = capacity
                rows = np.arange(opened, opened - (-len(pieces) // (capacity // length)))
                opened += len(rows)
            # Best fit fills one row before the next: with one piece in it, it has less free space than the others.
            each = free // length
            assigned = min(len(pieces), each * len(rows))
            full, rest = divmod(assigned, each)
            row[pieces[:assigned]] = np.repeat(rows, each)[:assigned]
            put_back(rows[:full], free - each * length)
            put_back(rows[full : full + 1], free - rest * length)
            put_back(rows[full + 1 :], free)
            pieces = pieces[assigned:]
    return row, longest_first[np.argsort(row[longest_first], kind="stable")]


def _spread(counts: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Return, for n owners with `counts` items each, the owner of every item, and the item's index within its owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
