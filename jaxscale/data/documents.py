"""The base of corpora of texts: whatever yields names and texts is split, tokenized, packed and previewed alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxscale.data.batch import Source
from jaxscale.data.cache import cached_corpus
from jaxscale.data.encoded import CannotEncode, Encoded, encode_texts
from jaxscale.data.packing import pack
from jaxscale.data.pieces import PIECE, Piece
from jaxscale.data.split import name_hash, select
from jaxscale.data.storage import TokenFile
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

DUPLICATES = ("keep", "drop")


class TextCorpus:
    """Base of corpora whose documents are texts; a subclass defines `origin`, `key`, `total`, `pieces` and `texts_of`.

    Attributes:
      name: name of the corpus.
      heldout: fraction of documents held out, chosen by a hash of their names.
      duplicates: whether to "keep" or "drop" documents with the text of an earlier one.
      processes: number of processes that tokenize; `None` is one for each core.
    """

    name: ClassVar[str]
    masked: ClassVar[bool] = False
    heldout: float
    duplicates: str = "keep"
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.duplicates not in DUPLICATES:
            raise DataError(
                f"{self.name}.duplicates = {self.duplicates!r} does not exist{near(str(self.duplicates), DUPLICATES)}"
            )
        if self.processes is not None and (type(self.processes) is not int or self.processes < 1):
            raise DataError(
                f"{self.name}.processes = {self.processes!r}: use 1 or more, or None for one for each core."
            )

    def origin(self) -> str:
        """Return what identifies the corpus while its files change, such as their glob."""
        raise NotImplementedError

    def key(self, tokenizer: Tokenizer) -> str:
        """Return a key that changes with the documents and the tokenizer.

        Args:
          tokenizer: the tokenizer.

        Raises:
          DataError: the corpus cannot be read.
        """
        raise NotImplementedError

    def total(self) -> int | None:
        """Return the bytes to read; `None` if that is unknown."""
        raise NotImplementedError

    def pieces(self) -> Iterator[Piece]:
        """Yield the corpus in pieces, in order.

        Raises:
          DataError: the corpus cannot be read.
        """
        raise NotImplementedError

    def texts_of(self, piece: Piece) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of the documents of a piece.

        Args:
          piece: one of `pieces`.

        Raises:
          DataError: a document cannot be read.
        """
        raise NotImplementedError

    def place(self, piece: Piece, name: str) -> str:
        """Return where a document is, for messages.

        Args:
          piece: the piece that it is in.
          name: its name.
        """
        return f"document '{name}'"

    def encode(self, piece: Piece, tokenizer: Tokenizer) -> Encoded:
        """Tokenize a piece.

        Args:
          piece: one of `pieces`.
          tokenizer: the tokenizer.

        Raises:
          DataError: a document cannot be read or tokenized.
        """
        try:
            return encode_texts(self.texts_of(piece), tokenizer, self.duplicates == "drop")
        except CannotEncode as error:
            raise DataError(f"cannot tokenize {self.place(piece, error.name)}: {error.reason}") from error

    def prepared(self, tokenizer: Tokenizer | None, cache: str | Path | None = None) -> TokenFile:
        """Return the token file of all documents, of both splits, which is prepared once, into the cache.

        Args:
          tokenizer: turns texts into token ids.
          cache: the cache; `None` is the default (see `cache_folder`).

        Raises:
          DataError: there is no tokenizer, or a document cannot be read or tokenized.
        """
        tokenizer = needed(tokenizer, self.name)
        return cached_corpus(self, self.key(tokenizer), tokenizer, cache)

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split; the documents of both are tokenized once, into the cache.

        Raises:
          DataError: there is no tokenizer, a document cannot be read or tokenized, or the split is empty.
        """
        return pack(self.prepared(tokenizer, cache).documents(split, self.heldout, self.name), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the size of the tokenizer's vocabulary.

        Args:
          tokenizer: the tokenizer.
        """
        return None if tokenizer is None else tokenizer.vocab_size

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the names and texts of all documents, duplicates included, of both splits."""
        return itertools.chain.from_iterable(map(self.texts_of, self.pieces()))

    def texts(self, split: str = "train") -> Iterator[str]:
        """Return the documents of one split as text; the corpus is read twice, first for the names.

        Args:
          split: "train" or "heldout".
        """
        hashes = np.fromiter((name_hash(name) for name, _ in self.documents()), np.uint64)
        in_split = select(hashes, split, self.heldout, self.name)
        return (text for (_, text), chosen in zip(self.documents(), in_split, strict=True) if chosen)


def needed(tokenizer: Tokenizer | None, corpus: str) -> Tokenizer:
    """Return the tokenizer.

    Args:
      tokenizer: the tokenizer, if there is one.
      corpus: name of the corpus.

    Raises:
      DataError: there is none.
    """
    if tokenizer is None:
        raise DataError(f"corpus '{corpus}' is text and needs a tokenizer; pass ByteTokenizer().")
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Records:
    """Texts that were read already, as the records of a piece.

    Args:
      names: the documents' names.
      texts: their texts.
    """

    names: list[str]
    texts: list[str]


def gathered(records: Iterator[tuple[str, str]], key: str) -> Iterator[Piece]:
    """Yield pieces of texts that this process reads.

    Args:
      records: names and texts.
      key: changes with the documents; a piece's key has its number, too.
    """
    names: list[str] = []
    texts: list[str] = []
    size = number = 0
    for name, text in records:
        names.append(name)
        texts.append(text)
        size += len(text)
        if size >= PIECE:
            yield Piece(f"{key} {number} {size}", Records(names, texts), size, size)
            names, texts, size, number = [], [], 0, number + 1
    if names:
        yield Piece(f"{key} {number} {size}", Records(names, texts), size, size)
