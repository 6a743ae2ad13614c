"""Documents into rows of equal length: `stream` cuts, `fit` keeps documents whole.

Both depend on the documents' lengths alone (never on a seed), so row i is the same row for every reader.
Rows are described by *pieces* (a document's run of targets within a row) and gathered without a loop over rows.

A document's segment is its tokens as targets, each read after the one before it, and the first after an eos:
n places for n tokens, its own eos included.

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
from jaxscale.errors import DataError, near


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one split: document i is `tokens[starts[i] : starts[i] + lengths[i]]` and ends with eos.

    Of those that are `opened`, the token before says what opens them, and they end as they end; `learned` says which
    tokens count as targets, all by default.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int  # what ends a document and, as an input, opens one
    tokens: Integer[np.ndarray, " t"] | Checked  # usually memory-mapped
    starts: Int64[np.ndarray, " n"]
    lengths: Int64[np.ndarray, " n"]  # eos included, so at least 1
    learned: Integer[np.ndarray, " t"] | Checked | None = None  # 0 or 1 for each of `tokens`
    opened: bool = False


def pack(documents: Documents, packing: str, seq_len: int) -> Source:
    """The rows of `documents` under a packing by name; raises DataError when it is unknown or makes no row."""
    if packing not in PACKINGS:
        raise DataError(f"packing '{packing}' does not exist{near(packing, PACKINGS)}")
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} holds no token; use 1 or more.")
    source = PACKINGS[packing](documents, seq_len)
    if not len(source):
        total = int(documents.lengths.sum())
        raise DataError(
            f"'{documents.name}' has {total} token(s) in this split, which make no row of seq_len={seq_len}; use a "
            f"seq_len of at most {total} or more text."
        )
    return source


class _Packed:
    """What both packings share: the source's description, and reading pairs."""

    packing: str

    def __init__(self, documents: Documents, seq_len: int):
        self.documents, self.seq_len = documents, seq_len
        self.name, self.vocab_size = documents.name, documents.vocab_size
        # 2: an eos opens a segment.
        described = f"{documents.fingerprint} {self.packing} {seq_len} 2"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    def _pairs(
        self, at: Int64[np.ndarray, " n"], opening: Int64[np.ndarray, " k"]
    ) -> tuple[Integer[np.ndarray, " n"], Integer[np.ndarray, " n"]]:
        """The inputs and targets whose targets are at `at`; those numbered `opening` begin a document."""
        documents = self.documents
        tokens = documents.tokens[at - 1]  # before a document lies something else, or nothing (-1 wraps around)
        if not documents.opened:
            tokens[opening] = documents.eos_id
        return tokens, documents.tokens[at]

    def _weights(self, at: Int64[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
        """Of the targets at `at`."""
        learned = self.documents.learned
        return np.ones(len(at), np.float32) if learned is None else learned[at].astype(np.float32)


class Stream(_Packed):
    """Windows of seq_len targets over the documents laid end to end, each target read after the token before it.

    Every token is a target once, but for the last partial window. A document's eos is
    the target of its last token, and then the input that opens the next segment.
    """

    packing = "stream"

    def __init__(self, documents: Documents, seq_len: int):
        super().__init__(documents, seq_len)
        # In the stream, document i covers bounds[i] .. bounds[i + 1].
        self._bounds = np.concatenate([[0], np.cumsum(documents.lengths)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._bounds[-1]) // self.seq_len

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        bounds, shape = self._bounds, (-1, self.seq_len)
        begin = np.asarray(ids, np.int64) * self.seq_len
        end = begin + self.seq_len
        first = np.searchsorted(bounds, begin, side="right") - 1
        row, nth = _spread(np.searchsorted(bounds, end, side="left") - first)  # one entry a piece
        document = first[row] + nth
        low = np.maximum(bounds[document], begin[row])
        length = np.minimum(bounds[document + 1], end[row]) - low
        piece, position = _spread(length)  # one entry a pair, row after row
        into = low - bounds[document]  # tokens of the document before the piece
        at = (self.documents.starts[document] + into)[piece] + position
        tokens, targets = self._pairs(at, (np.cumsum(length) - length)[into == 0])
        return {
            "tokens": tokens.astype(np.int32).reshape(shape),
            "targets": targets.astype(np.int32).reshape(shape),
            "weights": self._weights(at).reshape(shape),
            "segment_ids": (nth + 1).astype(np.int32)[piece].reshape(shape),
            "positions": position.astype(np.int32).reshape(shape),
        }


class Fit(_Packed):
    """Several whole documents a row, by best fit; the rest of the row is padding with weight 0.

    A document of n tokens takes n places: its eos opens it as an input and ends it as a target. One longer
    than a row is cut into rows that share one token (the first row's last target is the second's first
    input), so every token is a target exactly once; its remainder is placed like any document. (Best-fit
    packing: Ding et al. 2024, "Fewer truncations improve language modeling", arXiv:2404.10830.)
    """

    packing = "fit"

    def __init__(self, documents: Documents, seq_len: int):
        super().__init__(documents, seq_len)
        document, nth = _spread(-(-documents.lengths // seq_len))
        length = np.minimum(documents.lengths[document] - nth * seq_len, seq_len)
        row, order = best_fit(length, seq_len)
        self._start = (documents.starts[document] + nth * seq_len)[order]  # pieces, row after row
        self._length = length[order]
        self._opens = (nth == 0)[order]
        count = int(row.max()) + 1 if len(row) else 0
        self._first = np.searchsorted(row[order], np.arange(count + 1))  # row i has pieces first[i] .. first[i + 1]

    def __len__(self) -> int:
        return len(self._first) - 1

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        first = self._first[ids]
        row, nth = _spread(self._first[np.asarray(ids) + 1] - first)  # one entry a piece
        piece = first[row] + nth
        length = self._length[piece]
        laid = np.cumsum(length) - length  # places before each piece, over all rows; less those before its row
        column = laid - laid[nth == 0][row]
        owner, position = _spread(length)  # one entry a pair
        at = self._start[piece][owner] + position
        tokens, targets = self._pairs(at, laid[self._opens[piece]])
        place = (row * self.seq_len + column)[owner] + position

        batch = empty_batch(len(first), self.seq_len)
        batch["tokens"].reshape(-1)[place] = tokens
        batch["targets"].reshape(-1)[place] = targets
        batch["weights"].reshape(-1)[place] = self._weights(at)
        batch["segment_ids"].reshape(-1)[place] = (nth + 1)[owner]
        batch["positions"].reshape(-1)[place] = position
        return batch


PACKINGS: dict[str, Callable[[Documents, int], Source]] = {"stream": Stream, "fit": Fit}


def best_fit(
    lengths: Int64[np.ndarray, " p"], capacity: int
) -> tuple[Int64[np.ndarray, " p"], Int64[np.ndarray, " p"]]:
    """Best-fit decreasing: each piece, longest first, into the open row with the least room that holds it.

    Equal pieces meet rows of equal room, so whole groups move at once and the work grows with the number of
    distinct lengths, not of pieces.

    Args:
      lengths: of the pieces, 1 .. capacity.

    Returns:
      the row of each piece, and the pieces' order by row (longest first within one).
    """
    row = np.zeros(len(lengths), np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    rooms: dict[int, list[np.ndarray]] = defaultdict(list)  # room left -> groups of rows
    is_open = np.zeros(capacity + 1, bool)
    opened, done = 0, 0

    def put_back(rows: np.ndarray, room: int) -> None:
        if len(rows) and room:
            rooms[room].append(rows)
            is_open[room] = True

    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces = longest_first[done : done + count]
        done += count
        while len(pieces):
            room = length + int(is_open[length:].argmax())
            if is_open[room]:
                rows = rooms[room].pop()
                is_open[room] = bool(rooms[room])
            else:
                room = capacity
                rows = np.arange(opened, opened - (-len(pieces) // (capacity // length)))
                opened += len(rows)
            # Best fit fills a row while it can: with one piece in, its room is less than that of the others.
            each = room // length
            taken = min(len(pieces), each * len(rows))
            full, rest = divmod(taken, each)
            row[pieces[:taken]] = np.repeat(rows, each)[:taken]
            put_back(rows[:full], room - each * length)
            put_back(rows[full : full + 1], room - rest * length)
            put_back(rows[full + 1 :], room)
            pieces = pieces[taken:]
    return row, longest_first[np.argsort(row[longest_first], kind="stable")]


def _spread(counts: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """For n owners with `counts` items each: the owner of every item, and the item's number within its owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
