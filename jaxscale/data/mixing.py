"""Mixtures of corpora in fixed proportions, with random access: a row's origin is computed from its number."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from jaxscale.config import register
from jaxscale.data.batch import Batch, Corpus, Source
from jaxscale.data.order import Order, derive, group_starts, order_of, permutation
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

BLOCK = 1000
"""Rows of a block, in which proportions are exact; their resolution is 1 / BLOCK (0.1%)."""


@register(name="mixture")
@dataclass(frozen=True)
class Mixture:
    """Rows of several corpora in proportion to their weights.

    When a part is exhausted it repeats in a new order, independently of the other parts.

    Args:
      parts: (corpus, weight) pairs; weights are shares of rows, positive, and need not sum to 1. A mixture may be a
        part.

    Raises:
      DataError: there are no parts, one is not a pair, or a weight is not above 0.
    """

    parts: tuple[tuple[Corpus, float], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise DataError("mixture has no parts; give at least one (corpus, weight) pair.")
        for part in self.parts:
            if not isinstance(part, Sequence) or len(part) != 2:
                raise DataError(f"mixture part {part!r} is not a (corpus, weight) pair; write ((corpus, 0.5), ...).")
            if not (math.isfinite(part[1]) and part[1] > 0):
                raise DataError(f"mixture part '{part[0].name}' has weight {part[1]}; use one above 0 or leave it out.")

    @property
    def name(self) -> str:
        """The names of the parts with their weights."""
        return "mixture(" + ", ".join(f"{corpus.name}: {weight:g}" for corpus, weight in self.parts) + ")"

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return a mixture of the parts' sources, which all have the same tokenizer, row length and packing."""
        sources = [
            corpus.source(tokenizer, seq_len=seq_len, split=split, packing=packing, cache=cache)
            for corpus, _ in self.parts
        ]
        return MixtureSource(sources, [weight for _, weight in self.parts], self.name)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the largest vocabulary of the parts, or `None` if all are unknown.

        Args:
          tokenizer: the tokenizer.
        """
        counts = [getattr(corpus, "token_ids", lambda _: None)(tokenizer) for corpus, _ in self.parts]
        return max((count for count in counts if count is not None), default=None)


class MixtureSource:
    """A source that interleaves the rows of several sources.

    Row numbers count the rows of the first part, then those of the second, and so on. Global row g of training is in
    block g // BLOCK. Every block has the same number of rows of each part, in an order that depends on (seed, block).
    So the index of g among the rows of its part does not depend on other blocks, and the part's own order determines
    the row. `len` is the sum over parts, which is not exactly an epoch of any part.

    Args:
      sources: the parts.
      weights: their shares of rows, positive.
      name: name of the mixture.

    Raises:
      DataError: a weight is so small that a block would have no row of its part.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], name: str):
        self.sources, self.name = tuple(sources), name
        self.seq_len = sources[0].seq_len
        self.vocab_size = max(source.vocab_size for source in sources)
        self.counts = largest_remainder(weights, BLOCK)
        for source, weight, count in zip(sources, weights, self.counts, strict=True):
            if not count:
                raise DataError(
                    f"mixture part '{source.name}' has weight {weight}, less than one row in {BLOCK}; use at least "
                    f"{math.fsum(weights) / BLOCK:g} or leave it out."
                )
        described = " ".join([source.fingerprint for source in sources] + [str(count) for count in self.counts])
        self.fingerprint = hashlib.sha256(f"mixture {described}".encode()).hexdigest()
        self._orders = {(part, 1): order_of(source) for part, source in enumerate(sources)}
        self._first = np.cumsum([0, *(len(source) for source in sources)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def order(self, rows: Int64[np.ndarray, " b"], seed: int, group: int = 1) -> Int64[np.ndarray, " b"]:
        """Return row numbers of global rows, see `Ordered`; rows of a group stay together."""
        number, within = np.divmod(rows, group)
        parts, nth = self._place(number, seed)
        ids = np.empty_like(rows)
        for part in range(len(self.sources)):
            mine = parts == part
            own = self._orders[part, group]
            ids[mine] = self._first[part] + own(nth[mine] * group + within[mine], derive(seed, part + 1))
        return ids

    def in_groups(self, group: int) -> Order:
        """Return `order` of groups; see `OrdersGroups`. Blocks then interleave groups instead of rows."""
        for part, source in enumerate(self.sources):
            self._orders[part, group] = order_of(source, group)  # raises if it cannot be grouped
        return functools.partial(self.order, group=group)

    def group_starts(self, group: int) -> Int64[np.ndarray, " g"]:
        """Return the first row number of every whole group of each part; see `OrdersGroups`."""
        return np.concatenate([f + group_starts(s, group) for f, s in zip(self._first, self.sources, strict=False)])

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        ids = np.asarray(ids)
        parts = np.searchsorted(self._first, ids, side="right") - 1
        batch: Batch = {}
        for part in np.unique(parts):
            mine = parts == part
            for key, rows in self.sources[part].rows(ids[mine] - self._first[part]).items():
                batch.setdefault(key, np.zeros((len(ids), *rows.shape[1:]), rows.dtype))[mine] = rows
        return batch

    def _place(self, rows: Int64[np.ndarray, " b"], seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each global row, and how many rows of that part come before it."""
        labels = np.repeat(np.arange(len(self.counts)), self.counts)
        before = np.cumsum(self.counts) - self.counts
        parts, nth = np.empty_like(rows), np.empty_like(rows)
        blocks, within = np.divmod(rows, BLOCK)
        own = derive(seed, 0)
        for block in np.unique(blocks):
            here = blocks == block
            drawn = labels[permutation(BLOCK, own, int(block))]
            by_part = np.argsort(drawn, kind="stable")
            rank = np.empty_like(drawn)  # how many rows of the same part come earlier in the block
            rank[by_part] = np.arange(BLOCK) - before[labels]
            parts[here] = drawn[within[here]]
            nth[here] = block * self.counts[parts[here]] + rank[within[here]]
        return parts, nth


def largest_remainder(weights: Sequence[float], total: int) -> Int64[np.ndarray, " p"]:
    """Return integers in proportion to weights that sum to a total (Hamilton's method; ties go to the first).

    Args:
      weights: positive numbers.
      total: sum of the result.
    """
    exact = np.asarray(weights, np.float64) / math.fsum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    left = total - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:left]] += 1
    return counts
