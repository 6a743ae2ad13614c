"""What the three TPU kernels share: how arrays are cut into tiles, and the walk over the tiles that are seen.

A kernel stays at a tile of one side, its own (queries or keys), and meets those tiles of the other side of which it
sees something. Every meeting is one step of the grid; the steps are listed beforehand, and the list is prefetched into
SMEM, where the index maps read which tiles to bring. A tile that nobody sees is thus never brought, and where the list
is known while tracing it is no step either. Where it depends on data, there are as many steps as the part of the mask
that does not depend on it leaves, and those left over at the end do nothing and bring nothing.

Scores are (own, other). What belongs to a row of them, a number for every token of the own side, is a column of 128
equal lanes, made once for each tile; what belongs to a column lies along the lanes of a row as it comes from memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import SKIP, Mask, Tokens, tile_table, visits
from pallas_kernels.tiles import lookup

LANES = 128

VMEM_LIMIT = 48 * 2**20
"""Bytes that Mosaic may use; the smallest VMEM among v5e, v5p, v6e and tpu7x has 64 MiB."""

Side = Literal["queries", "keys"]
Refs = Mapping[str, Any]
"""A kernel's references by name."""

_OF_KEYS = ("k", "v", "dk", "dv", "k_segments", "k_positions")
_ROWS = ("lse", "delta")
_BEGIN, _FULL, _PARTIAL, _END = 1, 2, 4, 8  # what is to be done in a step


# ---- tiles


@dataclasses.dataclass(frozen=True)
class Cut:
    """How attention's arrays are cut.

    Args:
      mask: what is seen.
      b, s, t, h, kv: examples, queries, keys, query heads, key heads.
      q_tile, k_tile: queries and keys of a tile, the last one filled up with zeros; 0 if none keeps a mask's blocks.
      segments, positions: whether tokens have them.
    """

    mask: Mask
    b: int
    s: int
    t: int
    h: int
    kv: int
    q_tile: int
    k_tile: int
    segments: bool
    positions: bool

    @classmethod
    def of(
        cls,
        target: Target,
        kernel: str,
        mask: Mask,
        *,
        q: tuple[int, ...],
        v: tuple[int, ...],
        dtype: str,
        segments: bool,
        positions: bool,
    ) -> Cut:
        """By the table of tiles.

        Args:
          target: what for.
          kernel: "forward" or "backward".
          mask: what is seen.
          q, v: shapes of queries and values.
          dtype: their dtype.
          segments, positions: whether tokens have them.
        """
        (b, s, h, d), (_, t, kv, dv) = q, v
        tile = lookup("flash_attention", target.kind or "TPU", kernel=kernel, dtype=dtype, width=max(d, dv))
        blocks = mask.blocks
        q_tile = _fit(tile["q"], s, None if blocks is None else blocks.query)
        k_tile = _fit(tile["k"], t, None if blocks is None else blocks.key)
        return cls(mask, b, s, t, h, kv, q_tile, k_tile, segments, positions)

    @classmethod
    def of_inputs(cls, target: Target, kernel: str, inputs: Inputs, mask: Mask) -> Cut:
        """The same, of arrays."""
        q, _, v, _, tokens = inputs
        return cls.of(
            target,
            kernel,
            mask,
            q=q.shape,
            v=v.shape,
            dtype=q.dtype.name,
            segments=tokens.q_segments is not None,
            positions=tokens.q_positions is not None,
        )

    def wide(self, x: jax.Array, side: Side) -> jax.Array:
        """(B, S, H, D) or (B, T, K, D) as (B, heads, whole tiles, whole lanes); so it lies in memory anyway."""
        x = jnp.pad(x, ((0, 0), (0, self._missing(side)), (0, 0), (0, -x.shape[3] % LANES)))
        return x.transpose(0, 2, 1, 3)

    def narrow(self, x: jax.Array, length: int, width: int) -> jax.Array:
        """The way back, without what was filled up."""
        return x.transpose(0, 2, 1, 3)[:, :length, :, :width]

    def rows(self, x: jax.Array) -> jax.Array:
        """(B, S, H) as (B, H, 1, whole tiles)."""
        return jnp.pad(x, ((0, 0), (0, self._missing("queries")), (0, 0))).transpose(0, 2, 1)[:, :, None]

    def unrows(self, x: jax.Array) -> jax.Array:
        """The way back."""
        return x[:, :, 0].transpose(0, 2, 1)[:, : self.s]

    def tokens(self, tokens: Tokens) -> dict[str, jax.Array]:
        """Segments and positions by name, as (B, 1, whole tiles)."""
        found = {}
        for name, x in zip(Tokens._fields, tokens, strict=True):
            if x is not None:
                side: Side = "keys" if name in _OF_KEYS else "queries"
                found[name] = jnp.pad(x, ((0, 0), (0, self._missing(side))))[:, None]
        return found

    def _missing(self, side: Side) -> int:
        length, tile = (self.s, self.q_tile) if side == "queries" else (self.t, self.k_tile)
        return -length % tile


def _fit(tile: int, length: int, block: int | None) -> int:
    """A tile's length: as few tiles as `tile` allows, of one size; a divisor of a mask's blocks, 0 if there is none."""
    step = min(LANES, tile)
    if block is not None and block < length:
        common = math.gcd(tile, block)
        return common if common % step == 0 else 0
    return -(-length // -(-length // tile) // step) * step


# ---- steps


class Steps(NamedTuple):
    """The list of meetings: int32, (1 or B) x `length` numbers each.

    Args:
      own, other: which tiles meet.
      todo: what is to be done: begin, add a full tile, add one with its mask, end; or nothing.
      length: how many there are for an example.
      each: whether every example has its own.
    """

    own: Any
    other: Any
    todo: Any
    length: int
    each: bool


def step_count(cut: Cut, own: Side) -> int:
    """How many steps an example may need, whatever segments and positions say."""
    mask = dataclasses.replace(cut.mask, causal=False, window=None) if cut.positions else cut.mask
    table = tile_table(mask, Tokens(), s=cut.s, t=cut.t, q_tile=cut.q_tile, k_tile=cut.k_tile)
    return int(np.maximum((table != SKIP).sum(1 if own == "queries" else 0), 1).sum())


def steps(cut: Cut, tokens: Tokens, own: Side) -> Steps:
    """The list of a kernel that stays at tiles of one side."""
    table = tile_table(cut.mask, tokens, s=cut.s, t=cut.t, q_tile=cut.q_tile, k_tile=cut.k_tile, each=True)
    if own == "keys":
        met = visits(table.swapaxes(1, 2))  # queries that fill up a tile are zero, and so is all that comes of them
    else:
        met = visits(table, masked_last=cut.t % cut.k_tile > 0)
    xp: Any = np if isinstance(table, np.ndarray) else jnp
    count, (examples, _, others) = step_count(cut, own), met.tiles.shape
    length = xp.maximum(met.count, 1)  # a tile that sees nothing begins and ends
    ends = xp.cumsum(length, -1)
    n = np.arange(count)
    mine = xp.minimum((ends[:, None] <= n[:, None]).sum(-1), ends.shape[1] - 1)
    at = lambda x: xp.take_along_axis(x, mine, -1)  # noqa: E731
    visit = n - at(ends - length)
    other = xp.take_along_axis(
        met.tiles.reshape(examples, -1), mine * others + xp.minimum(visit, others - 1), -1
    )  # fmt: skip
    todo = (
        _BEGIN * (visit == 0)
        + _FULL * (visit < at(met.full))
        + _PARTIAL * ((visit >= at(met.full)) & (visit < at(met.count)))
        + _END * (visit == at(length) - 1)
    )
    mine, other, todo = (x.astype(np.int32).reshape(-1) for x in (mine, other, todo))
    return Steps(mine, other, todo, count, examples > 1)


def _may(plan: Steps, what: int) -> bool:
    """Whether a step asks for it, as far as is known; what none asks for is not compiled."""
    return not isinstance(plan.todo, np.ndarray) or bool((plan.todo & what).any())


# ---- inside of a kernel


def column(row: jax.Array) -> jax.Array:
    """(1, n) as (n, 128), every lane the same."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def lanes(x: jax.Array, n: int) -> jax.Array:
    """(rows, 128) of equal lanes as (rows, n)."""
    return x[:, :n] if n <= LANES else jnp.tile(x, (1, n // LANES))


def product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Over an axis of each, float32: exact for float32, else products of the arrays' dtype."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip


def units(dtype: Any) -> tuple[float, Callable[[jax.Array], jax.Array]]:
    """What a softmax's scores are multiplied by, and the function that makes weights of them.

    A TPU has `exp2`, and `exp` multiplies once more; but scores in units of log(2) round once more, as float32 shows.
    """
    return (1.0, jnp.exp) if dtype == jnp.float32 else (math.log2(math.e), jnp.exp2)


def scores(x: jax.Array, y: jax.Array, score: Score, seen: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """A tile's scores, -inf where unseen, and what a soft-cap multiplies their gradient by, or `None`.

    Those of a softmax are in `units`.
    """
    unit = units(x.dtype)[0] if score.kind == "softmax" else 1.0
    found, slope = product(x, y, (1, 1)), None
    if score.softcap is None:
        found = found * (score.scale * unit)
    else:
        tanh = jnp.tanh(found * (score.scale / score.softcap))
        found, slope = (score.softcap * unit) * tanh, 1 - tanh * tanh
    if score.shift:
        found = found + score.shift * unit
    return (found if seen is None else jnp.where(seen, found, -jnp.inf)), slope


def _seen(cut: Cut, own: Side, refs: Refs, i: Any, j: Any) -> jax.Array | None:
    """`masks.visible`'s rule for tiles `i` of the own side and `j` of the other; blocks are never cut by a tile."""
    shape = (cut.q_tile, cut.k_tile) if own == "queries" else (cut.k_tile, cut.q_tile)
    mine, other = ("q", "k") if own == "queries" else ("k", "q")
    index = [
        at * size + lax.broadcasted_iota(jnp.int32, shape, axis)
        for axis, (at, size) in enumerate(zip((i, j), shape, strict=True))
    ]
    rules = []
    if cut.mask.causal or cut.mask.window is not None:
        if cut.positions:
            first, second = lanes(refs["own_positions"][...], shape[1]), refs[f"{other}_positions"][...]
        else:
            first, second = index
        behind = first - second if own == "queries" else second - first
        if not cut.positions:
            behind = behind + (cut.t - cut.s)
        if cut.mask.causal:
            rules.append(behind >= 0)
        if cut.mask.window is not None:
            rules.append((behind if cut.mask.causal else abs(behind)) < cut.mask.window)
    if cut.segments:
        rules.append(lanes(refs["own_segments"][...], shape[1]) == refs[f"{other}_segments"][...])
    if own == "queries" and cut.t % cut.k_tile:
        rules.append(index[1] < cut.t)
    seen = None
    for rule in rules:
        seen = rule if seen is None else seen & rule
    return seen


def walk(
    target: Target,
    cut: Cut,
    tokens: Tokens,
    own: Side,
    arrays: Mapping[str, jax.Array],
    outs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, tuple[int, int]],
    *,
    begin: Callable[[Refs], None],
    add: Callable[[Refs, jax.Array | None], None],
    end: Callable[[Refs], None],
    products: int,
) -> dict[str, jax.Array]:
    """Runs a kernel.

    A kernel of queries is run for every query head. One of keys is run for every key head and meets a tile of queries
    once for each query head that reads it.

    Args:
      target: what for.
      cut, tokens: the tiles, and what the mask asks of data.
      own: the side at whose tiles it stays.
      arrays, outs: by the names that `Refs` has them under: "q", "k", "v", "lse", ...
      scratch: a name -> a float32 shape.
      begin: done at a tile's first step.
      add: done for every tile met, with what is seen in it, boolean (own, other), or `None` for everything.
      end: done at a tile's last step: writes the outputs.
      products: matrix products of a step, for the estimate of its cost.
    """
    plan = steps(cut, tokens, own)
    groups = cut.h // cut.kv
    heads, inner = (cut.h, 1) if own == "queries" else (cut.kv, groups)
    of_tokens = cut.tokens(tokens)
    kept = [n for n in ("segments", "positions") if f"q_{n}" in of_tokens]
    own_tile = cut.q_tile if own == "queries" else cut.k_tile

    def spec(name: str, x: Any) -> pl.BlockSpec:
        of_keys = name in _OF_KEYS
        tile = cut.k_tile if of_keys else cut.q_tile

        def place(b: Any, h: Any, n: Any, g: Any, own_ref: Any, other_ref: Any, todo_ref: Any) -> tuple[Any, ...]:
            n = b * plan.length + n if plan.each else n
            at = (own_ref if of_keys == (own == "keys") else other_ref)[n]
            if name in of_tokens:
                return b, 0, at
            if of_keys:
                head = h // groups if own == "queries" else h
            elif own == "queries":
                head = h
            else:  # a step without anything to do brings nothing new
                head = h * groups + (g if groups == 1 else jnp.where(todo_ref[n] == 0, groups - 1, g))
            return (b, head, 0, at) if name in _ROWS else (b, head, at, 0)

        if name in of_tokens:
            return pl.BlockSpec((None, 1, tile), place)
        return pl.BlockSpec((None, None, 1, tile) if name in _ROWS else (None, None, tile, x.shape[3]), place)

    given = {**arrays, **of_tokens}
    shapes = {**scratch, **{f"own_{n}": (own_tile, LANES) for n in kept}}
    names = (*given, *outs, *shapes)

    def kernel(own_ref: Any, other_ref: Any, todo_ref: Any, *references: Any) -> None:
        refs = dict(zip(names, references, strict=True))
        b, n, g = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        n = b * plan.length + n if plan.each else n
        i, j, todo = own_ref[n], other_ref[n], todo_ref[n]

        @pl.when((todo & _BEGIN != 0) & (g == 0))
        def _() -> None:
            for name in kept:
                mine = "q" if own == "queries" else "k"
                refs[f"own_{name}"][...] = column(refs[f"{mine}_{name}"][...])
            begin(refs)

        if _may(plan, _FULL):

            @pl.when(todo & _FULL != 0)
            def _full() -> None:
                add(refs, None)

        if _may(plan, _PARTIAL):

            @pl.when(todo & _PARTIAL != 0)
            def _partial() -> None:
                add(refs, _seen(cut, own, refs, i, j))

        @pl.when((todo & _END != 0) & (g == inner - 1))
        def _() -> None:
            end(refs)

    pairs = cut.b * cut.h * plan.length * cut.q_tile * cut.k_tile
    wide: list[Any] = [x for named in (arrays, outs) for n, x in named.items() if n not in _ROWS]
    results = pl.pallas_call(
        kernel,
        out_shape=tuple(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cut.b, heads, plan.length, inner),
            in_specs=[spec(n, x) for n, x in given.items()],
            out_specs=tuple(spec(n, x) for n, x in outs.items()),
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.int32 if name.startswith("own_") else jnp.float32)
                for name, shape in shapes.items()
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * pairs * max(x.shape[3] for x in wide),
            transcendentals=pairs,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in wide),
        ),
        interpret=target.tpu(),
    )(*(jnp.asarray(x) for x in plan[:3]), *given.values())
    return dict(zip(outs, results, strict=True))
