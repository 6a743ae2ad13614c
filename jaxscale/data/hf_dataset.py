"""A corpus of a data set of Hugging Face `datasets`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from jaxscale.config import register
from jaxscale.data.documents import TextCorpus, gathered
from jaxscale.data.files import file_identity
from jaxscale.data.jsonl_files import name_in, text_in
from jaxscale.data.pieces import Piece
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

_ROWS = 1000


@register(name="hf_dataset")
@dataclass(frozen=True)
class HFDataset(TextCorpus):
    """One split of a data set of Hugging Face `datasets` (`pip install 'jaxscale[datasets]'`).

    Its documents are divided into ours, "train" and "heldout", whatever its own splits are.

    Args:
      name_or_path: the data set's name on the hub, a folder of its files, or one of `Dataset.save_to_disk`.
      config: the data set's configuration, such as "20231101.en".
      split: the split to read.
      field: the column with the text.
      id: the column with the document's name, texts or integers, which decides its split; `None` names documents by
        their row, `train#17`.
      streaming: read it while it is tokenized instead of downloading it first. Set `revision` then: a newer version
        of a streamed data set is not noticed.
      revision: the version on the hub: a branch, a tag or a commit.
      heldout: fraction of documents held out.
      duplicates: whether to "keep" or "drop" documents with the text of an earlier one.
      processes: number of processes that tokenize; `None` is one for each core.

    Raises:
      DataError: `duplicates` or `processes` does not exist.
    """

    name_or_path: str
    config: str | None = None
    split: str = "train"
    field: str = "text"
    id: str | None = None
    streaming: bool = False
    revision: str | None = None
    heldout: float = 0.05
    duplicates: str = "keep"
    processes: int | None = None
    name: ClassVar[str] = "hf_dataset"

    def origin(self) -> str:
        """Return what names the data set and its columns."""
        names = (self.name_or_path, self.config, self.split, self.field, self.id, self.streaming, self.revision)
        return " ".join(map(str, names))

    def key(self, tokenizer: Tokenizer) -> str:
        """Return a key that changes with the data set, the settings and the tokenizer."""
        described = f"{tokenizer.fingerprint} {self.origin()} {self.duplicates} {self._identity(self._opened())}"
        return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def total(self) -> int | None:
        """Return None: the size of one column is not known before it is read."""
        return None

    def pieces(self) -> Iterator[Piece]:
        """Yield rows of 4 MB together."""
        rows = self._opened()
        known = getattr(rows, "column_names", None)
        for column in (self.field, self.id):
            if known is not None and column is not None and column not in known:
                raise DataError(f"{self.name_or_path} has no column '{column}'{near(column, known)}")
        return gathered(self._records(rows), f"{self.origin()} {self._identity(rows)}")

    def texts_of(self, piece: Piece) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of the rows of a piece."""
        return zip(piece.records.names, piece.records.texts, strict=True)

    def _records(self, rows: Any) -> Iterator[tuple[str, str]]:
        columns = [self.field] if self.id is None else [self.field, self.id]
        if getattr(rows, "column_names", None) is not None:
            rows = rows.select_columns(columns)
        number = 0
        with self._guarded():
            for batch in rows.iter(_ROWS):
                for values in zip(*(batch.get(column, ()) for column in columns), strict=False):
                    record = dict(zip(columns, values, strict=True))
                    try:
                        text = text_in(record, self.field)
                        name = f"{self.split}#{number}" if self.id is None else name_in(record, self.id)
                    except DataError as error:
                        raise DataError(f"{self.name_or_path}, row {number}: {error}") from None
                    yield name, text
                    number += 1
                if not set(columns) <= set(batch):
                    missing = next(column for column in columns if column not in batch)
                    raise DataError(f"{self.name_or_path} has no column '{missing}'{near(missing, batch)}")
        if not number:
            raise DataError(f"the split '{self.split}' of {self.name_or_path} has no row; name another split.")

    def _identity(self, rows: Any) -> str:
        """Return what changes with the data: the fingerprint of `datasets`, or the files of a streamed folder."""
        if not self.streaming:
            return f"{rows._fingerprint} {len(rows)}"
        folder = Path(self.name_or_path).expanduser()
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        return "".join(file_identity(path.relative_to(folder).as_posix(), path) for path in files)

    def _opened(self) -> Any:
        library, path = _datasets(), Path(self.name_or_path).expanduser()
        if not path.exists() and (self.name_or_path.count("/") > 1 or self.name_or_path[:1] in "./~"):
            beside = [str(p) for p in path.parent.glob("*")]
            raise DataError(f"there is no data set {self.name_or_path}{near(str(path), beside)}")
        saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        with self._guarded():
            if not saved:
                return library.load_dataset(
                    str(path) if path.exists() else self.name_or_path,
                    self.config,
                    split=self.split,
                    streaming=self.streaming,
                    revision=self.revision,
                )
            rows = library.load_from_disk(str(path))
            if isinstance(rows, dict):
                if self.split not in rows:
                    raise DataError(f"{self.name_or_path} has no split '{self.split}'{near(self.split, rows)}")
                rows = rows[self.split]
            elif self.split not in ("train", str(rows.split)):
                own = "one data set without splits" if rows.split is None else f"the split '{rows.split}' alone"
                raise DataError(f"{self.name_or_path} is {own}; leave out hf_dataset.split")
            return rows.to_iterable_dataset() if self.streaming else rows

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn whatever the library raises into a `DataError`."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # it has no base class of errors
            reason = " ".join(f"{error.__cause__ or error}".split())[:300]
            raise DataError(f"cannot read the data set {self.name_or_path} ({reason})") from error


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf_dataset needs the package 'datasets': pip install 'jaxscale[datasets]'") from error
    return datasets
