"""What `jaxscale data` prints: statistics, the first documents, and the first rows of a batch."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.units import WIDTH, human_bytes

if TYPE_CHECKING:
    from jaxscale.commands.data import Subject
    from jaxscale.data import Batch, Source, TokenFile, Tokenizer
    from jaxscale.data.statistics import Statistics

BEGINNING = 300
"""Characters of a document or a segment that are printed."""


def text_of(ids: np.ndarray, tokenizer: Tokenizer | None, most: int = BEGINNING) -> str:
    """Return the beginning of some tokens as text, or as numbers without a tokenizer; control characters are escaped.

    Args:
      ids: the token ids.
      tokenizer: the tokenizer; `None` if it is unknown.
      most: number of characters.
    """
    ids = np.asarray(ids[:most])
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def first_documents(file: TokenFile, count: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Return the number of tokens and the beginning of the first documents.

    Args:
      file: the token file.
      count: number of documents.
      tokenizer: the tokenizer; `None` if it is unknown.
    """
    tokens = file.checked("tokens.bin")
    ends = file.offsets[: count + 1].tolist()
    return [
        {"tokens": end - start, "text": text_of(tokens[start : min(end, start + BEGINNING)], tokenizer)}
        for start, end in zip(ends[:-1], ends[1:], strict=True)
    ]


def rows_of(batch: Batch, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Return the segments of each row: positions, tokens that are learned, and text; other arrays by their shapes.

    Args:
      batch: arrays by name, (B, ...).
      tokenizer: the tokenizer; `None` if it is unknown.
    """
    if not {"tokens", "weights", "segment_ids"} <= set(batch):
        return [{name: f"{x.dtype} {x.shape[1:]}" for name, x in batch.items()}]
    rows = []
    for tokens, weights, segments in zip(batch["tokens"], batch["weights"], batch["segment_ids"], strict=True):
        parts = []
        for segment in range(1, int(segments.max(initial=0)) + 1):
            places = np.flatnonzero(segments == segment)
            part = {"from": int(places[0]), "to": int(places[-1]), "learned": int(np.count_nonzero(weights[places]))}
            parts.append({**part, "text": text_of(tokens[places], tokenizer)})
        rows.append({
            "segments": parts,
            "padding": int(np.count_nonzero(segments == 0)),
            "learned": int(np.count_nonzero(weights)),
        })  # fmt: skip
    return rows


def as_json(value: Any) -> Any:
    """Return a form of a value that JSON has.

    Args:
      value: statistics, or a schedule of weights.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return str(value)


def _share(share: object) -> str:
    return f"{share:.1%}" if isinstance(share, float) else str(share)


def show(corpora: list[dict[str, Any]], rows: list[dict[str, Any]], subject: Subject, source: Source) -> None:
    """Print everything.

    Args:
      corpora: name, share, statistics and first documents of each corpus.
      rows: the first rows of a batch, from `rows_of`.
      subject: what the command is about.
      source: the rows of the corpus.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for about in corpora:
        of = "" if about["share"] is None else f": {_share(about['share'])} of rows"
        for later in about.get("schedule", ()):
            of += f", from step {later['from_step']:,} {_share(later['share'])}"
        where = f" ({about['folder']})" if about["folder"] else ""
        console.print(Text(f"{about['corpus']}{of}", style="bold"), Text(where))
        if "statistics" in about:
            _statistics(about["statistics"], subject.tokenizer, console)
        for number, document in enumerate(about.get("documents", ())):
            console.print(Text(f"\ndocument {number}, {document['tokens']:,} tokens", style="bold"))
            console.print(Text(document["text"]))
        console.print()
    head = f"rows of {subject.seq_len} tokens, packing '{subject.packing}': {len(source):,} in the train split"
    console.print(Text(head, style="bold"))
    for number, row in enumerate(rows):
        if "segments" not in row:
            console.print(Text(", ".join(f"{name} {shape}" for name, shape in row.items())))
            continue
        console.print(
            Text(f"row {number}: segments: {len(row['segments'])}, positions with weight 1: {row['learned']}, "
                 f"padding: {row['padding']}")
        )  # fmt: skip
        for part in row["segments"]:
            span = f"{part['from']}-{part['to']}"
            console.print(Text(f"  {span:>11}  {part['learned']:>6} learned  {_quoted(part['text'][:60])}"))


def _statistics(s: Statistics, tokenizer: Tokenizer | None, console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    lines = {"documents": f"{s.documents:,}", "tokens": f"{s.tokens:,}"}
    if s.bytes is not None:
        each = "" if s.bytes_per_token is None else f", {s.bytes_per_token:.2f} a token"
        lines["text"] = f"{human_bytes(s.bytes)}{each}"
    if s.duplicates is not None:
        lines["duplicates"] = f"{s.duplicates:,} dropped"
    if s.learned < 1:
        lines["learned"] = f"{s.learned:.1%} of tokens"
    lines["tokens of a document"] = ", ".join(f"{q:.0%}: {n:,}" for q, n in s.quantiles.items())
    lines[f"longer than {s.seq_len}"] = f"{s.longer:.1%} of documents, with {s.longer_tokens:.1%} of tokens"
    for name, rows in s.packings.items():
        lines[f"packing '{name}'"] = (
            f"{rows.rows:,} rows, {rows.padding:.1%} padding, {rows.dropped:,} tokens in no row"
        )
    if not s.packings:
        lines["packing"] = f"too few tokens for a row of {s.seq_len}"
    table = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        table.add_row(name, Text(text))
    most = max(count for _, _, count in s.histogram)
    for low, high, count in s.histogram:
        bar = "█" * round(30 * count / most)
        table.add_row(f"{low:,} to {high - 1:,} tokens", Text(f"{bar or '·'} {count:,}"))
    words = [_quoted(text_of(np.array([id]), tokenizer)) if tokenizer else str(id) for id, _ in s.frequent]
    frequent = [f"{word} {share:.1%}" for word, (_, share) in zip(words, s.frequent, strict=True)]
    table.add_row("most frequent tokens", Text(", ".join(frequent)))
    console.print(table)


def _quoted(text: str) -> str:
    return "'" + text.replace("\n", "\\n").replace("\t", "\\t") + "'"
