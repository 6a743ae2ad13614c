"""Encoded documents: what tokenizing makes of consecutive documents of a corpus, as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8, UInt64

from jaxscale.data.split import name_hash
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

Document = tuple[str, Integer[np.ndarray, " t"]] | tuple[str, Integer[np.ndarray, " t"], Bool[np.ndarray, " t"]]
"""Name and token ids of a document, and optionally a mask of the tokens to learn."""

TEXT_DIGEST = 16
"""Bytes of the digest by which equal texts are recognised (BLAKE2b)."""

_TOGETHER = 2**18
"""Characters that are tokenized in one call; a tokenizer needs up to 200 bytes of memory for each."""


@dataclass(frozen=True)
class Encoded:
    """Consecutive documents: n of them, t tokens.

    Args:
      tokens: the ids of all documents, concatenated, each with its eos, in the dtype of token files.
      lengths: the tokens of each document, its eos included.
      hashes: `name_hash` of each document's name.
      learned: 1 for each token to learn, if documents have a mask.
      texts: the digest of each document's text, if duplicates are to be dropped.
      size: bytes of the documents' texts in UTF-8; 0 if they were not texts.
    """

    tokens: Integer[np.ndarray, " t"]
    lengths: Int64[np.ndarray, " n"]
    hashes: UInt64[np.ndarray, " n"]
    learned: UInt8[np.ndarray, " t"] | None = None
    texts: UInt8[np.ndarray, "n 16"] | None = None
    size: int = 0

    def only(self, chosen: Bool[np.ndarray, " n"]) -> Encoded:
        """Return some of the documents; `size` stays that of all that were read.

        Args:
          chosen: which documents.
        """
        tokens = np.repeat(chosen, self.lengths)
        return Encoded(
            self.tokens[tokens],
            self.lengths[chosen],
            self.hashes[chosen],
            None if self.learned is None else self.learned[tokens],
            None if self.texts is None else self.texts[chosen],
            self.size,
        )


def dtype_of(vocab_size: int) -> str:
    """Return the dtype of ids in a token file.

    Args:
      vocab_size: the largest id plus 1.
    """
    return "<u2" if vocab_size <= 2**16 else "<u4"


@dataclass
class _Builder:
    tokenizer: Tokenizer
    masked: bool
    tokens: list[np.ndarray] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, name: str, ids: np.ndarray, mask: np.ndarray | None = None, digest: bytes = b"") -> None:
        """Add a document; one without ids is left out."""
        if len(ids) <= self.masked:
            return
        vocab_size = self.tokenizer.vocab_size
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids.max() if ids.max() >= vocab_size else ids.min()
            raise DataError(f"document '{name}' has id {wrong}, outside the vocabulary 0..{vocab_size - 1}.")
        kind = np.dtype(dtype_of(vocab_size))
        self.tokens.append(ids.astype(kind))
        if not self.masked:
            self.tokens.append(np.array([self.tokenizer.eos_id], kind))
        elif mask is not None:
            self.masks.append(mask.astype(np.uint8))
        self.lengths.append(len(ids) + (not self.masked))
        self.hashes.append(name_hash(name))
        self.texts.append(digest)

    def result(self, with_texts: bool = False) -> Encoded:
        kind = dtype_of(self.tokenizer.vocab_size)
        return Encoded(
            np.concatenate(self.tokens) if self.tokens else np.array([], kind),
            np.array(self.lengths, np.int64),
            np.array(self.hashes, np.uint64),
            np.concatenate([*self.masks, np.array([], np.uint8)]) if self.masked else None,
            np.frombuffer(b"".join(self.texts), np.uint8).reshape(-1, TEXT_DIGEST) if with_texts else None,
            self.size,
        )


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer, masked: bool = False) -> Encoded:
    """Return documents that are token ids already.

    Args:
      documents: names and token ids, and a mask of the tokens to learn if `masked`.
      tokenizer: the tokenizer that encoded them.
      masked: whether documents have a mask; their ids are then unchanged, and no eos is added.

    Raises:
      DataError: an id is outside of the vocabulary.
    """
    builder = _Builder(tokenizer, masked)
    for name, ids, *mask in documents:
        builder.add(name, ids, mask[0] if mask else None)
    return builder.result()


def encode_texts(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer, with_digests: bool = False) -> Encoded:
    """Tokenize texts.

    Args:
      texts: names and texts.
      tokenizer: the tokenizer; its `encode_batch(texts) -> list of ids`, if it has one, is used.
      with_digests: whether to compute the digest of each text.

    Raises:
      DataError: a text cannot be encoded; the error has its name.
    """
    builder = _Builder(tokenizer, masked=False)
    for batch in _batches(texts):
        for (name, text), ids in zip(batch, _encode(batch, tokenizer), strict=True):
            raw = text.encode("utf-8", "surrogatepass")
            builder.size += len(raw)
            digest = hashlib.blake2b(raw, digest_size=TEXT_DIGEST).digest() if with_digests else b""
            builder.add(name, ids, None, digest)
    return builder.result(with_digests)


class CannotEncode(DataError):
    """A text that a tokenizer cannot encode.

    Args:
      name: name of the document.
      reason: the tokenizer's message.
    """

    def __init__(self, name: str, reason: str):
        super().__init__(f"cannot tokenize '{name}': {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.reason)


def _batches(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    size = 0
    for item in texts:
        if batch and size + len(item[1]) > _TOGETHER:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item[1])
    if batch:
        yield batch


def _encode(batch: list[tuple[str, str]], tokenizer: Tokenizer) -> list[np.ndarray]:
    together = getattr(tokenizer, "encode_batch", None)
    if together is not None and len(batch) > 1:
        try:
            return together([text for _, text in batch])
        except DataError:
            pass  # one by one, to name the document
    result = []
    for name, text in batch:
        try:
            result.append(tokenizer.encode(text))
        except DataError as error:
            raise CannotEncode(name, str(error)) from error
    return result
