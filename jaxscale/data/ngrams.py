"""Vectors of documents from counts of their n-grams, for clustering without a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float32, UInt64

from jaxscale.config import register
from jaxscale.data.packing import Documents
from jaxscale.errors import DataError

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Embedder(Protocol):
    """Makes a vector of every document. Its `repr` names its settings: scores are cached by it."""

    def __call__(self, documents: Documents) -> Float32[np.ndarray, "n d"]:
        """Return a vector for each document, of which only the direction counts.

        Args:
          documents: the documents.
        """


@register
@dataclass(frozen=True)
class NGrams:
    """Counts of n-grams of token ids in hashed buckets (Weinberger et al. 2009), the same on every machine.

    The count c of an n-gram adds log(1 + c), with a sign from its hash, to one of `dimensions` buckets. Then buckets
    are standardised over the documents, in place of inverse document frequencies, and vectors scaled to length 1.

    Args:
      length: the longest n-gram, in tokens.
      dimensions: size of a vector, a power of two.
      most: tokens of a document that are read, from its start.

    Raises:
      DataError: a setting out of its range.
    """

    length: int = 4
    dimensions: int = 512
    most: int = 16_384

    def __post_init__(self) -> None:
        for name in ("length", "dimensions", "most"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise DataError(f"NGrams.{name} = {getattr(self, name)!r}: must be a whole number of at least 1.")
        if self.dimensions & (self.dimensions - 1):
            raise DataError(f"NGrams.dimensions = {self.dimensions}: must be a power of two, such as 512.")

    def __call__(self, documents: Documents) -> Float32[np.ndarray, "n d"]:
        """Return a vector of length 1 for each document.

        Args:
          documents: the documents.
        """
        vectors = np.zeros((len(documents.lengths), self.dimensions), np.float32)
        for n, (start, length) in enumerate(zip(documents.starts, documents.lengths, strict=True)):
            ids = np.asarray(documents.tokens[np.arange(start, start + min(length, self.most))])
            hashes, counts = np.unique(self._hashes(ids.astype(np.uint64)), return_counts=True)
            signs = np.where(hashes >> np.uint64(63), 1.0, -1.0)
            bucket = (hashes & np.uint64(self.dimensions - 1)).astype(np.int64)
            vectors[n] = np.bincount(bucket, np.log1p(counts) * signs, self.dimensions)
        vectors -= vectors.mean(axis=0)
        vectors /= np.maximum(vectors.std(axis=0), 1e-6)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)

    def _hashes(self, ids: UInt64[np.ndarray, " t"]) -> UInt64[np.ndarray, " h"]:
        hashes, out = ids + np.uint64(1), []
        with np.errstate(over="ignore"):
            for n in range(self.length):
                if n:
                    hashes = hashes[:-1] * _MULTIPLIER + ids[n:] + np.uint64(1)
                mixed = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                out.append(mixed ^ (mixed >> np.uint64(31)))
        return np.concatenate(out)
