"""Rows with a pass key somewhere in a long text of random tokens, which is to be repeated at their end."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxscale.config import register

DIGITS, WORDS = 10, 52
BEFORE, ASK = DIGITS + WORDS, DIGITS + WORDS + 1
VOCAB = DIGITS + WORDS + 2
"""Token ids: the digits, the text's, the token before a key, and the token that asks for it."""


@register
@dataclasses.dataclass(frozen=True)
class Passkey:
    """Pass-key retrieval (Mohtashami & Jaggi 2023, arXiv:2305.16300): which digits came after the marker?

    A row is a text of random words, in it at a random place the marker and the key's digits, and at its end the
    question and the same digits, of which the predictions alone count.

    Args:
      length: tokens of a row.
      digits: of a key.
      rows: number of rows, training and held-out ones together.
      seed: of the rows.
      depth: where the key is, from 0 (the row's begin) to 1; `None` is anywhere.
    """

    length: int = 512
    digits: int = 4
    rows: int = 100_000
    seed: int = 0
    depth: float | None = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, number))
        row = rng.integers(DIGITS, DIGITS + WORDS, self.length + 1)
        key = rng.integers(DIGITS, size=self.digits)
        places = self.length - 2 * self.digits - 1
        at = rng.integers(places) if self.depth is None else int(self.depth * (places - 1))
        row[at], row[at + 1 : at + 1 + self.digits] = BEFORE, key
        row[-1 - self.digits], row[-self.digits :] = ASK, key
        weights = np.zeros(self.length, np.float32)
        weights[-self.digits :] = 1
        return {"tokens": row[:-1].astype(np.int32), "targets": row[1:].astype(np.int32), "weights": weights}
