"""How much attention moves between slow and fast memory, counted, against what is known to be needed.

Of two levels of memory, the fast one holding M numbers, exact attention of N queries and keys of width d moves

    N^2 d^2 / M    for M >= d^2: FlashAttention does (Dao et al. 2022, theorem 2), and nothing does better
    N^2 d / sqrt M for M <= d^2: as a product of matrices does, and here FlashAttention does worse

up to constant factors (Saha & Ye 2024, arXiv:2402.07443). Both algorithms are here, run on a machine that counts and
that refuses to hold more than M (`flash`, `small_cache`); and what our kernels move, counted along the list of tiles
that they walk (`tpu_traffic`, `gpu_traffic`).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxscale.errors import ConfigError
from pallas_kernels.flash_attention.masks import SKIP, Mask, Tokens, tile_table
from pallas_kernels.flash_attention.tpu_steps import Cut, Side, steps

# ---- what is needed


def needed(n: int, d: int, memory: int) -> float:
    """Numbers that exact attention has to move, up to a constant factor (Saha & Ye 2024, theorems 1 and 2).

    Args:
      n: queries, and keys.
      d: width of a head.
      memory: numbers that the fast memory holds.
    """
    return n * n * d * min(d / memory, 1 / math.sqrt(memory))


# ---- the two algorithms, counted


@dataclasses.dataclass
class Machine:
    """A fast memory of `limit` numbers beside a slow one without limit.

    Args:
      limit: numbers it holds.
      moved: loaded and stored so far.
      held: in it now.
      most: in it at once so far.
    """

    limit: int
    moved: int = 0
    held: int = 0
    most: int = 0

    def room(self, *shape: int) -> np.ndarray:
        """Zeros, float64, in the fast memory.

        Raises:
          ConfigError: it does not hold so much.
        """
        self.held += math.prod(shape)
        self.most = max(self.most, self.held)
        if self.held > self.limit:
            raise ConfigError(f"a fast memory of {self.limit} numbers is to hold {self.held}; give it more")
        return np.zeros(shape)

    def load(self, x: np.ndarray) -> np.ndarray:
        """A copy in the fast memory."""
        found = self.room(*x.shape)
        found[...] = x
        self.moved += x.size
        return found

    def store(self, where: np.ndarray, x: np.ndarray) -> None:
        """Writes to the slow memory, and frees."""
        where[...] = x
        self.moved += x.size
        self.free(x)

    def free(self, *arrays: np.ndarray) -> None:
        """Forgets."""
        self.held -= sum(x.size for x in arrays)


def flash(machine: Machine, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """FlashAttention: as many queries as fit stay, and keys come by one at a time (Dao et al. 2022; Dao 2023).

    Args:
      machine: what it runs on.
      q, k, v: (N, d), unscaled.

    Returns:
      (N, d).

    Raises:
      ConfigError: a fast memory that does not hold a query, its output and a key.
    """
    (n, d), out = q.shape, np.empty_like(v)
    rows = min(n, (machine.limit - d) // (2 * d + 3))
    if rows < 1:
        raise ConfigError(
            f"FlashAttention of width {d} needs a fast memory of {3 * d + 3} numbers, not {machine.limit}"
        )
    for i in range(0, n, rows):
        query = machine.load(q[i : i + rows])
        acc, top = machine.room(*query.shape), machine.room(len(query))
        total, score = machine.room(len(query)), machine.room(len(query))
        top[...] = -np.inf
        for j in range(n):
            key = machine.load(k[j])
            score[...] = query @ key
            machine.free(key)
            value = machine.load(v[j])
            for r in range(len(query)):  # a number at a time: nothing else is held
                higher = max(top[r], score[r])
                fade, weight = math.exp(top[r] - higher), math.exp(score[r] - higher)
                acc[r] = acc[r] * fade + weight * value
                total[r], top[r] = total[r] * fade + weight, higher
            machine.free(value)
        acc /= total[:, None]
        machine.store(out[i : i + rows], acc)
        machine.free(query, top, total, score)
    return out


def small_cache(machine: Machine, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The algorithm for a small fast memory: the scores are written out, in square tiles (Saha & Ye 2024, section 4).

    Both products are of matrices in tiles of t x t, t about sqrt(M), each made by columns and rows that are loaded one
    at a time; every row of the scores keeps its largest one and its sum beside it.

    Args:
      machine: what it runs on.
      q, k, v: (N, d), unscaled.

    Returns:
      (N, d).

    Raises:
      ConfigError: a fast memory of less than 5 numbers.
    """
    (n, d), out = q.shape, np.empty_like(v)
    t = max(int(math.sqrt(machine.limit + 4)) - 2, 1)  # t^2 + 4 t <= M
    scores, tops, totals = np.empty((n, n)), np.full(n, -np.inf), np.zeros(n)
    for i in range(0, n, t):
        rows = slice(i, i + t)
        for j in range(0, n, t):
            tile = machine.room(len(tops[rows]), len(tops[j : j + t]))
            for c in range(d):
                a, b = machine.load(q[rows, c]), machine.load(k[j : j + t, c])
                tile += np.outer(a, b)
                machine.free(a, b)
            top, total = machine.load(tops[rows]), machine.load(totals[rows])
            higher = machine.room(len(top))
            higher[...] = np.maximum(top, tile.max(1))
            total *= np.exp(top - higher)
            for r in range(len(top)):
                total[r] += sum(math.exp(x - higher[r]) for x in tile[r])
            machine.free(top)
            machine.store(tops[rows], higher)
            machine.store(totals[rows], total)
            machine.store(scores[rows, j : j + t], tile)
        for c in range(0, d, t):
            acc = machine.room(*out[rows, c : c + t].shape)
            top, total = machine.load(tops[rows]), machine.load(totals[rows])
            for j in range(n):
                weight, value = machine.load(scores[rows, j]), machine.load(v[j, c : c + t])
                weight[...] = np.exp(weight - top) / total
                acc += np.outer(weight, value)
                machine.free(weight, value)
            machine.free(top, total)
            machine.store(out[rows, c : c + t], acc)
    return out


# ---- our kernels


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a kernel moves between the device's memory and its own, in numbers of whatever dtype.

    Args:
      read, written: of queries, keys, values and outputs; the few numbers per row (log-sum-exp) are left out.
      held: of them in the kernel's memory at once, with the scores of a tile and what is summed.
    """

    read: int
    written: int
    held: int

    @property
    def moved(self) -> int:
        """Both ways."""
        return self.read + self.written


def tpu_traffic(cut: Cut, d: int, dv: int, own: Side | None = None) -> Traffic:
    """What the TPU's forward kernel moves, or with `own` a half of its backward pass.

    A block is brought when a step's index differs from that of the step before (Pallas's pipeline), along the steps
    that the kernel prefetches: `tpu_steps.steps`.

    Args:
      cut: how the arrays are cut, as `Cut.of_inputs` says.
      d, dv: widths of queries and keys, and of values.
      own: of the backward pass, the side whose cotangents are made.
    """
    side: Side = own or "queries"
    plan = steps(cut, Tokens(), side)
    mine = np.asarray(plan.own)
    if side == "queries":
        stays, comes = cut.q_tile, cut.k_tile
        heads, times = cut.h, 1
    else:
        stays, comes = cut.k_tile, cut.q_tile
        heads, times = cut.kv, cut.h // cut.kv
    read_own = (d if own is None else d + dv) if side == "queries" else d + dv
    read_other = d + dv
    made = {None: dv, "queries": d, "keys": d + dv}[own]
    begins = 1 + int((mine[1:] != mine[:-1]).sum())
    # A tile that stays is met by others one after the other, and the last of one may be the first of the next.
    meetings = len(mine) if times > 1 else _brought(np.asarray(plan.other))
    whole = cut.b * heads
    return Traffic(
        read=whole * (begins * stays * read_own + meetings * times * comes * read_other),
        written=whole * begins * stays * made,
        held=stays * (read_own + made) + comes * read_other + stays * comes,
    )


def gpu_traffic(
    mask: Mask, *, b: int, s: int, t: int, h: int, d: int, dv: int, keys: int, queries: int = 128
) -> Traffic:
    """What Hopper's forward kernel moves into and out of shared memory: of `gpu_forward`, by the tiles it visits.

    Args:
      mask: what is seen.
      b, s, t, h: examples, queries, keys, query heads.
      d, dv: widths of queries and keys, and of values.
      keys, queries: of a tile.
    """
    table = tile_table(mask, Tokens(), s=s, t=t, q_tile=queries, k_tile=keys)
    meetings, rows = int((table != SKIP).sum()), table.shape[0] * queries
    return Traffic(
        read=b * h * (rows * d + meetings * keys * (d + dv)),
        written=b * h * rows * dv,
        held=queries * (d + dv) + keys * (d + dv) + queries * keys,
    )


def _brought(indices: np.ndarray) -> int:
    return 1 + int((indices[1:] != indices[:-1]).sum())
