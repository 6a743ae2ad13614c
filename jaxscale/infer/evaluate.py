"""Perplexity: how well a model foresees texts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxscale.data.packing import Documents
from jaxscale.errors import DataError
from jaxscale.infer.loaded import load_model, say_length, scored_ids
from jaxscale.infer.score import log_probabilities
from jaxscale.layout import Layout
from jaxscale.models.base import vocab_of
from jaxscale.nn import WeightFormat
from jaxscale.step.texts import check_texts, checked

if TYPE_CHECKING:
    from jaxscale.run import Run


class Document(NamedTuple):
    """A text to be scored.

    Args:
      ids: what opens it, and its tokens.
      bytes, words: of the text that counts, in UTF-8 and between white space; `None` of what is no text.
      counts: which tokens count, of those that are not all learned; from the second on.
    """

    ids: Int[np.ndarray, " t"]
    bytes: int | None
    words: int | None
    counts: Bool[np.ndarray, " t-1"] | None = None

    @property
    def tokens(self) -> int:
        """How many count."""
        return len(self.ids) - 1 if self.counts is None else int(self.counts.sum())


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model foresees texts.

    Args:
      documents, tokens: how many; the end of a document is not counted, and of conversations the answers alone are.
      bytes, words: of the texts, or `None` where they are no text.
      nats: minus the log-probability of all tokens together.
      length, stride: of the windows, in tokens.
      step: of the checkpoint.
    """

    documents: int
    tokens: int
    bytes: int | None
    words: int | None
    nats: float
    length: int
    stride: int
    step: int

    @property
    def per_token(self) -> float:
        """exp of the mean over tokens."""
        return math.exp(self.nats / self.tokens)

    @property
    def per_word(self) -> float | None:
        """exp of the mean over words."""
        return None if not self.words else math.exp(min(self.nats / self.words, 700.0))

    @property
    def per_byte(self) -> float | None:
        """exp of the mean over bytes."""
        return None if not self.bytes else math.exp(self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float | None:
        """The mean over bytes, in bits."""
        return None if not self.bytes else self.nats / self.bytes / math.log(2)

    def results(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = ("per_token", "per_word", "per_byte", "bits_per_byte")
        return dataclasses.asdict(self) | {
            f"perplexity_{n}" if n[:3] == "per" else n: getattr(self, n) for n in derived
        }


def perplexity(
    run: Run,
    files: Sequence[str | Path] | None = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    layout: Layout | None = None,
    step: int | None = None,
    rows: int = 8,
    weights: WeightFormat | None = None,
) -> Perplexity:
    """Perplexity of a run's model on its held-out documents, or on text files, each a document.

    Args:
      run: the run.
      files: UTF-8 text files; by default the held-out documents of the run's corpus.
      length: how many tokens the model sees at once; the run's `seq_len` by default.
      stride: of the windows in which longer documents are taken (see `jaxscale.infer.score.windows`); `length` by
        default, which makes segments.
      layout, step: as in `jaxscale.infer.loaded.load_model`.
      rows: of a batch.
      weights: a form in which the matrices that it covers are kept; by default as they were trained.

    Raises:
      DataError: the texts cannot be read, or hold no token.
      ConfigError: a setting out of range, or a model that is none of texts.
      CheckpointError, RunError: the run has no checkpoint.
    """
    check_texts(run.config)
    length = run.config.seq_len if length is None else length
    stride = length if stride is None else stride
    say_length(run, length)
    documents = list(_heldout(run) if files is None else _texts(run, files))
    tokens = sum(d.tokens for d in documents)
    if not tokens:
        raise DataError("there is no text to evaluate on; give files that are not empty")
    loaded = load_model(run, layout, step, weights=weights)
    found = log_probabilities(
        loaded,
        [d.ids for d in documents],
        length=length,
        stride=stride,
        rows=rows,
        loss=run.config.token_loss,
        apart=run.config.segments,
    )
    counted = (x if d.counts is None else x[d.counts] for x, d in zip(found, documents, strict=True))
    nats = -math.fsum(math.fsum(x.tolist()) for x in counted)
    whole = lambda sizes: None if None in sizes else sum(sizes)  # noqa: E731
    sizes = whole([d.bytes for d in documents]), whole([d.words for d in documents])
    return Perplexity(len(documents), tokens, *sizes, nats, length, stride, loaded.step)


def _texts(run: Run, files: Sequence[str | Path]) -> Iterable[Document]:
    for file in files:
        try:
            whole = Path(file).read_bytes().decode("utf-8")
        except OSError as e:
            raise DataError(f"cannot read {file} ({e.strerror}); name UTF-8 text files") from None
        except UnicodeDecodeError as e:
            raise DataError(f"{file} is not UTF-8 text (byte {e.start})") from None
        for text in _lines(file, whole) if Path(file).suffix == ".jsonl" else [whole]:
            yield Document(scored_ids(run, text), len(text.encode()), len(text.split()))


def _lines(file: str | Path, lines: str) -> Iterable[str]:
    """The texts of a file of JSON lines, each a document."""
    for n, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as e:
            raise DataError(f'{file}, line {n}, is no JSON ({e}); each line is an object with a "text"') from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f'{file}, line {n}, has no "text" to score ({keys}); give each line one, name questions with --choices'
            )
        yield text


def _heldout(run: Run) -> Iterable[Document]:
    config = run.config
    if run.info.get("status") == "imported":
        raise DataError(f"{run.path} was imported, and has no held-out documents of its own; name text files")
    source = config.data.source(config.tokenizer, seq_len=config.seq_len, split="heldout", packing=config.packing)
    documents = getattr(source, "documents", None)
    if not isinstance(documents, Documents):
        raise DataError(f"the corpus '{source.name}' gives rows and no documents; name text files to evaluate on")
    tokenizer = run.tokenizer
    text = documents.vocab_size == tokenizer.vocab_size and documents.eos_id == tokenizer.eos_id
    opening = scored_ids(run, "") if text else np.asarray([documents.eos_id], np.int32)
    for start, n in zip(documents.starts, documents.lengths, strict=True):
        counts = None if documents.learned is None else documents.learned[start : start + n] != 0
        if documents.opened:  # they begin and end as they are
            opening, ids = documents.tokens[start - 1 : start], np.asarray(documents.tokens[start : start + n])
        else:
            ids = np.asarray(documents.tokens[start : start + n - 1])  # without the end
            counts = None if counts is None else counts[:-1]
        counted = ids if counts is None else ids[counts]
        whole = tokenizer.decode(counted) if text else ""
        size, words = (len(whole.encode()), len(whole.split())) if text else (None, None)
        every = np.concatenate([opening, ids]).astype(np.int32)
        yield Document(checked(every, vocab_of(config.model)), size, words, counts)
