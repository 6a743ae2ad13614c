"""Reed–Solomon code over bytes, its parity dealt around the group as in RAID 5 and 6: all hold and send the same.

The blob of each of `count` processes is cut into `count - parity` pieces. Stripe s joins one piece of every process but
s, s + 1, ..., s + parity - 1 (mod count), and these hold its parities: whichever `parity` processes are lost, each
stripe has lost at most as many of its pieces and parities. Method: Plank, "A Tutorial on Reed-Solomon Coding for
Fault-Tolerance in RAID-like Systems", with a Cauchy matrix; the dealing is REFT's (arXiv:2310.12670).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

LARGEST = 256
"""Processes and parities together: as many points as bytes have values."""

Bytes = np.ndarray
"""uint8, one dimension."""


@dataclasses.dataclass(frozen=True)
class Code:
    """How a group is coded.

    Args:
      count: processes.
      parity: how many of them may be lost; below `count`.
    """

    count: int
    parity: int

    @property
    def pieces(self) -> int:
        """Of a blob."""
        return self.count - self.parity

    def piece_size(self, blob: int) -> int:
        """Bytes of a piece, where the largest blob has `blob`."""
        return -(-blob // (64 * self.pieces)) * 64

    def holders(self, stripe: int) -> list[int]:
        """The processes that hold a stripe's parities, by row."""
        return [(stripe + row) % self.count for row in range(self.parity)]

    def givers(self, stripe: int) -> list[int]:
        """The processes with a piece in it."""
        return [p for p in range(self.count) if p not in self.holders(stripe)]

    def stripes(self, process: int) -> list[int]:
        """The stripes of a process's pieces, in the order of the pieces."""
        return [s for s in range(self.count) if process not in self.holders(s)]

    def stripe_held(self, process: int, row: int) -> int:
        """The stripe of which a process holds parity `row`."""
        return (process - row) % self.count

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """(parity, count): what a process's piece is multiplied by in each parity; the first is a plain XOR."""
        rows, columns = np.arange(self.parity), self.parity + np.arange(self.count)
        cauchy = INVERSE[rows[:, None] ^ columns[None, :]]
        return PRODUCT[cauchy, INVERSE[cauchy[:1]]]  # of a Cauchy matrix every square part can be inverted

    def fold(self, into: Bytes, piece: Bytes, row: int, process: int) -> None:
        """Adds a process's piece to a parity, or takes it out again: both are the same."""
        factor = self.matrix[row, process]
        np.bitwise_xor(into, piece if factor == 1 else PRODUCT[factor][piece], out=into)

    def recover(
        self, lost: set[int], piece: Callable[[int, int], Bytes], parity: Callable[[int, int], Bytes | None]
    ) -> Iterator[tuple[int, int, Bytes]]:
        """The pieces of lost processes.

        Args:
          lost: whose blob is missing.
          piece: (process, stripe) -> what another process gave.
          parity: (stripe, row) -> a parity, or `None` if it is missing.

        Yields:
          process, stripe and piece.

        Raises:
          ValueError: too much is lost.
        """
        for stripe in range(self.count):
            missing = [p for p in self.givers(stripe) if p in lost]
            found = ((row, parity(stripe, row)) for row in range(self.parity)) if missing else iter(())
            rows = [(row, np.array(data)) for row, data in found if data is not None][: len(missing)]
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
    """Products and inverses in GF(256), modulo x^8 + x^4 + x^3 + x^2 + 1."""
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
    """Gauss and Jordan."""
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
