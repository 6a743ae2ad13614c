"""Shared by Hopper's attention kernels: the assignment of tiles to blocks, and the mask and the weights in registers.

A kernel is persistent: there are as many blocks as multiprocessors, and block i takes items i, i + blocks, ... of a
list; an item is one tile of one head. Heads whose other side fits in the L2 cache together run side by side, and among
them the tiles with the most visits come first, so that only short ones are left for the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.dropout import Drop, keeps
from pallas_kernels.flash_attention.inputs import Score
from pallas_kernels.flash_attention.masks import Mask, Visits, first_seen

plgpu: Any = mosaic_gpu  # its names differ between versions

ROWS = 64
"""Queries or keys of a warpgroup: the rows of one wgmma."""
WARPGROUPS = 2
"""Warpgroups that compute; one more copies memory."""
LOG2E = math.log2(math.e)
_L2 = 24 * 2**20  # bytes of one side's heads that should stay in the L2 cache: half of it


def swizzled(width: int, dtype: Any) -> tuple[Any, Any]:
    """Return transforms of rows of `width` elements in shared memory: the widest swizzle that divides a row."""
    size = jnp.dtype(dtype).itemsize
    bytes_ = next(b for b in (128, 64, 32) if width * size % b == 0)
    return plgpu.TilingTransform((8, bytes_ // size)), plgpu.SwizzleTransform(bytes_)


# ---- the assignment of tiles to blocks


@dataclasses.dataclass(frozen=True)
class Walk:
    """The items of a kernel and their distribution to blocks.

    Args:
      batch: examples.
      kv: key heads.
      heads: items of a key head at one tile: its query heads, or 1.
      tiles: tiles of the side that stays.
      group: (example, key head) pairs that run side by side.
      shared: there is one plan for all examples.
      blocks: blocks that share the items.
    """

    batch: int
    kv: int
    heads: int
    tiles: int
    group: int
    shared: bool
    blocks: int

    @classmethod
    def of(cls, target: Target, batch: int, kv: int, heads: int, visits: Visits, head_bytes: int) -> Walk:
        """Make the walk for visits of a side; `head_bytes` is the size of the other side's arrays for one key head."""
        shared, tiles = visits.count.shape[0] == 1, visits.count.shape[1]
        pairs = batch * kv
        group = max(n for n in range(1, pairs + 1) if pairs % n == 0 and n <= max(1, _L2 // head_bytes))
        blocks = min(target.cores, pairs * heads * tiles)
        return cls(batch, kv, heads, tiles, group, shared, blocks)

    def plan(self, visits: Visits) -> jax.Array:
        """Return int32 (B or 1, tiles, 3 + most visits), tiles with most visits first.

        Each line has a tile, the number of its full visits, the number of all visits, and the visits.
        """
        xp: Any = np if isinstance(visits.count, np.ndarray) else jnp
        order = xp.argsort(-visits.count, axis=-1, stable=True)
        index = np.broadcast_to(np.arange(self.tiles, dtype=np.int32), visits.count.shape)
        columns = (index[..., None], visits.full[..., None], visits.count[..., None], visits.tiles)
        rows = xp.concatenate([xp.asarray(c, np.int32) for c in columns], -1)
        return jnp.asarray(xp.take_along_axis(rows, order[..., None], 1))

    @property
    def items(self) -> int:
        """Number of items."""
        return self.batch * self.kv * self.heads * self.tiles

    def each(self, body: Callable[[Item, Any], Any], start: Any, plan: Any) -> Any:
        """Call `body(item, carry)` for every item of this block, with `start` as the first carry; return the last."""
        return lax.fori_loop(0, self.count(), lambda n, carry: body(self.item(n, plan), carry), start)

    def count(self) -> Any:
        """Return the number of items of this block."""
        return self.count_of(lax.axis_index("block"))

    def item(self, n: Any, plan: Any) -> Item:
        """Return this block's n-th item."""
        return self.item_of(lax.axis_index("block"), n, plan)

    def count_of(self, block: Any) -> Any:
        """Return the number of items of a block, at least one."""
        return lax.div(self.items - 1 - block, self.blocks) + 1

    def item_of(self, block: Any, n: Any, plan: Any) -> Item:
        """Return the n-th item of a block."""
        w = block + n * self.blocks
        side, inner = self.group * self.heads * self.tiles, self.group * self.heads
        pair = lax.div(w, side) * self.group + lax.div(lax.rem(w, inner), self.heads)
        rank = lax.div(lax.rem(w, side), inner)
        b = lax.div(pair, self.kv)
        return Item(n, b, lax.rem(pair, self.kv), lax.rem(w, self.heads), 0 if self.shared else b, rank, plan)


@dataclasses.dataclass(frozen=True)
class Item:
    """One tile of one head.

    Args:
      n: number of items that this block has had before.
      b: example.
      kv: key head.
      g: query head among those of the key head.
      row: example in the plan.
      rank: line of the plan.
      plan: a reference.
    """

    n: Any
    b: Any
    kv: Any
    g: Any
    row: Any
    rank: Any
    plan: Any

    @property
    def tile(self) -> Any:
        """Index of the tile, on the side that stays."""
        return self.plan[self.row, self.rank, 0]

    @property
    def full(self) -> Any:
        """Number of tiles of the other side that are fully visible; they come first."""
        return self.plan[self.row, self.rank, 1]

    @property
    def count(self) -> Any:
        """Number of visits."""
        return self.plan[self.row, self.rank, 2]

    def visit(self, n: Any) -> Any:
        """Return the n-th tile of the other side."""
        return self.plan[self.row, self.rank, 3 + n]


# ---- a ring of buffers in shared memory


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots that one warpgroup fills and others empty, in turns.

    Args:
      full: a barrier for each slot: it has been filled.
      free: a barrier for each slot: it has been emptied.
      slots: number of slots.
    """

    full: Any
    free: Any
    slots: int

    def slot(self, turn: Any) -> Any:
        """Return the slot of fill number `turn`."""
        return lax.rem(turn, self.slots)

    def to_fill(self, turn: Any) -> None:
        """Wait until the slot's last user is done."""
        pl.when(turn >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[self.slot(turn)]))

    def begin(self, fill: Callable[[Any], None], turns: Any) -> None:
        """Fill the slots before the first of an item's turns, where no warpgroup only copies."""
        for turn in range(self.slots):
            pl.when(turn < turns)(functools.partial(fill, turn))

    def go_on(self, fill: Callable[[Any], None], turn: Any, turns: Any) -> None:
        """Fill the slot of the turn before `turn` for a later one: by now the other warpgroup has emptied it, too."""
        later = turn - 1 + self.slots
        pl.when((turn > 0) & (later < turns))(lambda: fill(later))

    def drain(self, turns: Any) -> None:
        """Wait, after the last fill, for all slots: every phase of a barrier has to be waited for."""

        def wait(turn: Any, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(turn)])

        lax.fori_loop(lax.max(turns - self.slots, 0), turns, wait, None)


def run_warpgroups(
    target: Target, wg: Any, copier: bool, compute: Callable[[], None], copy: Callable[[], None]
) -> None:
    """Run `compute` in the warpgroups that compute and, with a copier, `copy` in one more, which leaves registers."""
    if not copier:
        compute()
        return

    @pl.when(wg < WARPGROUPS)
    def _() -> None:
        if not target.interpret:
            plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(wg == WARPGROUPS)
    def _() -> None:
        if not target.interpret:
            plgpu.set_max_registers(24, action="decrease")
        copy()


# ---- in registers


def product(a: Any, b: Any, shape: tuple[int, int], meanwhile: Callable[[], Any] | None = None) -> Any:
    """Return a @ b in float32, both in shared memory; with `meanwhile`, call it during the product and return both."""

    def run(acc: Any) -> Any:
        plgpu.wgmma(acc, a, b)
        made = None if meanwhile is None else meanwhile()
        return acc[...] if made is None else (acc[...], made)

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def accumulate(target: Target, sums: dict[str, Any], body: Callable[[Callable[[str, Any, Any], None]], None]) -> Any:
    """Run `body(add)`, where `add(name, a, b)` adds a @ b to a sum, with a in registers; return the finished sums."""
    if target.interpret:  # the interpreter's accumulators start at zero
        sums = dict(sums)

        def dot(name: str, a: Any, b: Any) -> None:
            sums[name] = sums[name] + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

        body(dot)
        return sums

    def run(refs: dict[str, Any]) -> None:
        body(lambda name, a, b: plgpu.wgmma(refs[name], a, b))

    return pl.run_state(run)({name: plgpu.ACC.init(x) for name, x in sums.items()})


def again(wg: Any, turn: Any) -> Any:
    """Return the number of a warpgroup by an expression that the compiler cannot simplify.

    An operand that stays during a loop has dozens of wgmma descriptors. The compiler would compute them before the loop
    and keep them in registers that are needed for sums.
    """
    return lax.rem(wg + WARPGROUPS * turn, WARPGROUPS)


def spread(x: Any, shape: tuple[int, int], axis: int) -> Any:
    """Broadcast one value per row (axis 0) or per column (axis 1) to a matrix."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def zeros(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> Any:
    """Return registers filled with a number."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@dataclasses.dataclass(frozen=True)
class Seen:
    """The mask of a tile whose rows are queries, or keys when `turned`.

    Args:
      mask: causal and window; block-sparse blocks are whole tiles, which `visits` handles.
      s: number of queries before padding.
      t: number of keys before padding.
      segments: references (B, S) and (B, T), or `None`.
      positions: references (B, S) and (B, T), or `None`.
      turned: rows are keys and columns queries.
      drop: references to the arrays of `dropout.Drop`, or `None`.
    """

    mask: Mask
    s: int
    t: int
    segments: tuple[Any, Any] | None
    positions: tuple[Any, Any] | None
    turned: bool = False
    drop: Drop | None = None

    def hide(self, b: Any, q0: Any, k0: Any, blank: float, *xs: Any) -> tuple[Any, ...]:
        """Return arrays over queries from q0 and keys from k0, with `blank` where the query does not see the key."""
        shape, layout = xs[0].shape, plgpu.Layout.WGMMA
        q_axis, k_axis = (1, 0) if self.turned else (0, 1)
        seen: Any = None

        def load(ref: Any, start: Any, axis: int) -> Any:
            return _load(ref.at[b, pl.ds(start, shape[axis])], axis)

        def index(start: Any, axis: int) -> Any:
            return plgpu.broadcasted_iota(jnp.int32, shape[axis : axis + 1], 0, layout=layout.reduce(1 - axis)) + start

        def both(compare: Callable[[Any, Any], Any], of_q: Any, of_k: Any) -> Any:
            # Vectors are broadcast as late as possible: differences of all pairs would fill the registers.
            more = compare(spread(of_q, shape, q_axis), spread(of_k, shape, k_axis))
            return more if seen is None else seen & more

        if self.mask.causal or self.mask.window is not None:
            if self.positions is not None:
                q, k = load(self.positions[0], q0, q_axis), load(self.positions[1], k0, k_axis)
            else:
                q, k = index(q0 + (self.t - self.s), q_axis), index(k0, k_axis)
            if self.mask.causal:
                seen = both(operator.ge, q, k)
            if self.mask.window is not None:
                seen = both(operator.le, first_seen(q, self.mask.window), k)
                if not self.mask.causal:
                    seen = both(operator.ge, q, first_seen(k, self.mask.window))
        if self.segments is not None:
            seen = both(operator.eq, load(self.segments[0], q0, q_axis), load(self.segments[1], k0, k_axis))
        return xs if seen is None else tuple(jnp.where(seen, x, blank) for x in xs)

    def keeps(self, rate: float, b: Any, head: Any, q0: Any, k0: Any, shape: tuple[int, int]) -> Any:
        """Return which weights of queries from q0 and keys from k0 dropout keeps."""
        assert self.drop is not None
        q_axis, k_axis = (1, 0) if self.turned else (0, 1)
        seeds, q, k = self.drop
        of_q = _load(q.at[b, pl.ds(q0, shape[q_axis])], q_axis)
        of_k = _load(k.at[b, pl.ds(k0, shape[k_axis])], k_axis)
        words = seeds[b, head, 0], seeds[b, head, 1]
        return keeps(rate, words, spread(of_q, shape, q_axis), spread(of_k, shape, k_axis))


def _load(ref: Any, axis: int) -> Any:
    """Load what belongs to the rows (axis 0) or columns (axis 1) of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


@dataclasses.dataclass(frozen=True)
class Weigher:
    """Computes weights from products of queries and keys, in base 2.

    Args:
      score: scale, soft-cap and shift.
    """

    score: Score

    def early(self, dtype: Any) -> float:
        """Return the factor of weights' gradients before rounding; the rest of the scale is applied later.

        It is a power of two, so that no digits are lost; bfloat16 has enough range to do without.
        """
        scale = abs(self.score.scale)
        return 2.0 ** round(math.log2(scale)) if dtype == jnp.float16 and scale > 0 else 1.0

    @property
    def grown(self) -> float:
        """The factor of the weights that dropout keeps."""
        return 1 / (1 - self.score.dropout)

    def of_scores(self, w: Any, dp: Any, common: Any) -> Any:
        """Return the cotangents of the scores.

        Args:
          w: of `weights`; with dropout, negative where a weight is dropped.
          dp: cotangents of the weights that are kept.
          common: of the rows, broadcast, or `None` for sigmoid.
        """
        if self.score.dropout:
            dp, w = jnp.where(w > 0, dp * self.grown, 0.0), jnp.abs(w)
        return w * (dp if common is None else dp - common)

    @property
    def folded(self) -> float | None:
        """The factor of raw products that is applied in the exponent, which costs nothing; `None` if it cannot be."""
        scale = self.score.scale * LOG2E
        return scale if self.score.softcap is None and scale > 0 and self.score.kind == "softmax" else None

    def base2(self, raw: Any) -> tuple[Any, Any]:
        """Return scores in units of log 2, and the derivative of the soft-cap, or `None`."""
        cap = self.score.softcap
        if cap is None:
            x = raw * (self.score.scale * LOG2E)
            return (x + self.score.shift * LOG2E if self.score.shift else x), None
        # tanh(z) = 1 - 2r, as exact as float32; the hardware's own is off by 2**-11 (PTX ISA, tanh.approx).
        r = 1 / (1 + jnp.exp2(raw * (2 * LOG2E * self.score.scale / cap)))
        return (cap + self.score.shift) * LOG2E - r * (2 * cap * LOG2E), 4 * r * (1 - r)

    def weights(self, raw: Any, lse: Callable[[], Any], hide: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the weights, and the factor of their cotangents less the row's common term.

        Args:
          raw: products of queries and keys.
          lse: returns the log-sum-exp in base 2, broadcast; not called for sigmoid.
          hide: makes invisible scores minus infinity, or leaves them.
        """
        fold = self.folded
        if fold is not None:
            p = jnp.exp2(hide(raw) * fold - lse())
            return p, p
        x, slope = self.base2(raw)
        x = hide(x)
        if self.score.kind == "softmax":
            p = w = jnp.exp2(x - lse())
        else:
            p = 1 / (1 + jnp.exp2(-x))
            w = p * (1 - p)
        return p, w if slope is None else w * slope
