"""Reed–Solomon code over bytes, with rotating parity as in RAID 5 and 6: all processes store and send equally much.

The blob of each of `count` processes is cut into `count - parity` pieces. Stripe s has one piece of every process but
s, s + 1, ..., s + parity - 1 (mod count), which hold its parities: whichever `parity` processes are lost, each stripe
has lost at most that many of its pieces and parities. Method: Plank, "A Tutorial on Reed-Solomon Coding for
Fault-Tolerance in RAID-like Systems", with a Cauchy matrix; the placement is REFT's (arXiv:2310.12670).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

LARGEST = 256
"""Most processes and parities together: the Cauchy matrix needs that many different byte values."""

Bytes = np.ndarray
"""uint8, one dimension."""


@dataclasses.dataclass(frozen=True)
class Code:
    """The erasure code of a group of processes.

    Args:
      count: number of processes.
      parity: how many of them may be lost at once; below `count`.
    """

    count: int
    parity: int

    @property
    def pieces(self) -> int:
        """Number of pieces of a blob."""
        return self.count - self.parity

    def piece_size(self, blob: int) -> int:
        """Return the bytes of a piece if the largest blob has `blob` bytes."""
        return -(-blob // (64 * self.pieces)) * 64

    def holders(self, stripe: int) -> list[int]:
        """Return the processes that hold a stripe's parities, by row."""
        return [(stripe + row) % self.count for row in range(self.parity)]

    def givers(self, stripe: int) -> list[int]:
        """Return the processes with a piece in a stripe."""
        return [p for p in range(self.count) if p not in self.holders(stripe)]

    def stripes(self, process: int) -> list[int]:
        """Return the stripes of a process's pieces, in the order of the pieces."""
        return [s for s in range(self.count) if process not in self.holders(s)]

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """uint8 (parity, count): each process's factor in each parity; all 1 in the first, which is a plain XOR."""
        rows, columns = np.arange(self.parity), self.parity + np.arange(self.count)
        cauchy = INVERSE[rows[:, None] ^ columns[None, :]]
        return PRODUCT[cauchy, INVERSE[cauchy[:1]]]  # every square submatrix of a Cauchy matrix is invertible

    def fold(self, into: Bytes, piece: Bytes, row: int, process: int) -> None:
        """Add a process's piece to a parity in place, or remove it: in GF(256) both are the same.

        Args:
          into: the parity, uint8.
          piece: the piece, of the same length.
          row: the parity's row.
          process: the piece's process.
        """
        factor = self.matrix[row, process]
        np.bitwise_xor(into, piece if factor == 1 else PRODUCT[factor][piece], out=into)

    def recover(
        self, lost: set[int], piece: Callable[[int, int], Bytes], parity: Callable[[int, int], Bytes | None]
    ) -> Iterator[tuple[int, int, Bytes]]:
        """Recompute the pieces of lost processes.

        Args:
          lost: the processes whose blobs are missing.
          piece: (process, stripe) -> a piece of another process.
          parity: (stripe, row) -> a parity, or `None` if it is missing.

        Yields:
          process, stripe and piece.

        Raises:
          ValueError: a stripe has fewer parities than missing pieces.
        """
        for stripe in range(self.count):
            missing = [p for p in self.givers(stripe) if p in lost]
            parities = ((row, parity(stripe, row)) for row in range(self.parity)) if missing else iter(())
            rows = [(row, np.array(data)) for row, data in parities if data is not None][: len(missing)]
            if len(rows) < len(missing):
                raise ValueError(f"stripe {stripe} has lost {len(missing)} pieces and has {len(rows)} parities")
            for row, data in rows:
                for p in self.givers(stripe):
                    if p not in lost:
                        self.fold(data, piece(p, stripe), row, p)
            backwards = _inverse(self.matrix[np.ix_([row for row, _ in rows], missing)])
            for i, p in enumerate(missing):
                out = np.zeros_like(rows[0][1])
                for factor, (_, data) in zip(backwards[i], rows, strict=True):
                    out ^= PRODUCT[factor][data]
                yield p, stripe, out


def _field() -> tuple[np.ndarray, np.ndarray]:
    """Tables of products and inverses in GF(256), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    powers = [1]
    for _ in range(254):
        twice = powers[-1] << 1
        powers.append(twice ^ 0x11D if twice > 255 else twice)
    logs = np.zeros(256, int)
    logs[powers] = np.arange(255)
    product = np.asarray(powers, np.uint8)[(logs[:, None] + logs[None, :]) % 255]
    product[0] = product[:, 0] = 0
    inverse = np.asarray(powers, np.uint8)[-logs % 255]
    return product, inverse


PRODUCT, INVERSE = _field()


def _inverse(matrix: np.ndarray) -> np.ndarray:
    """Invert a matrix over GF(256) by Gauss-Jordan elimination."""
    size = len(matrix)
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], 1)
    for i in range(size):
        pivot = i + int(np.flatnonzero(work[i:, i])[0])
        work[[i, pivot]] = work[[pivot, i]]
        work[i] = PRODUCT[INVERSE[work[i, i]], work[i]]
        for j in range(size):
            if j != i:
                work[j] ^= PRODUCT[work[j, i], work[i]]
    return work[:, size:]
