"""Counts of the numbers that attention moves between slow and fast memory, beside the known lower bounds.

With a fast memory of M numbers, exact attention of N queries and keys of width d has to move, up to constant factors,

    N^2 d^2 / M    for M >= d^2: FlashAttention reaches this bound (Dao et al. 2022, theorem 2)
    N^2 d / sqrt M for M <= d^2: a tiled matrix product reaches it, and FlashAttention moves more

(Saha & Ye 2024, arXiv:2402.07443). `flash` and `small_cache` run both algorithms on a machine that counts, and that
refuses to hold more than M numbers. `tpu_traffic` and `gpu_traffic` count what our kernels move along their lists of
tiles.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxscale.errors import ConfigError
from pallas_kernels.flash_attention.masks import SKIP, Mask, Tokens, tile_table
from pallas_kernels.flash_attention.tpu_steps import Cut, Side, steps

# ---- lower bound


def needed(n: int, d: int, memory: int) -> float:
    """Numbers that exact attention has to move, up to a constant factor (Saha & Ye 2024, theorems 1 and 2).

    Args:
      n: number of queries and of keys.
      d: width of a head.
      memory: numbers that the fast memory holds.
    """
    return n * n * d * min(d / memory, 1 / math.sqrt(memory))


# ---- the two algorithms, counted


@dataclasses.dataclass
class Machine:
    """A fast memory of `limit` numbers beside a slow one without limit.

    Args:
      limit: numbers that the fast memory can hold.
      moved: numbers loaded and stored so far.
      held: numbers in the fast memory now.
      most: most numbers in the fast memory so far.
    """

    limit: int
    moved: int = 0
    held: int = 0
    most: int = 0

    def allocate(self, *shape: int) -> np.ndarray:
        """Allocate float64 zeros in the fast memory.

        Raises:
          ConfigError: the fast memory is too small.
        """
        self.held += math.prod(shape)
        self.most = max(self.most, self.held)
        if self.held > self.limit:
            raise ConfigError(f"a fast memory of {self.limit} numbers cannot hold {self.held}; raise its limit")
        return np.zeros(shape)

    def load(self, x: np.ndarray) -> np.ndarray:
        """Copy an array to the fast memory."""
        copy = self.allocate(*x.shape)
        copy[...] = x
        self.moved += x.size
        return copy

    def store(self, where: np.ndarray, x: np.ndarray) -> None:
        """Write an array to the slow memory, and free it."""
        where[...] = x
        self.moved += x.size
        self.free(x)

    def free(self, *arrays: np.ndarray) -> None:
        """Free arrays in the fast memory."""
        self.held -= sum(x.size for x in arrays)


def flash(machine: Machine, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """FlashAttention: as many queries as fit stay in fast memory; keys are loaded one at a time (Dao et al. 2022).

    Args:
      machine: the memory that counts.
      q: queries (N, d), not scaled.
      k: keys (N, d).
      v: values (N, d).

    Returns:
      attention's output (N, d).

    Raises:
      ConfigError: the fast memory cannot hold a query, its output and a key.
    """
    (n, d), out = q.shape, np.empty_like(v)
    rows = min(n, (machine.limit - d) // (2 * d + 3))
    if rows < 1:
        raise ConfigError(
            f"FlashAttention of width {d} needs a fast memory of {3 * d + 3} numbers, not {machine.limit}"
        )
    for i in range(0, n, rows):
        query = machine.load(q[i : i + rows])
        acc, top = machine.allocate(*query.shape), machine.allocate(len(query))
        total, score = machine.allocate(len(query)), machine.allocate(len(query))
        top[...] = -np.inf
        for j in range(n):
            key = machine.load(k[j])
            score[...] = query @ key
            machine.free(key)
            value = machine.load(v[j])
            for r in range(len(query)):  # one number at a time, without further buffers
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
    """Attention for a small fast memory: scores are written to slow memory in square tiles (Saha & Ye 2024, section 4).

    Both products are tiled with tiles of t x t, t about sqrt(M); a tile is accumulated from columns and rows that are
    loaded one at a time. The largest score and the sum of each row are stored as well.

    Args:
      machine: the memory that counts.
      q: queries (N, d), not scaled.
      k: keys (N, d).
      v: values (N, d).

    Returns:
      attention's output (N, d).

    Raises:
      ConfigError: the fast memory holds less than 5 numbers.
    """
    (n, d), out = q.shape, np.empty_like(v)
    t = max(int(math.sqrt(machine.limit + 4)) - 2, 1)  # t^2 + 4 t <= M
    scores, tops, totals = np.empty((n, n)), np.full(n, -np.inf), np.zeros(n)
    for i in range(0, n, t):
        rows = slice(i, i + t)
        for j in range(0, n, t):
            tile = machine.allocate(len(tops[rows]), len(tops[j : j + t]))
            for c in range(d):
                a, b = machine.load(q[rows, c]), machine.load(k[j : j + t, c])
                tile += np.outer(a, b)
                machine.free(a, b)
            top, total = machine.load(tops[rows]), machine.load(totals[rows])
            higher = machine.allocate(len(top))
            higher[...] = np.maximum(top, tile.max(1))
            total *= np.exp(top - higher)
            for r in range(len(top)):
                total[r] += sum(math.exp(x - higher[r]) for x in tile[r])
            machine.free(top)
            machine.store(tops[rows], higher)
            machine.store(totals[rows], total)
            machine.store(scores[rows, j : j + t], tile)
        for c in range(0, d, t):
            acc = machine.allocate(*out[rows, c : c + t].shape)
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
    """Numbers that a kernel moves between device memory and its fast memory, whatever their dtype.

    Args:
      read: numbers of queries, keys and values; the few numbers per row (log-sum-exp) are left out.
      written: numbers of outputs, without those few as well.
      held: numbers in fast memory at the same time: blocks, the scores of a tile, and accumulators.
    """

    read: int
    written: int
    held: int

    @property
    def moved(self) -> int:
        """Numbers read and written."""
        return self.read + self.written


def tpu_traffic(cut: Cut, d: int, dv: int, own: Side | None = None) -> Traffic:
    """Count what the TPU's forward kernel moves or, with `own`, one of its two backward kernels.

    Pallas loads a block when its index differs from that of the step before, along the list of steps that the kernel
    prefetches (`tpu_steps.steps`).

    Args:
      cut: the tiling of the arrays (see `Cut.of_inputs`).
      d: width of queries and keys.
      dv: width of values.
      own: for a backward kernel, the side whose cotangents it computes; `None` for the forward kernel.
    """
    side: Side = own or "queries"
    plan = steps(cut, Tokens(), side)
    mine, other = (np.asarray(x)[np.asarray(plan.todo) != 0] for x in (plan.own, plan.other))
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
    # A resident tile visits the others in order. The last one of a tile may be the first of the next: no load then.
    meetings = len(mine) if times > 1 else _brought(other)
    whole = cut.b * heads
    return Traffic(
        read=whole * (begins * stays * read_own + meetings * times * comes * read_other),
        written=whole * begins * stays * made,
        held=stays * (read_own + made) + comes * read_other + stays * comes,
    )


def gpu_traffic(
    mask: Mask, *, b: int, s: int, t: int, h: int, d: int, dv: int, keys: int, queries: int = 128
) -> Traffic:
    """Count what Hopper's forward kernel (`gpu_forward`) moves into and out of shared memory, by the tiles it visits.

    Args:
      mask: the attention mask.
      b: batch rows.
      s: queries.
      t: keys.
      h: query heads.
      d: width of queries and keys.
      dv: width of values.
      keys: keys of a tile.
      queries: queries of a tile.
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
