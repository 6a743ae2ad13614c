"""Mixtures of corpora by weights that may change, with random access: a row's origin is computed from its number."""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from jaxscale.config import register
from jaxscale.data.batch import Batch, Corpus, Source
from jaxscale.data.order import Order, derive, group_starts, order_of
from jaxscale.data.periods import BLOCK, Periods
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

MOST = 1e100
"""The largest weight."""


@register(name="mixture")
@dataclass(frozen=True)
class Mixture:
    """Rows of several corpora in proportion to their weights, which may change during training.

    When a part is exhausted it repeats in a new order, independently of the other parts. When the weights change, each
    part goes on with its next row.

        mixture(((web, 0.9), (code, 0.1)), schedule=((10_000, (0.5, 0.5)),))

    The schedule counts steps from 0, as `batch_at` does, and not rows, as all settings of training do, and stays right
    when a run goes on with another batch size. The loader tells the source its batch size (see `OrdersBatches`);
    `batch_at(step)` is still a pure function. A mixture without a schedule does not depend on the batch size.

    Args:
      parts: (corpus, weight) pairs; weights are shares of rows from the first step on, and need not sum to 1. They are
        positive; with a schedule a part may begin with weight 0. A mixture may be a part if it has no schedule.
      schedule: (step, weights) pairs in ascending order: from that step on these are the weights, one for each part. A
        weight may be 0.

    Raises:
      DataError: there are no parts, one is not a pair, a weight is negative or always 0, or the schedule is not as
        above.
    """

    parts: tuple[tuple[Corpus, float], ...]
    schedule: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            raise DataError("mixture has no parts; give at least one (corpus, weight) pair.")
        for part in self.parts:
            if not isinstance(part, Sequence) or len(part) != 2:
                raise DataError(f"mixture part {part!r} is not a (corpus, weight) pair; write ((corpus, 0.5), ...).")
            if not hasattr(part[0], "source"):
                raise DataError(
                    f"mixture part {part[0]!r} is not a corpus; give one such as text_files('*.txt'), with its weight."
                )
            if isinstance(part[0], Mixture) and part[0].schedule:
                raise DataError(
                    f"mixture part '{part[0].name}' has a schedule of its own, and steps of it are not steps of "
                    "training; name its corpora in the outer mixture, with one schedule for all."
                )
        _check_schedule(self.schedule, len(self.parts))
        for number, (corpus, weight) in enumerate(self.parts):
            later = [weights[number] for _, weights in self.schedule]
            for value in (weight, *later):
                if not _is_weight(value):
                    raise DataError(
                        f"mixture part '{corpus.name}' has weight {value!r}; use a number of at least 0 and at most "
                        f"{MOST:g}."
                    )
            if not any((weight, *later)):
                raise DataError(f"mixture part '{corpus.name}' has weight {weight}; use one above 0 or leave it out.")
        for step, weights in ((0, [weight for _, weight in self.parts]), *self.schedule):
            if not any(weights):
                raise DataError(
                    f"all weights of the mixture are 0 from step {step} on; give one part a weight above 0."
                )

    @property
    def name(self) -> str:
        """The names of the parts with their weights."""
        later = "".join(
            f"; from step {step}: {', '.join(f'{w:g}' for w in weights)}" for step, weights in self.schedule
        )
        return "mixture(" + ", ".join(f"{corpus.name}: {weight:g}" for corpus, weight in self.parts) + later + ")"

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
        return MixtureSource(sources, [weight for _, weight in self.parts], self.name, self.schedule)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the largest vocabulary of the parts, or `None` if all are unknown.

        Args:
          tokenizer: the tokenizer.
        """
        counts = [getattr(corpus, "token_ids", lambda _: None)(tokenizer) for corpus, _ in self.parts]
        return max((count for count in counts if count is not None), default=None)


class MixtureSource:
    """A source that interleaves the rows of several sources.

    Row numbers count the rows of the first part, then those of the second, and so on. `Periods` computes the part of a
    global row of training, and its index among the rows of its part; the part's own order then determines the row.
    `len` is the sum over parts, which is not exactly an epoch of any part.

    Args:
      sources: the parts.
      weights: their shares of rows.
      name: name of the mixture.
      schedule: later weights, see `Mixture`.

    Raises:
      DataError: a weight is so small that a block would have no row of its part.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        name: str,
        schedule: Sequence[tuple[int, Sequence[float]]] = (),
    ):
        self.sources, self.name = tuple(sources), name
        self.seq_len = sources[0].seq_len
        kinds = {getattr(source, "grouping", None) for source in sources}
        self.grouping = kinds.pop() if len(kinds) == 1 else "mixed rows"
        self.vocab_size = max(source.vocab_size for source in sources)
        self.counts = self._counts(weights)
        self._later = [(step, self._counts(later)) for step, later in schedule]
        self._periods: dict[int, Periods] = {}  # by rows, or groups of rows, of a step
        described = " ".join([source.fingerprint for source in sources] + [str(count) for count in self.counts])
        described += "".join(f" from {step}: {' '.join(map(str, counts))}" for step, counts in self._later)
        self.fingerprint = hashlib.sha256(f"mixture {described}".encode()).hexdigest()
        self._orders = {(part, 1): order_of(source) for part, source in enumerate(sources)}
        self._first = np.cumsum([0, *(len(source) for source in sources)])

    def _counts(self, weights: Sequence[float]) -> Int64[np.ndarray, " p"]:
        """Return the rows of each part in a block."""
        counts = largest_remainder(weights, BLOCK)
        for source, weight, count in zip(self.sources, weights, counts, strict=True):
            if weight and not count:
                raise DataError(
                    f"mixture part '{source.name}' has weight {weight}, less than one row in {BLOCK}; use at least "
                    f"{math.fsum(weights) / BLOCK:g} or leave it out."
                )
        return counts

    def __len__(self) -> int:
        return int(self._first[-1])

    def order(
        self, rows: Int64[np.ndarray, " b"], seed: int, group: int = 1, batch_size: int | None = None
    ) -> Int64[np.ndarray, " b"]:
        """Return row numbers of global rows, see `Ordered`; rows of a group stay together.

        Raises:
          DataError: the mixture has a schedule, and there is no batch size.
        """
        number, within = np.divmod(rows, group)
        parts, nth = self._placed(group, batch_size).place(number, seed)
        ids = np.empty_like(rows)
        for part in range(len(self.sources)):
            mine = parts == part
            own = self._orders[part, group]
            ids[mine] = self._first[part] + own(nth[mine] * group + within[mine], derive(seed, part + 1))
        return ids

    def in_groups(self, group: int, batch_size: int | None = None) -> Order:
        """Return `order` of groups; see `OrdersGroups`. Blocks then interleave groups instead of rows."""
        self._placed(group, batch_size)
        for part, source in enumerate(self.sources):
            self._orders[part, group] = order_of(source, group)  # raises if it cannot be grouped
        return functools.partial(self.order, group=group, batch_size=batch_size)

    def in_batches(self, batch_size: int, group: int) -> Order:
        """Return `order` of groups in batches; see `OrdersBatches`."""
        return self.in_groups(group, batch_size)

    def _placed(self, group: int, batch_size: int | None) -> Periods:
        if not self._later:
            batch_size = group
        if batch_size is None:
            raise DataError(
                f"'{self.name}' changes its weights at steps, so it needs a batch size; read it by a Loader, and not "
                "as a part of another mixture"
            )
        per_step = batch_size // group
        if per_step not in self._periods:
            first = [0, *(step * per_step for step, _ in self._later)]
            self._periods[per_step] = Periods(first, [self.counts, *(counts for _, counts in self._later)])
        return self._periods[per_step]

    def group_starts(self, group: int) -> Int64[np.ndarray, " g"]:
        """Return the first row number of every whole group of each part; see `OrdersGroups`."""
        return np.concatenate([f + group_starts(s, group) for f, s in zip(self._first, self.sources, strict=False)])

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        batch: Batch = {}
        for source, mine, own in self._by_part(ids):
            for key, rows in source.rows(own).items():
                batch.setdefault(key, np.zeros((len(ids), *rows.shape[1:]), rows.dtype))[mine] = rows
        return batch

    def pairs(self, ids: Int64[np.ndarray, " b"]) -> Int64[np.ndarray, " b"]:
        """See `jaxscale.data.even_rows.CountsPairs`, which all parts are."""
        pairs = np.zeros(len(ids), np.int64)
        for source, mine, own in self._by_part(ids):
            pairs[mine] = source.pairs(own)  # type: ignore[attr-defined]
        return pairs

    def _by_part(self, ids: Int64[np.ndarray, " b"]) -> Iterator[tuple[Source, np.ndarray, Int64[np.ndarray, " n"]]]:
        """Yield each part that has some of the rows: its source, which rows, and their numbers in the source."""
        ids = np.asarray(ids)
        parts = np.searchsorted(self._first, ids, side="right") - 1
        for part in np.unique(parts):
            mine = parts == part
            yield self.sources[part], mine, ids[mine] - self._first[part]


def _is_weight(value: object) -> bool:
    return isinstance(value, numbers.Real) and 0 <= float(value) <= MOST


def _check_schedule(schedule: object, parts: int) -> None:
    example = f"((10000, ({', '.join(['0.5'] * parts)}{',' * (parts == 1)})),)"
    if not isinstance(schedule, Sequence) or isinstance(schedule, str):
        raise DataError(f"mixture.schedule = {schedule!r} is not a tuple; write (step, weights) pairs: {example}")
    last = 0
    for entry in schedule:
        if not isinstance(entry, Sequence) or len(entry) != 2 or not isinstance(entry[1], Sequence | np.ndarray):
            raise DataError(f"mixture.schedule has {entry!r}, not a (step, weights) pair; write {example}")
        step, weights = entry
        if not isinstance(step, int | np.integer) or isinstance(step, bool) or not 1 <= step <= 2**40:
            raise DataError(
                f"mixture.schedule has the step {step!r}; use whole numbers from 1 to 2**40 (the weights from step 0 "
                "on are those in mixture.parts)"
            )
        if step <= last:
            raise DataError(f"mixture.schedule has step {step} after step {last}; put steps in ascending order")
        if len(weights) != parts:
            raise DataError(
                f"mixture.schedule has {len(weights)} weight(s) at step {step}, but the mixture has {parts} part(s); "
                f"write one weight for each: {example}"
            )
        last = int(step)


def largest_remainder(weights: Sequence[float], total: int) -> Int64[np.ndarray, " p"]:
    """Return integers in proportion to weights that sum to a total (Hamilton's method; ties go to the first).

    Args:
      weights: numbers of at least 0, not all 0.
      total: sum of the result.
    """
    exact = np.asarray(weights, np.float64) / math.fsum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    left = total - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:left]] += 1
    return counts
