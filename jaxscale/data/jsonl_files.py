"""A corpus of JSON-lines files, plain or compressed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.data.documents import TextCorpus
from jaxscale.data.files import Files, check_readable, files_key, matching
from jaxscale.data.lines import Lines, line_pieces
from jaxscale.data.pieces import Piece
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near


@register(name="jsonl_files")
@dataclass(frozen=True)
class JsonlFiles(TextCorpus):
    """Documents in JSON-lines files: each line is an object, of which one field is the text.

    Files may be compressed by gzip or Zstandard (`pip install 'jaxscale[data]'`).

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
      field: the field with the text.
      id: the field with the document's name, a text or a number, which decides its split; `None` names documents by
        file and line, `a.jsonl#17`, whether the file is compressed or not.
      heldout: fraction of documents held out.
      duplicates: whether to "keep" or "drop" documents with the text of an earlier one.
      processes: number of processes that tokenize; `None` is one for each core.

    Raises:
      DataError: `duplicates` or `processes` does not exist.
    """

    glob: str
    field: str = "text"
    id: str | None = None
    heldout: float = 0.05
    duplicates: str = "keep"
    processes: int | None = None
    name: ClassVar[str] = "jsonl_files"

    def files(self) -> Files:
        """Return the files that match."""
        return matching(self.glob, ".jsonl")

    def origin(self) -> str:
        """Return the glob and the fields."""
        return f"{self.glob} {self.field} {self.id}"

    def key(self, tokenizer: Tokenizer) -> str:
        """Return a key that changes with the files, the settings and the tokenizer."""
        return files_key(self.files(), tokenizer.fingerprint, self.field, str(self.id), self.duplicates)

    def total(self) -> int | None:
        """Return the bytes of all files, compressed as they are; `None` if they are in a bucket."""
        return check_readable(self.files())

    def pieces(self) -> Iterator[Piece]:
        """Yield lines of 4 MB together."""
        files = self.files()
        check_readable(files)
        return line_pieces(files)

    def texts_of(self, piece: Piece) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of the lines of a piece."""
        lines: Lines = piece.records
        for number, line in lines.numbered():
            try:
                record = parsed(line)
                text = text_in(record, self.field)
                name = f"{lines.name}#{number}" if self.id is None else name_in(record, self.id)
            except DataError as error:
                raise DataError(f"{lines.path}, line {number}: {error}") from None
            yield name, text

    def place(self, piece: Piece, name: str) -> str:
        """Return the file and line of a document."""
        number = f"line {name.rpartition('#')[2]}" if self.id is None else f"document '{name}'"
        return f"{piece.records.path}, {number}"


def parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line.

    Args:
      line: the line.

    Raises:
      DataError: it is not a JSON object.
    """
    try:
        record = json.loads(line)
    except RecursionError:
        raise DataError("it is nested too deep") from None
    except ValueError as error:
        raise DataError(f"it is not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"it is of type {type(record).__name__} and not an object with fields")
    return record


def text_in(record: dict[str, Any], field: str) -> str:
    """Return the text of a record.

    Args:
      record: the record.
      field: name of its field.

    Raises:
      DataError: there is no such field, or it is not a text.
    """
    if field not in record:
        chat = "; chat_files reads conversations" if "messages" in record or "completion" in record else ""
        raise DataError(f"it has no field '{field}'{chat or near(field, record)}")
    text = record[field]
    if not isinstance(text, str):
        kind = "null" if text is None else f"of type {type(text).__name__}"
        raise DataError(f"its field '{field}' is {kind} and not a text; name another field or remove such documents")
    return text


def name_in(record: dict[str, Any], field: str) -> str:
    """Return the name of a record's document.

    Args:
      record: the record.
      field: name of the field with the name.

    Raises:
      DataError: there is no such field, or it is neither a text nor a whole number.
    """
    if field not in record:
        raise DataError(f"it has no field '{field}'{near(field, record)}")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(
            f"its field '{field}' is of type {type(value).__name__}, but a name is a text or a whole number"
        )
    return str(value)
