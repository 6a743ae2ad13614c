"""Attention for Hopper in Mosaic GPU: supported cases, and how arrays are laid out for the kernels.

Sequences are padded to whole tiles, and `masks.tile_table` decides for each example which tiles meet. Where a tile of
128 queries would be half empty, the query heads of a key head are packed into it, each query with its position. Where
tiles of queries are fewer than multiprocessors, keys are cut into stretches (`gpu_split`). The backward pass is one
kernel for widths of 64 and 128, and several kernels in these cases:

  deterministic, or another width            keys and values together, queries      7 products of tiles, in place of 5
  width 64 with a soft-cap or dropout        the same: the soft-cap's slope, or random bits, take the registers
  widths that add up to more than 256        values, keys, queries                  8
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.dispatch import Target, hopper
from pallas_kernels.flash_attention import examples, gpu_split
from pallas_kernels.flash_attention.dropout import Drop
from pallas_kernels.flash_attention.gpu_forward import attend, shared_memory
from pallas_kernels.flash_attention.gpu_keys import of_keys
from pallas_kernels.flash_attention.gpu_queries import of_queries
from pallas_kernels.flash_attention.gpu_walk import LOG2E, ROWS, WARPGROUPS, Seen, Walk, Weigher
from pallas_kernels.flash_attention.inputs import Inputs, Score, Settings
from pallas_kernels.flash_attention.masks import Mask, Visits, masked, tile_table, visits
from pallas_kernels.flash_attention.xla import of_rows
from pallas_kernels.registers import registers_move, registers_stay
from pallas_kernels.tiles import lookup

TILE = ROWS * WARPGROUPS
"""Queries, or keys, that stay in a block."""
DTYPES = ("bfloat16", "float16")
_FUSED = (64, 128)


def supported(
    target: Target,
    *,
    direction: str,
    settings: Settings,
    q: tuple[int, ...],
    v: tuple[int, ...],
    bias: tuple[int, ...] | None,
    segments: bool,
    positions: bool,
    dtype: str,
    **_: Any,
) -> str | None:
    """Return why the kernels cannot serve a case, or `None`."""
    if why := hopper(target):
        return why
    if dtype not in DTYPES:
        return f"Hopper's tensor cores take {' and '.join(DTYPES)}, and {dtype} is left to XLA"
    if bias is not None:
        return "a bias is left to XLA; causal, window, segment_ids, positions and blocks have kernels"
    d, dv = q[3], v[3]
    if d % 16 or dv % 16 or not (64 <= d <= 256 and 64 <= dv <= 256):
        return f"head widths have to be multiples of 16 from 64 to 256 in a kernel, not {d} and {dv}"
    if settings.score.dropout and direction == "backward" and _no_room(d):
        return f"dropout's random bits have no registers beside sums {d} wide; up to 192 they have"
    if 0 in q:
        return "there is nothing to compute"
    tile = lookup(
        "flash_attention", target.kind, kernel="forward", **_key(d, dv, settings.score, segments or positions)
    )
    keys, slots = tile["keys"], tile["slots"]
    if dv > d or (d != dv and shared_memory(d, dv, keys, slots) > SHARED_MEMORY):
        return f"values of width {dv} do not fit in shared memory beside keys of width {d}"
    blocks = settings.mask.blocks
    if blocks is not None and (blocks.query % TILE or blocks.key % math.lcm(TILE, keys)):
        return (
            f"blocks of a mask have to be whole tiles of {TILE} queries and {math.lcm(TILE, keys)} keys in a kernel, "
            f"not {blocks.query} by {blocks.key}"
        )
    return None


def run(target: Target, inputs: Inputs, *others: Any, direction: str, settings: Settings, **_: Any) -> Any:
    """Call `forward` or `backward`."""
    if direction == "forward":
        return forward(target, inputs, settings.mask, settings.score)
    return backward(target, inputs, settings.mask, settings.score, *others, deterministic=settings.deterministic)


def forward(target: Target, inputs: Inputs, mask: Mask, score: Score) -> tuple[jax.Array, jax.Array | None]:
    """Return the output in q's dtype, and the float32 log-sum-exp (B, S, H), `None` for sigmoid."""
    b, s, h, d = inputs.q.shape
    kv, dv = inputs.v.shape[2:]
    packs = 1 < h // kv and s <= ROWS and mask.blocks is None and not score.dropout
    if not score.dropout and score.kind == "softmax" and mask.blocks is None and mask.window is None:
        blocks = b * kv * (-(-s * (h // kv) // TILE) if packs else h // kv * -(-s // TILE))
        if (n := gpu_split.stretches(target.cores, blocks, inputs.k.shape[1])) > 1:
            out, lse = forward(target, gpu_split.cut(inputs, mask, n), mask, score)
            assert lse is not None
            return gpu_split.merge(out, lse, n)
    if packs:
        inputs = _pack(inputs, mask)
    tokens = _needs_tokens(inputs, mask)
    tile = lookup("flash_attention", target.kind, kernel="forward", **_key(d, dv, score, tokens))
    keys = tile["keys"]
    if (score.dropout or (mask.window is not None) + tokens + (d + dv >= 256) > 1) and not registers_move():
        keys = min(keys, 64)  # a mask's arrays, or random bits, have no room beside 128 scores of a query
    case = _Case.of(target, inputs, mask, score, q_tile=TILE, k_tile=keys)
    out, lse = attend(
        target,
        case.q(inputs.q),
        case.k(inputs.k),
        case.k(inputs.v),
        case.walk.plan(case.visits),
        case.tokens,
        case.walk,
        case.seen,
        case.weigher,
        keys=keys,
        slots=tile["slots"],
        copier=dv <= 192 or registers_move(),  # wider sums take more than the 168 registers of three warpgroups
    )
    length = inputs.q.shape[1]
    out, lse = out[:, :length], lse[:, :, :length].swapaxes(1, 2)
    if packs:
        out, lse = (x.reshape(b, s, h // kv, kv, *x.shape[3:]).swapaxes(2, 3) for x in (out, lse))
        out, lse = out.reshape(b, s, h, dv), lse.reshape(b, s, h)
    return out, lse if score.kind == "softmax" else None


def backward(
    target: Target,
    inputs: Inputs,
    mask: Mask,
    score: Score,
    out: jax.Array,
    lse: jax.Array | None,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    deterministic: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Return the cotangents of q, k and v, and `None` for a bias."""
    q, v = inputs.q, inputs.v
    (s, d), (t, dv) = q.shape[1::2], v.shape[1::2]
    stats = stats_of(out, lse, dout, dlse)
    grads: dict[str, jax.Array] = {}
    for outputs in passes(d, dv, deterministic, score.softcap is not None or score.dropout > 0):
        grads |= one_pass(target, inputs, mask, score, stats, dout, outputs)
        if target.interpret:  # one after another: kernels interpreted in parallel wait for each other's threads
            grads, dout = jax.lax.optimization_barrier((grads, dout))
    dq = grads["q"][:, :s]
    if dq.dtype == jnp.float32:
        dq = (dq * (score.scale / Weigher(score).early(q.dtype))).astype(q.dtype)
    return dq, grads["k"][:, :t], grads["v"][:, :t], None


def stats_of(out: jax.Array, lse: jax.Array | None, dout: jax.Array, dlse: jax.Array | None) -> jax.Array | None:
    """Return, for softmax, float32 (B, S, H, 2): log-sum-exp in base 2, and each row's sum of dout * out less dlse."""
    if lse is None or dlse is None:
        return None
    finite, common = of_rows(out, lse, dout, dlse)
    # Without the barrier XLA sums inside the kernel that stacks: measured ten times slower than reading out and dout.
    return jnp.stack([finite * LOG2E, jax.lax.optimization_barrier(common)], -1)


def one_pass(
    target: Target, inputs: Inputs, mask: Mask, score: Score, stats: jax.Array | None, dout: jax.Array, outputs: str
) -> dict[str, jax.Array]:
    """Run one kernel of the backward pass.

    Args:
      target: the device to compile for.
      inputs: the arrays.
      mask: the mask.
      score: how scores become weights.
      stats: of `stats_of`.
      dout: (B, S, H, Dv).
      outputs: one of `passes`, such as "kv".

    Returns:
      the cotangents that `outputs` names, with padded sequences; a "q" that is summed in memory is float32 and not
      scaled.
    """
    q, k, v, *_ = inputs
    key = _key(q.shape[3], v.shape[3], score, _needs_tokens(inputs, mask))
    tile = lookup("flash_attention", target.kind, kernel=f"backward of {outputs}", **key)
    stay = outputs == "q"
    if outputs == "kvq" and score.dropout:
        tile["early"] = 0  # random bits take the registers
    q_tile, k_tile = (TILE, tile["keys"]) if stay else (tile["queries"], TILE)
    case = _Case.of(target, inputs, mask, score, q_tile=q_tile, k_tile=k_tile, turned=not stay)
    kernel: Any = functools.partial(
        of_queries if stay else of_keys,
        target,
        case.q(q),
        case.k(k),
        case.k(v),
        case.q(dout),
        None if stats is None else case.q(stats).transpose(0, 2, 3, 1),
        case.walk.plan(case.visits),
        case.tokens,
        case.walk,
        case.seen,
        case.weigher,
        slots=(tile["slots"], tile["others"]),
        early=bool(tile["early"]) and score.kind == "softmax",  # sigmoid has two arrays of weights to hold
        copier=registers_move(),
    )
    if stay:
        return {"q": kernel(keys=tile["keys"])}
    return kernel(outputs=outputs, queries=tile["queries"])


def passes(d: int, dv: int, deterministic: bool, crowded: bool = False) -> tuple[str, ...]:
    """Return the cotangents that each kernel of the backward pass computes, such as ("kv", "q").

    Args:
      d: width of keys.
      dv: width of values.
      deterministic: as for `flash_attention`.
      crowded: a soft-cap or dropout takes registers.
    """
    if d == dv and d in _FUSED and not deterministic and not (crowded and d == 64):
        return ("kvq",)
    return ("kv", "q") if d + dv <= 256 else ("v", "k", "q")


def _key(d: int, dv: int, score: Score, tokens: bool) -> dict[str, Any]:
    """Return what a tile depends on."""
    return {"width": d, "values": dv, "softcap": score.softcap is not None, "tokens": tokens}


def _needs_tokens(inputs: Inputs, mask: Mask) -> bool:
    """Whether a kernel reads segments or positions: there are some, or padded keys get a segment of their own."""
    tokens = inputs.tokens
    filled = inputs.k.shape[1] % TILE and not mask.causal
    return tokens.q_segments is not None or tokens.q_positions is not None or bool(filled)


@dataclasses.dataclass(frozen=True)
class _Case:
    """Sequences padded to whole tiles, and the other arguments of the kernels.

    Args:
      target: the device to compile for.
      inputs: the arrays, not padded.
      q_tile: queries of a tile.
      k_tile: keys of a tile.
      visits: visits of the side that stays.
      seen: makes the mask from references to `tokens`.
      tokens: segments, positions and the arrays of `Drop`, where there are any.
      weigher: computes the weights.
      turned: the keys stay, not the queries.
    """

    target: Target
    inputs: Inputs
    q_tile: int
    k_tile: int
    visits: Visits
    seen: Callable[[Sequence[Any]], Seen]
    tokens: tuple[jax.Array, ...]
    weigher: Weigher
    turned: bool

    @classmethod
    def of(
        cls, target: Target, inputs: Inputs, mask: Mask, score: Score, *, q_tile: int, k_tile: int, turned: bool = False
    ) -> _Case:
        (b, s), t, tokens, drop = inputs.q.shape[:2], inputs.k.shape[1], inputs.tokens, inputs.drop
        table = tile_table(mask, tokens, s=s, t=t, q_tile=q_tile, k_tile=k_tile, each=True)
        table = masked(table) if t % k_tile else table
        met = visits(table.swapaxes(1, 2) if turned else table)
        # Padded keys are after every query of a causal mask; otherwise they get a segment of their own.
        if t % k_tile and not mask.causal and tokens.q_segments is None:
            tokens = tokens._replace(q_segments=jnp.zeros((b, s), jnp.int32), k_segments=jnp.zeros((b, t), jnp.int32))
        unused: Any = 0
        if (ids := tokens.q_segments) is not None:
            unused = jnp.where(ids.max() < np.iinfo(np.int32).max, ids.max() + 1, ids.min() - 1)
        segments, positions = tokens.q_segments is not None, tokens.q_positions is not None

        def seen(refs: Sequence[Any]) -> Seen:
            of_segments = tuple(refs[:2]) if segments else None
            of_positions = tuple(refs[2 * segments :][:2]) if positions else None
            return Seen(mask, s, t, of_segments, of_positions, turned, None if drop is None else Drop(*refs[-3:]))

        token_arrays = (tokens.q_segments, tokens.k_segments, tokens.q_positions, tokens.k_positions)
        sizes, behind = (q_tile, k_tile, q_tile, k_tile), (0, unused, 0, np.iinfo(np.int32).max)
        filled = tuple(_fill(x, n, f) for x, n, f in zip(token_arrays, sizes, behind, strict=True) if x is not None)
        if drop is not None:
            filled += drop.seeds, _fill(drop.q_places, q_tile), _fill(drop.k_places, k_tile)
        return cls(target, inputs, q_tile, k_tile, met, seen, filled, Weigher(score), turned)

    def q(self, x: jax.Array) -> jax.Array:
        """Pad an array of the queries to whole tiles."""
        return _fill(x, self.q_tile)

    def k(self, x: jax.Array) -> jax.Array:
        """Pad an array of the keys to whole tiles."""
        return _fill(x, self.k_tile)

    @property
    def walk(self) -> Walk:
        """The walk over the side that stays."""
        met, (b, s, h, d), (t, kv, dv) = self.visits, self.inputs.q.shape, self.inputs.v.shape[1:]
        if self.turned:
            return Walk.of(self.target, b, kv, 1, met, h // kv * s * (d + dv) * 2)
        return Walk.of(self.target, b, kv, h // kv, met, t * (d + dv) * 2)


def _fill(x: jax.Array, tile: int, value: Any = 0) -> jax.Array:
    short = -x.shape[1] % tile
    return jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2), constant_values=value) if short else x


def _pack(inputs: Inputs, mask: Mask) -> Inputs:
    """Make query heads of a key head successive queries: (B, S, H, D) -> (B, S * H / K, K, D)."""
    q, k, v, _, tokens, _ = inputs
    (b, s, h, d), (t, kv) = q.shape, k.shape[1:3]
    if tokens.q_positions is None and (mask.causal or mask.window is not None):
        stand = (jnp.arange(s, dtype=jnp.int32) + (t - s), jnp.arange(t, dtype=jnp.int32))
        tokens = tokens._replace(
            q_positions=jnp.broadcast_to(stand[0], (b, s)), k_positions=jnp.broadcast_to(stand[1], (b, t))
        )
    each = lambda x: None if x is None else jnp.repeat(x, h // kv, axis=1)  # noqa: E731
    tokens = tokens._replace(q_segments=each(tokens.q_segments), q_positions=each(tokens.q_positions))
    q = q.reshape(b, s, kv, h // kv, d).swapaxes(2, 3).reshape(b, s * (h // kv), kv, d)
    return Inputs(q, k, v, None, tokens)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, arguments) of what ships, for the gate: every width with every feature of a kernel."""
    for width in WIDTHS:
        for name, options in FEATURES.items():
            fixed = options.get("deterministic", False)
            if fixed and "kvq" not in passes(*width, False, "softcap" in options):
                continue  # the same kernels run without
            for direction in ("forward", "backward")[fixed:]:
                if "dropout" in options and direction == "backward" and _no_room(width[0]):
                    continue  # refused
                yield _configuration(name, width, direction, **options)
    for direction in ("forward", "backward"):
        yield _configuration("float16 causal", (128, 128), direction, mask=Mask(causal=True), dtype="float16")
    narrow, widest = itertools.product(WIDTHS, ("causal", "deterministic packed")), ("causal", "packed softcap")
    pairs = [(width, name, "backward") for width, name in narrow] + [(WIDTHS[-1], name, "forward") for name in widest]
    for width, name, direction in pairs:
        case, fn, shapes = _configuration(name, width, direction, **FEATURES[name])
        yield f"{case}, two warpgroups", registers_stay()(fn), shapes
    yield _configuration("causal, heads packed", (128, 128), "forward", mask=Mask(causal=True), s=8, t=2048)
    yield _configuration("causal, keys cut", (128, 128), "forward", mask=Mask(causal=True), s=8, t=16384)


def _no_room(d: int) -> bool:
    """Whether gradients of keys this wide leave no registers for random bits."""
    return d > 192 and registers_move()


def _configuration(name: str, width: tuple[int, int], direction: str, **options: Any) -> Any:
    fn, shapes = examples.case(run, direction, **({"h": 16, "kv": 4, "d": width[0], "dv": width[1]} | options))
    return f"{width[0]}/{width[1]} {name} {direction}", fn, shapes


WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
"""Widths of keys and values that have tiles in the table."""

_CAUSAL, _PACKED = {"mask": Mask(causal=True)}, {"mask": Mask(causal=True), "segments": True, "positions": True}

FEATURES: dict[str, dict[str, Any]] = {
    "full": {"mask": Mask()},
    "causal": _CAUSAL,
    "window": {"mask": Mask(causal=True, window=1024)},
    "window both sides": {"mask": Mask(window=1024)},
    "packed": _PACKED,
    "packed window": _PACKED | {"mask": Mask(causal=True, window=1024)},
    "softcap": _CAUSAL | {"softcap": 30.0},
    "packed softcap": _PACKED | {"softcap": 30.0},
    "sigmoid": _CAUSAL | {"kind": "sigmoid"},
    "packed sigmoid": _PACKED | {"kind": "sigmoid"},
    "odd": {"mask": Mask(), "s": 4001},
    "odd packed both sides": {"mask": Mask(), "segments": True, "s": 4001},
    "dropout": _CAUSAL | {"dropout": 0.1},
    "packed window softcap dropout": _PACKED
    | {"mask": Mask(causal=True, window=1024), "softcap": 30.0, "dropout": 0.1},
    "deterministic": _CAUSAL | {"deterministic": True},
    "deterministic packed": _PACKED | {"deterministic": True},
    "deterministic packed softcap": _PACKED | {"softcap": 30.0, "deterministic": True},
}
"""Cases that the gate compiles: a name -> arguments of `examples.case`."""
