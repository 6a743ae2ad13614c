"""Pieces of a corpus: what one process tokenizes at a time, and what a killed preparation does not do again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from jaxscale.data.encoded import Encoded
from jaxscale.data.tokenizer import Tokenizer

PIECE = 2**22
"""Bytes of text in a piece, about: a corpus of this version is always divided in the same way."""


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of a corpus.

    Args:
      key: changes when the documents do, and differs between pieces.
      records: the documents as they were read, or their files, in a form that can be pickled.
      size: bytes of files that were read for it, of which `Divided.total` is the sum.
      text: bytes of its text, about.
    """

    key: str
    records: Any
    size: int
    text: int


class Divided(Protocol):
    """A corpus that can be prepared piece by piece, by several processes."""

    @property
    def name(self) -> str:
        """Name of the corpus."""
        ...

    @property
    def duplicates(self) -> str:
        """Whether to "keep" or "drop" documents with the text of an earlier one."""
        ...

    @property
    def processes(self) -> int | None:
        """Number of processes that tokenize; `None` is one for each core."""
        ...

    @property
    def masked(self) -> bool:
        """Whether documents have a mask of the tokens to learn."""
        ...

    def origin(self) -> str:
        """Return what identifies the corpus while its files change, such as their glob."""
        ...

    def total(self) -> int | None:
        """Return the sum of the pieces' `size`; `None` if it is unknown."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces, in order.

        Raises:
          DataError: the corpus cannot be read.
        """
        ...

    def encode(self, piece: Piece, tokenizer: Tokenizer) -> Encoded:
        """Tokenize a piece; other processes call it on a copy of the corpus.

        Args:
          piece: one of `pieces`.
          tokenizer: the tokenizer.

        Raises:
          DataError: a document cannot be read or tokenized.
        """
        ...
