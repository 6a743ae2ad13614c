"""A corpus of any object with `__len__` and `__getitem__`: a list, a data set of torch or grain, your own class."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from jaxscale.config import register
from jaxscale.data.array_rows import ArrayRows, row_of, text_of
from jaxscale.data.batch import Batch, Corpus, Source
from jaxscale.data.cache import cached
from jaxscale.data.documents import TextCorpus, gathered
from jaxscale.data.encoded import Document
from jaxscale.data.packing import pack
from jaxscale.data.pieces import Piece
from jaxscale.data.split import SPLITS
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

ENDLESS = 2**40
"""A length from which on data is endless, such as grain's repeated data sets, and has no epochs."""


@runtime_checkable
class Readable(Protocol):
    """Records by number, such as grain's `RandomAccessDataSource`; the same number always gives the same record."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class InMemory(Sequence[Any]):
    """A list of records, which a run's `config.gin` mentions without its content.

    Args:
      records: the records.
    """

    def __init__(self, records: Sequence[Any]):
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: Any) -> Any:
        return self.records[number]

    def __repr__(self) -> str:
        return f"{type(self.records).__name__} of {len(self)} records"


@register(name="records")
@dataclass(frozen=True, eq=False)
class UserRecords:
    """Records of an object with `__len__` and `__getitem__`, such as grain's `RandomAccessDataSource` or a list.

    What a record is decides what becomes of it:

      a dict of arrays   a row, read when it is needed, for an objective that takes arrays of these names. 64-bit
                         numbers become 32-bit ones, as in JAX; names, shapes and dtypes must be the same in all records
      token ids          a document: integers in one dimension, with or without eos at the end
      text               a document, tokenized into the cache

    With `field`, records are dicts, of which one entry is the text or the token ids. Documents are copied into the
    cache. Rows are read by several threads at once.

    Args:
      data: the object.
      heldout: fraction of records held out, chosen by their numbers; or an object with the held-out records.
      field: the entry of the records, which are dicts, that is the text or the token ids; `None` if they are what to
        train on.
      group: consecutive records that stay in one split, as the objective's `group` needs it (rows only).
      vocab_size: number of token ids; `None` is the tokenizer's.
      eos: the token that ends documents of token ids; `None` is the tokenizer's.
      fingerprint: changes with the data. `None` is the object's attribute `fingerprint` if that is a text, or else a
        digest: of the length and all documents, or of the length and 64 rows evenly spaced.

    Raises:
      DataError: `data` is not such an object, or a setting is invalid.
    """

    data: Readable
    heldout: float | Readable = 0.05
    field: str | None = None
    group: int = 1
    vocab_size: int | None = None
    eos: int | None = None
    fingerprint: str | None = None
    name: ClassVar[str] = "records"

    def __post_init__(self) -> None:
        for field in ("data", "heldout"):
            value = getattr(self, field)
            if field == "heldout" and isinstance(value, float | int):
                continue
            if not is_readable(value):
                raise DataError(
                    f"records.{field} = {_short(value)} has no records by number; pass an object with __len__ and "
                    "__getitem__, such as a list."
                )
            if not 0 < len(value) < ENDLESS:
                size = "is empty" if not len(value) else f"is endless ({len(value)} records); pass it unrepeated"
                raise DataError(f"records.{field} = {_short(value)} {size}.")
            if isinstance(value, list | tuple):
                object.__setattr__(self, field, InMemory(value))
        if self.group < 1:
            raise DataError(f"records.group = {self.group}: use 1 or more.")
        if (self.vocab_size is None) != (self.eos is None):
            raise DataError("records.vocab_size and records.eos belong together; set both, or none of them.")

    def source(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return the rows of one split: the records themselves, or documents packed into rows.

        Raises:
          DataError: a record cannot be read or used, there is no tokenizer for documents, or the split is empty.
        """
        if split not in SPLITS:
            raise DataError(f"split '{split}' does not exist{near(split, SPLITS)}")
        apart = not isinstance(self.heldout, float | int)
        data = cast(Readable, self.heldout) if apart and split == "heldout" else self.data
        heldout = 0.0 if apart else cast(float, self.heldout)
        chosen = "train" if apart else split
        kind = _kind(self._value(data, 0))
        if kind == "rows":
            return ArrayRows(self.name, data, chosen, heldout, self.group, self._stated(data), seq_len)
        tokenizer = self._tokenizer(tokenizer, kind)
        identity = self._stated(data) or self._digest(data)
        if kind == "text":
            return _Texts(self, data, identity, heldout).source(
                tokenizer, seq_len=seq_len, split=chosen, packing=packing, cache=cache
            )
        key = hashlib.sha256(f"{tokenizer.fingerprint} {identity} {self.field}".encode()).hexdigest()[:16]
        file = cached(self.name, key, lambda: self._documents(data, tokenizer), tokenizer, cache)
        return pack(file.documents(chosen, heldout, self.name), packing, seq_len)

    def first(self) -> Batch:
        """Return the arrays of the first record, without a dimension of rows.

        Raises:
          DataError: it cannot be read, or is not a dict of arrays.
        """
        record = self._value(self.data, 0)
        if _kind(record) != "rows":
            raise DataError(f"record 0 of {_short(self.data)} is not a dict of arrays")
        return row_of(record)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the number of token ids; `None` if records are rows.

        Args:
          tokenizer: the tokenizer.
        """
        if _kind(self._value(self.data, 0)) == "rows" or (self.vocab_size is None and tokenizer is None):
            return None
        return self.vocab_size if tokenizer is None else self._tokenizer(tokenizer, "ids").vocab_size

    def _tokenizer(self, tokenizer: Tokenizer | None, kind: str) -> Tokenizer:
        if kind == "ids" and self.vocab_size is not None and self.eos is not None:
            return cast(Tokenizer, _Ids(self.vocab_size, self.eos))
        if tokenizer is None:
            raise DataError(f"records of {kind} need a tokenizer; pass one, such as ByteTokenizer().")
        return tokenizer

    def _value(self, data: Readable, number: int) -> Any:
        try:
            record = data[number]
        except Exception as error:  # the object may raise anything
            raise DataError(
                f"record {number} of {_short(data)} cannot be read ({type(error).__name__}: {error})"
            ) from error
        if self.field is None:
            return record
        if not isinstance(record, Mapping) or self.field not in record:
            known = f"has no '{self.field}'{near(self.field, map(str, record))}" if isinstance(record, Mapping) else ""
            raise DataError(f"record {number} of {_short(data)} {known or f'is a {type(record).__name__}, not a dict'}")
        return record[self.field]

    def _all(self, data: Readable, kind: str) -> Iterator[Any]:
        for number in range(len(data)):
            value = self._value(data, number)
            if _kind(value) != kind:
                raise DataError(
                    f"record {number} of {_short(data)} is not {kind}, as record 0 is; give records of one kind"
                )
            yield value

    def _texts(self, data: Readable) -> Iterator[tuple[str, str]]:
        return ((str(number), text_of(value)) for number, value in enumerate(self._all(data, "text")))

    def _documents(self, data: Readable, tokenizer: Tokenizer) -> Iterator[Document]:
        for number, value in enumerate(self._all(data, "ids")):
            ids = np.asarray(value)
            # A document of the token file gets its eos there.
            yield str(number), ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids

    def _stated(self, data: Readable) -> str | None:
        stated = getattr(data, "fingerprint", None) if self.fingerprint is None else self.fingerprint
        return stated if isinstance(stated, str) else None

    def _digest(self, data: Readable) -> str:
        digest = hashlib.sha256(f"{len(data)}".encode())
        kind = _kind(self._value(data, 0))
        for value in self._all(data, kind):
            raw = text_of(value).encode() if kind == "text" else np.asarray(value).astype("<i8").tobytes()
            digest.update(hashlib.sha256(raw).digest())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class _Texts(TextCorpus):
    """The records of an object as documents of text."""

    records: UserRecords
    data: Readable
    identity: str
    heldout: float
    name: ClassVar[str] = "records"

    def origin(self) -> str:
        return f"{self.identity} {self.records.field}"

    def key(self, tokenizer: Tokenizer) -> str:
        return hashlib.sha256(f"{tokenizer.fingerprint} {self.origin()}".encode()).hexdigest()[:16]

    def total(self) -> int | None:
        return None

    def pieces(self) -> Iterator[Piece]:
        return gathered(self.records._texts(self.data), self.origin())

    def texts_of(self, piece: Piece) -> Iterator[tuple[str, str]]:
        return zip(piece.records.names, piece.records.texts, strict=True)


@dataclass(frozen=True)
class _Ids:
    """What a token file needs to know of an unknown tokenizer."""

    vocab_size: int
    eos_id: int
    name: ClassVar[str] = "ids"

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"ids {self.vocab_size} {self.eos_id}".encode()).hexdigest()


def is_readable(value: object) -> bool:
    """Return whether a value has records by number.

    Args:
      value: any value.
    """
    return isinstance(value, Readable) and not isinstance(value, str | bytes | Mapping | type)


def as_corpus(value: Any) -> Corpus:
    """Return a corpus as it is, and any other object with records by number as `records(value)`.

    Args:
      value: a corpus, or an object with `__len__` and `__getitem__`.
    """
    # grain's data sets have a `source`, too, which is another thing, but no name.
    corpus = hasattr(value, "source") and hasattr(value, "name")
    return UserRecords(value) if is_readable(value) and not corpus else value


def _kind(value: Any) -> str:
    """Return "rows", "text" or "ids"."""
    if isinstance(value, Mapping):
        return "rows"
    if isinstance(value, str | bytes):
        return "text"
    with contextlib.suppress(TypeError, ValueError):  # such as lists of different lengths
        array = np.asarray(value)
        if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
            return "ids"
    raise DataError(
        f"a record is {_short(value)}; give a dict of arrays, a text, or token ids (integers in one dimension)"
    )


def _short(value: object) -> str:
    return " ".join(repr(value).split())[:80]
