"""A corpus of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from jaxscale.bucket_files import BLOCK, BucketFile
from jaxscale.buckets import BucketError
from jaxscale.config import register
from jaxscale.data.documents import Records, TextCorpus
from jaxscale.data.files import File, Files, check_readable, file_identity, files_key, matching, unreadable
from jaxscale.data.pieces import PIECE, Piece
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

_ROWS = 1024
"""Rows that are read at a time."""

_BUFFER = 2**20


@register(name="parquet_files")
@dataclass(frozen=True)
class ParquetFiles(TextCorpus):
    """Documents in Parquet files: each row is one, of which one column is the text (`pip install 'jaxscale[data]'`).

    Row groups are read one after another, and of them only that column. The schema of every file is checked before the
    first row is read.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket.
      column: the column with the text.
      id: the column with the document's name, texts or integers, which decides its split; `None` names documents by
        file and row, `a.parquet#17`.
      heldout: fraction of documents held out.
      duplicates: whether to "keep" or "drop" documents with the text of an earlier one.
      processes: number of processes that tokenize; `None` is one for each core.

    Raises:
      DataError: `duplicates` or `processes` does not exist.
    """

    glob: str
    column: str = "text"
    id: str | None = None
    heldout: float = 0.05
    duplicates: str = "keep"
    processes: int | None = None
    name: ClassVar[str] = "parquet_files"

    def files(self) -> Files:
        """Return the files that match."""
        return matching(self.glob, ".parquet")

    def origin(self) -> str:
        """Return the glob and the columns."""
        return f"{self.glob} {self.column} {self.id}"

    def key(self, tokenizer: Tokenizer) -> str:
        """Return a key that changes with the files, the settings and the tokenizer."""
        return files_key(self.files(), tokenizer.fingerprint, self.column, str(self.id), self.duplicates)

    def total(self) -> int:
        """Return the bytes of the column in all files, uncompressed."""
        total = 0
        for _, path in self.files():
            with self._opened(path) as file:
                column, meta = self._columns(file, path)[0], file.metadata
                for i in range(meta.num_row_groups):
                    total += meta.row_group(i).column(column).total_uncompressed_size
        return total

    def pieces(self) -> Iterator[Piece]:
        """Yield rows of 4 MB together, after checking all files."""
        files = self.files()
        check_readable(files)
        for _, path in files:
            with self._opened(path) as file:
                self._columns(file, path)
                if not file.metadata.num_rows:
                    raise DataError(f"{path} has no row; remove it, or write it again.")
        return self._pieces(files)

    def _pieces(self, files: Files) -> Iterator[Piece]:
        for name, path in files:
            identity = file_identity(name, path)
            with self._opened(path) as file:
                column = self._columns(file, path)[0]
                row = 0
                for group in range(file.metadata.num_row_groups):
                    size = file.metadata.row_group(group).column(column).total_uncompressed_size
                    rows = file.metadata.row_group(group).num_rows
                    for records, text in self._parts(file, path, group, name, row):
                        yield Piece(
                            f"{identity}\0{row}\0{len(records.names)}\0{text}",
                            records,
                            size * len(records.names) // rows,
                            text,
                        )
                        row += len(records.names)

    def _parts(self, file: Any, path: File, group: int, name: str, row: int) -> Iterator[tuple[Records, int]]:
        """Yield the documents of a row group in parts, and the characters of each."""
        names: list[str] = []
        texts: list[str] = []
        size = 0
        try:
            for batch in self._batches(file, path, group):
                some = batch.column(self.column).to_pylist()
                own = None if self.id is None else batch.column(self.id).to_pylist()
                for i, text in enumerate(some):
                    if text is None or (own is not None and own[i] is None):
                        which = self.column if text is None else self.id
                        raise DataError(f"{path}, row {row}: its column '{which}' is null; remove such rows")
                    names.append(f"{name}#{row}" if own is None else str(own[i]))
                    texts.append(text)
                    size += len(text)
                    row += 1
                    if size >= PIECE:
                        yield Records(names, texts), size
                        names, texts, size = [], [], 0
        except (OSError, ValueError) as error:  # Arrow's errors derive from them
            if isinstance(error, DataError):
                raise
            if isinstance(error, BucketError):
                raise unreadable(path, error) from None
            raise DataError(f"{path} is damaged in row group {group} ({_first_line(error)}); copy it again.") from None
        if names:
            yield Records(names, texts), size

    def _batches(self, file: Any, path: File, group: int) -> Iterator[Any]:
        columns = [self.column] if self.id is None else [self.column, self.id]
        yield from file.iter_batches(_ROWS, row_groups=[group], columns=columns, use_threads=False)

    def texts_of(self, piece: Piece) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of the rows of a piece."""
        return zip(piece.records.names, piece.records.texts, strict=True)

    def _opened(self, path: File) -> Any:
        arrow = _arrow()
        try:
            if isinstance(path, BucketFile):
                return arrow.parquet.ParquetFile(path.open(0), buffer_size=BLOCK, pre_buffer=False)
            return arrow.parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        except BucketError as error:
            raise unreadable(path, error) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a Parquet file, or is truncated ({_first_line(error)}).") from None

    def _columns(self, file: Any, path: File) -> list[int]:
        """Return the indices of the columns in a row group, after checking that they are texts."""
        arrow, schema = _arrow(), file.schema_arrow
        types = arrow.types
        for column in (self.column, self.id):
            if column is None:
                continue
            if column not in schema.names:
                raise DataError(f"{path} has no column '{column}'{near(column, schema.names)}")
            kind = schema.field(column).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
            if not text and not (column == self.id and types.is_integer(kind)):
                texts = [f.name for f in schema if types.is_string(f.type) or types.is_large_string(f.type)]
                others = f"; columns of text: {', '.join(texts)}" if texts else ""
                raise DataError(f"{path} has a column '{column}' of {kind} and not of texts{others}")
        paths = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
        return [paths.index(column) for column in (self.column, self.id) if column is not None]


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200].rstrip(".")


def _arrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
        import pyarrow.types
    except ImportError as error:
        raise DataError("Parquet files need the package 'pyarrow': pip install 'jaxscale[data]'") from error
    return pyarrow
