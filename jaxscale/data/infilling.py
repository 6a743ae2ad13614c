"""Rows for autoregressive blank infilling: spans of a text are cut out, and written again after it."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jaxscale.config import register
from jaxscale.data.batch import Batch, Corpus, Ordered, Source
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

EXTRA = 4
"""Ids after those of the corpus: [MASK], [gMASK], [sop] (start of a span) and [eop] (its end)."""

_LEAST = 4  # tokens of a row's text


@register(name="infilled")
@dataclass(frozen=True)
class Infilled:
    """Another corpus with blanks, for `@BlankInfilling()` (GLM-130B, Zeng et al. 2022, arXiv:2210.02414, section 2.2).

    A row is the context, a text in which [MASK] stands for each span that was cut out, and after it each span, from
    [sop] on and with [eop] as its last target. In a share `short` of the rows the spans are short, of a random length
    with mean `mean` (Poisson) and in random order; in the others [gMASK] stands for the text from a random token on.

    A token's rotary position is its column; in a short span it is that of the span's [MASK]. A row's text is cut from
    the concatenation of documents, as by `packing = "stream"`, and counts as one document. The four ids follow those
    of the corpus, so that the model's vocabulary is 4 larger.

    Args:
      data: the corpus.
      short: share of the rows with short spans, 0.3 in GLM-130B.
      rate: share of a row's text that short spans cut out, below half of `mean`.
      mean: mean length of short spans.
      seed: of the spans; those of a row depend on it and the row's number alone.

    Raises:
      DataError: `data` is not a corpus, or a setting is out of its range.
    """

    data: Corpus
    short: float = 0.3
    rate: float = 0.15
    mean: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.data, type) or not hasattr(self.data, "source"):
            raise DataError(f"infilled.data must be a corpus such as python_stdlib(), not {self.data!r}")
        if not 0 <= self.short <= 1:
            raise DataError(f"infilled.short = {self.short!r}: must be at least 0 and at most 1")
        if not 0 < self.rate < 1:
            raise DataError(f"infilled.rate = {self.rate!r}: must be above 0 and below 1")
        if not self.mean >= 1:
            raise DataError(f"infilled.mean = {self.mean!r}: must be at least 1 token")
        if not self.rate < self.mean / 2:
            raise DataError(
                f"infilled.rate = {self.rate!r}: must be below half of infilled.mean = {self.mean!r}, since each span "
                "has two tokens of its own in a row"
            )

    @property
    def name(self) -> str:
        """Name of the corpus."""
        return f"{self.data.name}, infilled"

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

        Raises:
          DataError: another packing than "stream", rows that are too short, or a corpus that orders its rows itself.
        """
        if packing != "stream":
            raise DataError(
                f"infilled cuts its rows from the concatenation of documents; set train.packing = 'stream', not "
                f"'{packing}'"
            )
        spans = self._spans(seq_len)
        if seq_len - 2 * spans < _LEAST:
            enough = next(n for n in itertools.count(seq_len) if n - 2 * self._spans(n) >= _LEAST)
            raise DataError(f"infilled needs rows of more than {seq_len} tokens; set train.seq_len = {enough}")
        inner = self.data.source(tokenizer, seq_len=seq_len - 2 * spans, split=split, packing=packing, cache=cache)
        if isinstance(inner, Ordered):
            raise DataError(f"'{inner.name}' orders its rows itself; infill the corpora that it consists of")
        return InfilledRows(inner, self, seq_len, spans)

    def _spans(self, seq_len: int) -> int:
        return max(1, round(self.rate * seq_len / self.mean))

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the corpus's number of ids and 4 more, if it has a method `token_ids`.

        Args:
          tokenizer: the tokenizer.
        """
        inner = self.data.token_ids(tokenizer) if hasattr(self.data, "token_ids") else None
        return None if inner is None else inner + EXTRA


class Cut(NamedTuple):
    """Spans of a text, not overlapping: `text[starts[i] : starts[i] + lengths[i]]`, in the order of generation."""

    starts: Int64[np.ndarray, " k"]
    lengths: Int64[np.ndarray, " k"]
    long: bool


class InfilledRows:
    """The rows of a corpus with blanks.

    Args:
      inner: the texts, whose targets are the tokens of a row.
      settings: how blanks are chosen.
      seq_len: tokens of a row.
      spans: number of short spans of a row.
    """

    def __init__(self, inner: Source, settings: Infilled, seq_len: int, spans: int):
        self.inner, self.settings, self.seq_len, self.spans = inner, settings, seq_len, spans
        self.name, self.vocab_size = settings.name, inner.vocab_size + EXTRA
        s = settings
        facts = f"{inner.fingerprint} infilled {s.short} {s.rate} {s.mean} {s.seed} {seq_len} 1"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.inner)

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`. `mask_positions` is what the causal mask compares."""
        inner = self.inner.rows(ids)
        first = self.inner.vocab_size
        rows = [
            self.row(text, weights, self.cut(int(i), len(text)), first)
            for i, text, weights in zip(ids, inner["targets"], inner["weights"], strict=True)
        ]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def cut(self, row: int, length: int) -> Cut:
        """Return the spans of a row.

        Args:
          row: the row's number.
          length: tokens of its text.
        """
        draw = np.random.default_rng([self.settings.seed, row])
        if draw.random() >= self.settings.short:
            start = draw.integers(1, length)
            return Cut(np.array([start]), np.array([length - start]), True)
        lengths = np.maximum(1, draw.poisson(self.settings.mean, self.spans))
        while lengths.sum() + len(lengths) > length:  # a token stays between two spans
            lengths = np.maximum(1, lengths // 2) if lengths.max() > 1 else lengths[1:]
        free = length - lengths.sum() - len(lengths) + 1
        gaps = np.sort(draw.integers(0, free + 1, len(lengths)))
        starts = gaps + np.cumsum(lengths + 1) - lengths - 1
        order = draw.permutation(len(lengths))
        return Cut(starts[order], lengths[order], False)

    def row(self, text: Int32[np.ndarray, " n"], weights: np.ndarray, cut: Cut, first: int) -> Batch:
        """Return one row with the spans of a cut.

        Args:
          text: the tokens.
          weights: of each of them, where it is a target.
          cut: the spans.
          first: the id of [MASK].
        """
        mask, start, end = first + cut.long, first + 2, first + 3
        tokens, places, after = [], {}, 0
        for s, n in sorted(zip(cut.starts, cut.lengths, strict=True)):
            tokens += [*text[after:s], mask]
            places[s], after = len(tokens) - 1, s + n
        tokens += [*text[after:]]
        context = len(tokens)
        targets, learned, positions = [0] * context, [0.0] * context, list(range(context))
        for s, n in zip(cut.starts, cut.lengths, strict=True):
            tokens += [start, *text[s : s + n]]
            targets += [*text[s : s + n], end]
            learned += [*weights[s : s + n], 1.0]
            positions += range(len(positions), len(positions) + n + 1) if cut.long else [places[s]] * (n + 1)
        made = len(tokens)
        # the context sees all of itself; padding comes last, so that nothing sees it
        masks = [0] * context + list(range(1, self.seq_len - context + 1))
        rest = self.seq_len - made
        return {
            "tokens": np.array(tokens + [0] * rest, np.int32),
            "targets": np.array(targets + [0] * rest, np.int32),
            "weights": np.array(learned + [0.0] * rest, np.float32),
            "positions": np.array(positions + list(range(made, self.seq_len)), np.int32),
            "mask_positions": np.array(masks, np.int32),
        }
