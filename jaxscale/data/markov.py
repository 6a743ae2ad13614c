"""Random documents from a Markov chain, for benchmarks and tests: there is something to learn, and no download."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.packing import Documents, pack
from jaxscale.data.split import name_hash, select
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError

EOS = 0
SUCCESSORS = np.array([0.7, 0.2, 0.07, 0.03])
"""Probabilities of a token's four successors.

The loss is log(vocab_size - 1) nats a token at first, and 0.87 once the chain is learned. A document's first token is
uniform; its loss stays at log(vocab_size - 1).
"""


@register(name="synthetic")
@dataclass(frozen=True)
class Synthetic:
    """Documents of a random first-order Markov chain, in which each token has four possible successors.

    Id 0 ends a document and opens it as an input, and occurs nowhere else. Lengths are uniform in
    [length / 2, 3 * length / 2].

    Args:
      vocab_size: number of token ids, at least 2.
      documents: number of documents.
      length: mean length of documents in tokens.
      seed: seed of the chain and the documents.
      heldout: fraction of documents held out.

    Raises:
      DataError: a number is too small.
    """

    vocab_size: int
    documents: int = 256
    length: int = 1024
    seed: int = 0
    heldout: float = 0.05
    name: ClassVar[str] = "synthetic"

    def __post_init__(self) -> None:
        for field, least in (("vocab_size", 2), ("documents", 1), ("length", 2)):
            if getattr(self, field) < least:
                raise DataError(f"synthetic.{field}={getattr(self, field)} is too small; use {least} or more.")

    def source(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split, generated in memory; `tokenizer` and `cache` are not used."""
        names = [f"document-{i}" for i in range(self.documents)]
        hashes = np.array([name_hash(name) for name in names], np.uint64)
        chosen = np.flatnonzero(select(hashes, split, self.heldout, self.name))
        tokens, lengths = self._generate()
        documents = Documents(
            name=self.name,
            fingerprint=hashlib.sha256(f"1 {self!r} {split}".encode()).hexdigest(),
            vocab_size=self.vocab_size,
            eos_id=EOS,
            tokens=tokens,
            starts=(np.cumsum(lengths) - lengths)[chosen],
            lengths=lengths[chosen],
        )
        return pack(documents, packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return `vocab_size`.

        Args:
          tokenizer: not used.
        """
        return self.vocab_size

    def _generate(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all tokens, concatenated (int32), and the length of each document with its eos (int64)."""
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed, 0], np.uint64)))
        successors = random.integers(1, self.vocab_size, (self.vocab_size, len(SUCCESSORS)), dtype=np.int32)
        least, most = max(self.length // 2, 1), self.length + self.length // 2
        lengths = random.integers(least, most, self.documents, endpoint=True)
        walk = np.zeros((most + 1, self.documents), np.int32)
        walk[0] = random.integers(1, self.vocab_size, self.documents)
        thresholds = np.cumsum(SUCCESSORS)[:-1]
        for t in range(1, most):  # all documents at once
            walk[t] = successors[walk[t - 1], np.searchsorted(thresholds, random.random(self.documents))]
        walk[lengths, np.arange(self.documents)] = EOS
        inside = np.arange(most + 1)[:, None] <= lengths
        return walk.T[inside.T], lengths + 1
