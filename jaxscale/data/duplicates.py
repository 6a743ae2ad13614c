"""Exact duplicates: 16 bytes of memory for each document, and no more than twice that for a moment."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8


class SeenTexts:
    """A growing set of digests of 16 bytes, in sorted arrays of which each is at least twice as long as the next.

    So n digests are in at most log2(n) arrays, each digest is copied at most log2(n) times, and no Python object is
    made for any of them.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, digests: UInt8[np.ndarray, "n 16"]) -> Bool[np.ndarray, " n"]:
        """Add digests, and return which of them are new: not in the set, and the first of their kind here.

        Args:
          digests: one for each document.
        """
        keys = _keys(digests)
        _, first = np.unique(keys, return_index=True)
        new = np.zeros(len(keys), bool)
        new[first] = True
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            new &= run[places] != keys
        self._put(np.sort(keys[new]))
        return new

    def _put(self, run: np.ndarray) -> None:
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")
        if len(run):
            self._runs.append(run)


def _keys(digests: UInt8[np.ndarray, "n 16"]) -> np.ndarray:
    """Digests as sortable values of 16 bytes; a zero byte at the end of one is no different from its absence."""
    return np.ascontiguousarray(digests).view("S16").reshape(-1)
