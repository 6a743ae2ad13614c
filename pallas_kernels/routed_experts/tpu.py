"""A layer of experts on TPUs, one kernel: a grid over the experts that are used, and tiles of their hidden layer.

All tokens are in VMEM. Before an expert's first tile, those that chose it are copied to consecutive rows, and after its
last one rows are added to their tokens, both by a product with a matrix of zeros and ones, which is exact: a token's
row is the number of tokens before it that have the same expert. Only tiles of rows that have tokens are multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.routed_experts import examples
from pallas_kernels.routed_experts.inputs import Facts
from pallas_kernels.tiles import lookup

__all__ = ["DTYPES", "TOKENS", "configurations", "multiplied_rows", "run", "supported", "tile_of"]

DTYPES = ("float32", "bfloat16")
TOKENS = 1024
"""Most tokens: each tile of them is compared with each tile of an expert's rows, which grows with their square."""
VMEM = 56 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""
_LANES, _SUBLANES = 128, 16


def supported(target: Target, *, facts: Facts) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if facts.dtype not in DTYPES:
        return f"TPUs compute in {' and '.join(DTYPES)}, and {facts.dtype} is left to XLA"
    if not min(facts.tokens, facts.top_k, facts.width, facts.hidden, facts.experts):
        return "an operand is empty"
    if facts.tokens > TOKENS:
        return f"the kernel holds all tokens in VMEM, at most {TOKENS}, not {facts.tokens}"
    if tile_of(target, facts) is None:
        return f"{facts.tokens} tokens of width {facts.width} and a tile of an expert take over {VMEM} bytes of VMEM"
    return None


def tile_of(target: Target, facts: Facts) -> tuple[int, int] | None:
    """Return rows and hidden columns of a tile, or `None` if no tile fits.

    Args:
      target: the device.
      facts: of the layer.
    """
    want = lookup("routed_experts", target.kind or "TPU", dtype=facts.dtype)
    rows = want["rows"]
    while rows >= 2 * max(facts.tokens, _SUBLANES):
        rows //= 2
    columns = [c for c in range(_LANES, want["columns"] + 1, _LANES) if c < facts.hidden]
    # those that divide the hidden layer first: the last of other tiles is not whole
    columns.sort(key=lambda c: (facts.hidden % c == 0, c), reverse=True)
    for fits in (facts.hidden, *columns) if facts.hidden <= want["columns"] else columns:
        if _vmem(facts, rows, fits) <= VMEM:
            return rows, fits
    return None


def _padded(tokens: int, rows: int) -> int:
    return -(-tokens // rows) * rows


def _vmem(facts: Facts, rows: int, columns: int) -> int:
    item, n = jnp.dtype(facts.dtype).itemsize, _padded(facts.tokens, rows)
    lanes = -(-facts.experts // _LANES) * _LANES
    routing = 2 * facts.width * lanes * 4 + n * lanes * 4 if facts.routes else 2 * n * lanes * 4
    wide = n * facts.width * (4 * item + item + 8)  # two of x and of y; gathered rows; two float32 sums
    return wide + 2 * (2 + facts.gated) * facts.width * columns * item + routing + n * lanes * 4


def multiplied_rows(ids: Any, facts: Facts, target: Target) -> int:
    """Return the rows that the kernel multiplies for known experts of tokens, those that fill tiles included.

    Args:
      ids: (tokens, k), known.
      facts: of the layer.
      target: the device.
    """
    tile = tile_of(target, facts)
    assert tile is not None
    counts = [int((ids == expert).any(1).sum()) for expert in range(facts.experts)]
    return sum(-(-count // tile[0]) * tile[0] for count in counts)


def run(
    target: Target,
    x: jax.Array,
    routing: tuple[jax.Array, ...],
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    *,
    facts: Facts,
) -> jax.Array:
    """Return the layer; see `dispatch.Implementation`."""
    tile = tile_of(target, facts)
    assert tile is not None
    rows, columns = tile
    n, e, experts = _padded(facts.tokens, rows), facts.width, facts.experts
    x = jnp.pad(x, ((0, n - len(x)), (0, 0)))
    every = jnp.arange(experts, dtype=jnp.int32)
    steps: Any = experts
    if facts.routes:
        order, factors = every, routing[0]
    else:
        ids, weights = routing
        factors = jnp.sum(jnp.where(ids[..., None] == every, weights[..., None], 0.0), axis=1)
        factors = jnp.pad(factors, ((0, n - len(factors)), (0, 0)))
        used = jnp.any(factors != 0, axis=0)
        order = jnp.argsort(~used, stable=True).astype(jnp.int32)
        steps = jnp.maximum(jnp.sum(used, dtype=jnp.int32), 1)
    tiles = pl.cdiv(facts.hidden, columns)
    into = pl.BlockSpec((None, e, columns), lambda s, f, order: (order[s], 0, f))
    matrices = ([into] if facts.gated else []) + [into]
    whole = lambda a: pl.BlockSpec(a.shape, lambda s, f, order: (0, 0))  # noqa: E731
    item = jnp.dtype(facts.dtype).itemsize
    y = pl.pallas_call(
        functools.partial(_step, facts=facts, rows=rows, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps, tiles),
            in_specs=[
                whole(x),
                whole(factors),
                *matrices,
                pl.BlockSpec((None, columns, e), lambda s, f, order: (order[s], f, 0)),
            ],
            out_specs=whole(x),
            scratch_shapes=[
                pltpu.VMEM((n, e), jnp.float32),  # sums by token
                pltpu.VMEM((n, e), x.dtype),  # an expert's rows
                pltpu.VMEM((n, e), jnp.float32),  # what it returns
                pltpu.VMEM((n, experts), jnp.float32),  # factors of experts on tokens
                pltpu.VMEM((n, experts), jnp.float32),  # rows of tokens among an expert's
                pltpu.SMEM((1,), jnp.int32),  # the expert's tiles of rows
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n, e), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM + 8 * 2**20
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * facts.tokens * facts.top_k * (2 + facts.gated) * e * facts.hidden,
            transcendentals=facts.tokens * facts.top_k * facts.hidden,
            bytes_accessed=item * (min(experts, facts.tokens * facts.top_k) * (2 + facts.gated) * e * facts.hidden
                                   + 2 * n * e),
        ),
        interpret=target.tpu(),
        name="routed_experts",
    )(order, x, factors, *((gate,) if gate is not None else ()), up, down)  # fmt: skip
    return y[: facts.tokens]


def _step(order: Any, x_ref: Any, factors_ref: Any, *refs: Any, facts: Facts, rows: int, tiles: int) -> None:
    """One tile of the hidden layer of one expert, of all rows that it has."""
    *into_refs, down_ref, y_ref, sum_ref, gathered_ref, out_ref, factor_ref, row_ref, count_ref = refs
    s, f = pl.program_id(0), pl.program_id(1)
    columns, chunks = len(down_ref), len(x_ref) // rows

    def each(count: Any, do: Callable[[Any, Any], None]) -> None:
        """Call `do` with the first row and the rows of each tile."""

        def body(i: Any, carry: Any) -> Any:
            at = pl.multiple_of(i * rows, rows)
            do(at, pl.ds(at, rows))
            return carry

        lax.fori_loop(0, count, body, 0)

    @pl.when((s == 0) & (f == 0))
    def _() -> None:
        earlier = lax.broadcasted_iota(jnp.int32, (rows, rows), 0) > lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
        earlier = jnp.where(earlier, 1.0, 0.0).astype(x_ref.dtype)

        def route(i: Any, before: jax.Array) -> jax.Array:
            at = pl.multiple_of(i * rows, rows)
            here = pl.ds(at, rows)
            factors = _chosen(x_ref[here, :], factors_ref, at, facts) if facts.routes else factors_ref[here, :]
            some = jnp.where(factors != 0, 1.0, 0.0)
            factor_ref[here, :] = factors
            row_ref[here, :] = before + _dot(earlier, some.astype(x_ref.dtype), (1, 0))
            sum_ref[here, :] = jnp.zeros((rows, facts.width), jnp.float32)
            return before + jnp.sum(some, axis=0, keepdims=True)

        lax.fori_loop(0, chunks, route, jnp.zeros((1, facts.experts), jnp.float32))

    def of_expert(ref: Any, here: Any) -> jax.Array:
        """The expert's column of a tile, (rows, 1)."""
        mine = lax.broadcasted_iota(jnp.int32, (rows, facts.experts), 1) == order[s]
        return jnp.sum(jnp.where(mine, ref[here, :], 0.0), axis=1, keepdims=True)

    def places(tokens: Any, at: Any) -> jax.Array:
        """(rows, rows): 1 where a row of the expert's tile that begins at `at` is the copy of one of the tokens."""
        place = jnp.where(of_expert(factor_ref, tokens) != 0, of_expert(row_ref, tokens), -1.0).astype(jnp.int32)
        return jnp.where(place == at + lax.broadcasted_iota(jnp.int32, (rows, rows), 1), 1.0, 0.0).astype(x_ref.dtype)

    @pl.when(f == 0)
    def _() -> None:
        def count(i: Any, total: Any) -> Any:
            here = pl.ds(pl.multiple_of(i * rows, rows), rows)
            return total + jnp.sum(jnp.where(of_expert(factor_ref, here) != 0, 1.0, 0.0))

        own = lax.fori_loop(0, chunks, count, jnp.float32(0))
        count_ref[0] = lax.div(own.astype(jnp.int32) + (rows - 1), rows)

        def gather(at: Any, here: Any) -> None:
            out_ref[here, :] = jnp.zeros((rows, facts.width), jnp.float32)

            def copy(_: Any, tokens: Any) -> None:
                out_ref[here, :] += _dot(places(tokens, at), x_ref[tokens, :], (0, 0))

            each(chunks, copy)
            gathered_ref[here, :] = out_ref[here, :].astype(x_ref.dtype)
            out_ref[here, :] = jnp.zeros((rows, facts.width), jnp.float32)

        each(count_ref[0], gather)

    down = down_ref[...]
    if facts.hidden % columns:  # whatever is after the matrices' ends
        down = jnp.where(f * columns + lax.broadcasted_iota(jnp.int32, down.shape, 0) < facts.hidden, down, 0)

    def multiply(_: Any, here: Any) -> None:
        products = [_dot(gathered_ref[here, :], ref[...], (1, 0)) for ref in into_refs]
        h = facts.activation(*products).astype(x_ref.dtype)
        if facts.hidden % columns:
            h = jnp.where(f * columns + lax.broadcasted_iota(jnp.int32, h.shape, 1) < facts.hidden, h, 0)
        out_ref[here, :] += _dot(h, down, (1, 0))

    each(count_ref[0], multiply)

    @pl.when(f == tiles - 1)
    def _() -> None:
        def add(at: Any, here: Any) -> None:
            out = out_ref[here, :].astype(x_ref.dtype)

            def to_tokens(_: Any, tokens: Any) -> None:
                sum_ref[tokens, :] += of_expert(factor_ref, tokens) * _dot(places(tokens, at), out, (1, 0))

            each(chunks, to_tokens)

        each(count_ref[0], add)

    @pl.when((f == tiles - 1) & (s == pl.num_programs(0) - 1))
    def _() -> None:
        def write(_: Any, here: Any) -> None:
            y_ref[here, :] = sum_ref[here, :].astype(y_ref.dtype)

        each(chunks, write)


def _chosen(x: jax.Array, router_ref: Any, at: Any, facts: Facts) -> jax.Array:
    """Return the factor of each expert on each token, 0 for an expert that is not chosen and for rows of padding."""
    scores = _dot(x.astype(jnp.float32), router_ref[...], (1, 0))
    shares = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    shares = shares / jnp.sum(shares, axis=1, keepdims=True)
    expert = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    real = at + lax.broadcasted_iota(jnp.int32, scores.shape, 0) < facts.tokens
    left, factors = scores, jnp.zeros(scores.shape, jnp.float32)
    for _ in range(facts.top_k):  # the first of those that have the largest score
        first = jnp.where(left == jnp.max(left, axis=1, keepdims=True), expert, facts.experts)
        mine = expert == jnp.min(first, axis=1, keepdims=True)
        factors = jnp.where(mine, shares, factors)
        left = jnp.where(mine, -jnp.inf, left)
    if facts.normalized:
        factors = factors / jnp.sum(factors, axis=1, keepdims=True)
    return jnp.where(real, factors, 0.0)


def _dot(left: jax.Array, right: jax.Array, dims: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=jnp.float32)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
