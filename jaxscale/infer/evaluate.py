"""Perplexity of a model on documents."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxscale.data.packing import Documents
from jaxscale.errors import DataError
from jaxscale.infer.loaded import check_length, load_model, scored_ids, warn_length
from jaxscale.infer.score import log_probabilities
from jaxscale.layout import Layout
from jaxscale.models.base import vocab_of
from jaxscale.nn import WeightFormat
from jaxscale.step.texts import check_texts, checked

if TYPE_CHECKING:
    from jaxscale.run import Run


class Document(NamedTuple):
    """A document to score.

    Args:
      ids: an opening token, and the document's tokens; int32 (t,).
      bytes: UTF-8 bytes of the text that is scored; `None` if the tokens are not text.
      words: its words, separated by white space; `None` if the tokens are not text.
      counts: which tokens are scored, from the second on, bool (t - 1,); `None` is all.
    """

    ids: Int[np.ndarray, " t"]
    bytes: int | None
    words: int | None
    counts: Bool[np.ndarray, " t-1"] | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens that are scored."""
        return len(self.ids) - 1 if self.counts is None else int(self.counts.sum())


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on documents.

    Args:
      documents: the number of documents.
      tokens: scored tokens; ends of documents are not scored, and of conversations only the answers are.
      bytes: UTF-8 bytes of the scored text; `None` if the tokens are not text.
      words: words of the scored text; `None` if the tokens are not text.
      nats: minus the log-probability of all scored tokens together.
      length: tokens of a window.
      stride: between the beginnings of windows, in tokens.
      step: of the checkpoint.
      parameters: bytes of the model's parameters in their format; copies on several devices count once.
      tokens_per_second: scored after the first batch, which compiles; `None` if there is no other.
    """

    documents: int
    tokens: int
    bytes: int | None
    words: int | None
    nats: float
    length: int
    stride: int
    step: int
    parameters: int = 0
    tokens_per_second: float | None = dataclasses.field(default=None, compare=False)

    @property
    def per_token(self) -> float:
        """Perplexity per token: exp of the mean nats."""
        return math.exp(self.nats / self.tokens)

    @property
    def per_word(self) -> float | None:
        """Perplexity per word; `None` without words. Nats per word are cut at 700, near the largest float."""
        return None if not self.words else math.exp(min(self.nats / self.words, 700.0))

    @property
    def per_byte(self) -> float | None:
        """Perplexity per byte; `None` without bytes."""
        return None if not self.bytes else math.exp(self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte; `None` without bytes."""
        return None if not self.bytes else self.nats / self.bytes / math.log(2)

    def results(self) -> dict[str, Any]:
        """Return the fields and the derived values, for JSON."""
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
    """Return the perplexity of a run's model on its held-out documents, or on text files.

    Args:
      run: the run.
      files: UTF-8 text files, each a document, or JSONL files with a "text" in each line; by default the held-out
        documents of the run's corpus.
      length: how many tokens the model sees at once; the run's `seq_len` by default.
      stride: between windows of longer documents (see `jaxscale.infer.score.windows`); `length` by default, so that
        windows do not overlap.
      layout: as in `jaxscale.infer.loaded.load_model`.
      step: the checkpoint's step, as in `jaxscale.infer.loaded.load_model`.
      rows: batch rows.
      weights: a weight format for the matrices that it supports; by default as they were trained.

    Raises:
      DataError: a file cannot be read, or there is no token to score.
      ConfigError: a setting out of range, or a model that is not a language model.
      CheckpointError: there is no such checkpoint.
      RunError: the run has no checkpoint.
      LayoutError: the layout does not divide `length`.
    """
    check_texts(run.config)
    length = run.config.seq_len if length is None else length
    stride = length if stride is None else stride
    warn_length(run, length)
    documents = list(_heldout(run) if files is None else _documents(run, files))
    tokens = sum(d.tokens for d in documents)
    if not tokens:
        raise DataError("there is no text to evaluate on; name files that are not empty")
    loaded = load_model(run, layout, step, weights=weights)
    check_length(run, loaded.layout, length)
    logprobs = log_probabilities(
        loaded,
        [d.ids for d in documents],
        length=length,
        stride=stride,
        rows=rows,
        loss=run.config.token_loss,
        apart=run.config.segments,
        note=(speed := Speed()).take,
    )
    counted = (x if d.counts is None else x[d.counts] for x, d in zip(logprobs, documents, strict=True))
    nats = -math.fsum(math.fsum(x.tolist()) for x in counted)
    sizes = _total([d.bytes for d in documents]), _total([d.words for d in documents])
    return Perplexity(len(documents), tokens, *sizes, nats, length, stride, loaded.step, loaded.nbytes, speed.rate)


class Speed:
    """Counts tokens and seconds after the first call of `take`."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._tokens = 0

    def take(self, tokens: int) -> None:
        """Count the tokens of a batch that is done now.

        Args:
          tokens: how many.
        """
        self._tokens += tokens if self._times else 0
        self._times.append(time.perf_counter())

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first batch; `None` without another."""
        if len(self._times) < 2:
            return None
        return self._tokens / (self._times[-1] - self._times[0])


def _total(sizes: Sequence[int | None]) -> int | None:
    """The sum; `None` if one of them is."""
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _documents(run: Run, files: Sequence[str | Path]) -> Iterable[Document]:
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
    """The texts of a JSONL file."""
    for n, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as e:
            raise DataError(f'{file}, line {n}, is not JSON ({e}); each line must be an object with a "text"') from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
            raise DataError(f'{file}, line {n}, has no "text" to score ({keys}); for a file of questions use --choices')
        yield text


def _heldout(run: Run) -> Iterable[Document]:
    config = run.config
    if run.info.get("status") == "imported":
        raise DataError(f"{run.place} is imported and has no held-out documents; name text files")
    source = config.data.source(config.tokenizer, seq_len=config.seq_len, split="heldout", packing=config.packing)
    documents = getattr(source, "documents", None)
    if not isinstance(documents, Documents):
        raise DataError(f"the corpus '{source.name}' has rows and no documents; name text files to evaluate on")
    tokenizer = run.tokenizer
    text = documents.vocab_size == tokenizer.vocab_size and documents.eos_id == tokenizer.eos_id
    opening = scored_ids(run, "") if text else np.asarray([documents.eos_id], np.int32)
    for start, n in zip(documents.starts, documents.lengths, strict=True):
        counts = None if documents.learned is None else documents.learned[start : start + n] != 0
        if documents.opened:  # each document begins with its own opening token
            opening, ids = documents.tokens[start - 1 : start], np.asarray(documents.tokens[start : start + n])
        else:
            ids = np.asarray(documents.tokens[start : start + n - 1])  # without the end
            counts = None if counts is None else counts[:-1]
        counted = ids if counts is None else ids[counts]
        whole = tokenizer.decode(counted) if text else ""
        size, words = (len(whole.encode()), len(whole.split())) if text else (None, None)
        every = np.concatenate([opening, ids]).astype(np.int32)
        yield Document(checked(every, vocab_of(config.model)), size, words, counts)
