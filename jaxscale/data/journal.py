"""The journal of an unfinished token file: what is complete in it, so that a later run goes on from there.

A line for each finished piece of the corpus, with the piece's key, the number of tokens and documents up to its end,
and a digest of what it added to the files. After a crash, pieces count as finished only as far as their digests match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxscale.seals import Lines, seal_line

NAME = "journal.jsonl"


@dataclass(frozen=True)
class Counts:
    """What a token file has so far.

    Args:
      tokens: number of tokens, eos included.
      documents: number of documents.
      size: bytes of text that were read, in UTF-8.
      duplicates: number of documents that were left out because an earlier one has the same text.
    """

    tokens: int = 0
    documents: int = 0
    size: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class Finished:
    """A finished piece.

    Args:
      key: digest of the piece's key.
      end: the counts at its end.
      digest: digest of the bytes that it added to the files.
    """

    key: str
    end: Counts
    digest: str


def piece_key(text: str) -> str:
    """Return the digest by which the journal knows a piece.

    Args:
      text: the piece's key.
    """
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


class Journal:
    """The journal in a folder.

    Args:
      folder: the folder of the unfinished token file.
      header: identifies the preparation; the entries of another one do not count.
    """

    def __init__(self, folder: Path, header: str):
        self.path, self.header = folder / NAME, piece_key(header)

    def read(self) -> Iterator[Finished]:
        """Yield the entries before the first damaged one; none if there is no journal, or that of another header."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return
        lines = Lines()
        rows = lines.feed(data)
        intact = min(lines.damaged, default=len(rows) + 1) - 1
        if not intact or rows[0] != {"preparation": self.header}:
            return
        for row in rows[1:intact]:
            yield Finished(row.pop("key"), Counts(**row.pop("end")), row.pop("digest"))

    def write(self, entries: list[Finished]) -> None:
        """Replace the journal.

        Args:
          entries: the new content.
        """
        lines = [seal_line({"preparation": self.header}), *map(_line, entries)]
        partial = self.path.with_suffix(".partial")
        partial.write_bytes(b"".join(lines))
        partial.replace(self.path)

    def append(self, entry: Finished) -> None:
        """Add a finished piece.

        Args:
          entry: the piece.
        """
        with open(self.path, "ab") as out:
            out.write(_line(entry))


def _line(entry: Finished) -> bytes:
    return seal_line({"key": entry.key, "end": asdict(entry.end), "digest": entry.digest})
