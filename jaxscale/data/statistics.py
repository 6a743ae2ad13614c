"""Statistics of a prepared corpus: what it holds, and what rows of a length make of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from jaxscale.data.packing import PACKINGS, pack
from jaxscale.data.storage import TokenFile
from jaxscale.errors import DataError

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
FREQUENT = 20
COUNTED = 10**8
"""Tokens that are counted for the most frequent ones; of more, as many are taken from all over the corpus."""

_PART = 2**20


@dataclass(frozen=True)
class Rows:
    """What a packing makes of all documents.

    Args:
      rows: number of rows.
      padding: share of the rows' positions that are padding.
      dropped: number of tokens in no row.
    """

    rows: int
    padding: float
    dropped: int


@dataclass(frozen=True)
class Statistics:
    """Counts of a token file, over both splits; the tokens of a document include its end.

    Args:
      documents: number of documents.
      tokens: number of tokens.
      bytes: bytes of text in UTF-8, of the documents with any that were dropped; `None` if the file does not have it.
      duplicates: number of documents dropped because an earlier one has the same text; `None` if none was looked for.
      learned: share of tokens that are learned; 1 for plain text.
      quantiles: tokens of a document, by the share of documents that are not longer.
      histogram: (at least, below, number of documents) for lengths between powers of two.
      seq_len: tokens of a row.
      longer: share of documents longer than a row.
      longer_tokens: share of tokens in them.
      packings: rows by the name of the packing; a packing without a whole row is left out.
      frequent: the most frequent tokens and their shares.
    """

    documents: int
    tokens: int
    bytes: int | None
    duplicates: int | None
    learned: float
    quantiles: dict[float, int]
    histogram: list[tuple[int, int, int]]
    seq_len: int
    longer: float
    longer_tokens: float
    packings: dict[str, Rows]
    frequent: list[tuple[int, float]]

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text for each token; `None` if bytes are unknown, or some texts were dropped."""
        return None if self.bytes is None or self.duplicates else self.bytes / self.tokens


def statistics(file: TokenFile, seq_len: int) -> Statistics:
    """Return the statistics of a token file.

    Args:
      file: the token file.
      seq_len: tokens of a row.

    Raises:
      DataError: the file is damaged, or `seq_len` is below 1.
    """
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} is too small; use 1 or more.")
    lengths = np.diff(file.offsets)
    long = lengths > seq_len
    text = file.meta.get("text", {})
    return Statistics(
        documents=len(lengths),
        tokens=len(file.tokens),
        bytes=text.get("bytes"),
        duplicates=text.get("duplicates"),
        learned=1.0 if file.learned is None else float(np.mean(file.checked("learned.bin")[: len(file.tokens)])),
        quantiles={q: int(np.quantile(lengths, q, method="inverted_cdf")) for q in QUANTILES},
        histogram=_histogram(lengths),
        seq_len=seq_len,
        longer=float(long.mean()),
        longer_tokens=float(lengths[long].sum() / lengths.sum()),
        packings={name: rows for name in PACKINGS if (rows := _rows(file, name, seq_len)) is not None},
        frequent=_frequent(file),
    )


def _histogram(lengths: Int64[np.ndarray, " n"]) -> list[tuple[int, int, int]]:
    powers = np.floor(np.log2(lengths)).astype(np.int64)
    counts = np.bincount(powers)
    return [(2**p, 2 ** (p + 1), int(counts[p])) for p in range(int(powers.min()), len(counts))]


def _rows(file: TokenFile, packing: str, seq_len: int) -> Rows | None:
    documents = file.documents("train", 0.0)
    targets = int(documents.lengths.sum())
    try:
        rows = len(pack(documents, packing, seq_len))
    except DataError:  # too few tokens for a row
        return None
    filled = min(targets, rows * seq_len)
    return Rows(rows, 1 - filled / (rows * seq_len), targets - filled)


def _frequent(file: TokenFile) -> list[tuple[int, float]]:
    tokens, parts = file.checked("tokens.bin"), -(-len(file.tokens) // _PART)
    chosen = np.unique(np.linspace(0, parts - 1, min(parts, COUNTED // _PART)).astype(int))
    counts = np.zeros(file.vocab_size, np.int64)
    for part in chosen.tolist():
        counts += np.bincount(tokens[part * _PART : (part + 1) * _PART], minlength=file.vocab_size)
    most = np.argsort(-counts, kind="stable")[:FREQUENT]
    return [(int(id), float(counts[id] / counts.sum())) for id in most if counts[id]]
