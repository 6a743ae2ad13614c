"""The recurrence on TPUs: a walk over chunks with the state in VMEM, forwards, and backwards for the gradient.

The grid is (rows, groups of heads, chunks). Heads of a group are independent, which gives the matrix unit work while
one head's chain of small products waits. The backward walk needs each chunk's first state: a forward walk writes
them (B, H, chunks, K, V) just before, and no residual holds them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chunked_recurrence import examples
from pallas_kernels.chunked_recurrence.chunk import Chunk, step
from pallas_kernels.chunked_recurrence.inputs import BLOCK, PRODUCTS, Facts, Inputs
from pallas_kernels.dispatch import Target
from pallas_kernels.tiles import lookup

VMEM = 48 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens of a chunk, chunks, and heads of a group."""

    chunk: int
    chunks: int
    heads: int


def supported(target: Target, *, facts: Facts, direction: str) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if facts.dtype not in PRODUCTS:
        return f"TPUs compute in {' and '.join(PRODUCTS)}, not {facts.dtype}"
    if facts.seq < BLOCK:
        return f"a kernel takes {BLOCK} tokens or more, not {facts.seq}"
    tile = _tile(target, facts)
    if (needed := _vmem(facts, tile, direction)) > VMEM:
        return f"{tile.heads} heads of {facts.key} x {facts.value} take {needed} bytes of VMEM, over {VMEM}"
    return None


def _tile(target: Target, facts: Facts) -> Tile:
    """Return the table's tile, with as many heads as divide all."""
    want = lookup("chunked_recurrence", target.kind or "TPU", decay=facts.decay, delta=facts.delta, dtype=facts.dtype)
    chunk = facts.size(facts.chunk or want["chunk"])
    heads = max(g for g in range(1, facts.heads + 1) if facts.heads % g == 0 and g <= max(1, want["heads"]))
    return Tile(chunk, math.ceil(facts.seq / chunk), heads)


def _vmem(facts: Facts, tile: Tile, direction: str) -> int:
    wide = facts.key * 2 + facts.value * 2
    tokens, states = tile.chunk * wide, facts.key * facts.value
    blocks = 2 * 4 * (tokens + 2 * states) * (2 if direction == "backward" else 1)
    working = 4 * (tile.chunk**2 * 16 + tokens * 6 + states * 4)
    return tile.heads * (blocks + 4 * states) + working


def run(target: Target, inputs: Inputs, *cotangents: jax.Array, facts: Facts, direction: str) -> Any:
    """See `dispatch.Implementation`."""
    tile = _tile(target, facts)
    if direction == "forward":
        return _walk(target, inputs, facts, tile)
    dout, dlast = cotangents
    return _walk_back(target, inputs, dout, dlast, facts, tile)


def _by_heads(x: jax.Array, tile: Tile) -> jax.Array:
    """(B, S, H, D) to (B, H, chunks · C, D), padded with zeros, which change nothing."""
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, tile.chunks * tile.chunk - x.shape[1]), (0, 0)))


def _rows(inputs: Inputs, facts: Facts, tile: Tile) -> jax.Array:
    """Return (B, H, chunks, rows, C) float32: restarts, logarithms of decay (none by channels), beta."""
    b, s = facts.batch, facts.seq

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, tile.chunks * tile.chunk - s), (0, 0)))
        return jnp.moveaxis(x.reshape(b, tile.chunks, tile.chunk, -1), 3, 1)

    starts = jnp.zeros((b, s), bool) if inputs.starts is None else inputs.starts
    rows = [jnp.broadcast_to(cut(starts[..., None]), (b, facts.heads, tile.chunks, tile.chunk))]
    decay = inputs.log_decay
    by_heads = decay is not None and facts.decay == "heads"
    rows.append(cut(decay.reshape(b, s, -1)) if by_heads and decay is not None else jnp.zeros_like(rows[0]))
    if inputs.beta is not None:
        rows.append(cut(inputs.beta))
    return jnp.stack(rows, 3)


def _chunk(refs: tuple[Any, ...], g: int, facts: Facts) -> tuple[Chunk, jax.Array]:
    """Return a chunk of head g of a group and its row of restarts."""
    q, k, v, rows, *decays = refs
    beta = rows[g, 2:3, :] if facts.delta else None
    log_decay = decays[0][g] if decays else rows[g, 1:2, :]
    return Chunk(q[g], k[g], v[g], log_decay, beta), rows[g, 0:1, :]


def _tokens(inputs: Inputs, facts: Facts, tile: Tile, spec: dict[str, pl.BlockSpec]) -> list[Any]:
    """Return the arrays of `_chunk` and their blocks."""
    sides = ((inputs.q, "key"), (inputs.k, "key"), (inputs.v, "value"))
    ins = [(_by_heads(x, tile), spec[name]) for x, name in sides]
    ins.append((_rows(inputs, facts, tile), spec["rows"]))
    if facts.decay == "channels" and inputs.log_decay is not None:
        ins.append((_by_heads(inputs.log_decay, tile), spec["key"]))
    return ins


def _specs(facts: Facts, tile: Tile, at: Callable[[Any], Any]) -> dict[str, pl.BlockSpec]:
    """Return the blocks of a chunk; `at` turns a step of the grid into a chunk's number."""
    c, g, key, value = tile.chunk, tile.heads, facts.key, facts.value
    return {
        "key": pl.BlockSpec((None, g, c, key), lambda b, h, n: (b, h, at(n), 0)),
        "value": pl.BlockSpec((None, g, c, value), lambda b, h, n: (b, h, at(n), 0)),
        "rows": pl.BlockSpec((None, g, None, 2 + facts.delta, c), lambda b, h, n: (b, h, at(n), 0, 0)),
        "state": pl.BlockSpec((None, g, key, value), lambda b, h, n: (b, h, 0, 0)),
        "states": pl.BlockSpec((None, g, None, key, value), lambda b, h, n: (b, h, at(n), 0, 0)),
    }


def _call(
    kernel: Any, target: Target, facts: Facts, tile: Tile, ins: list[Any], outs: list[Any], names: tuple[Any, ...]
) -> Any:
    arrays = [x for x, _ in ins]
    walks = {"states": 1, "forward": 1, "backward": 3}[names[0]]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*arrays, *(x for x, _ in outs)))
    return pl.pallas_call(
        kernel,
        grid=(facts.batch, facts.heads // tile.heads, tile.chunks),
        in_specs=[spec for _, spec in ins],
        out_specs=[spec for _, spec in outs],
        out_shape=[shape for shape, _ in outs],
        scratch_shapes=[pltpu.VMEM((tile.heads, facts.key, facts.value), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=walks * flops(facts, tile.chunk),
            transcendentals=walks * facts.batch * facts.heads * facts.seq * tile.chunk,
            bytes_accessed=moved,
        ),
        interpret=target.tpu(),
        name=f"chunked_recurrence_{names[0]}",
    )(*arrays)


def flops(facts: Facts, chunk: int) -> int:
    """Return the FLOPs of a forward walk's products.

    Args:
      facts: of the recurrence.
      chunk: tokens in a chunk.
    """
    scores = chunk * (facts.key + facts.value)
    if facts.decay == "channels":  # two sums of decays; the scores of a block and itself are no product
        scores += 2 * chunk * facts.key - (1 + facts.delta) * BLOCK * facts.key
    states = 2 * facts.key * facts.value
    if facts.delta:
        doublings = max(0, math.ceil(math.log2(chunk)) - 1)
        scores += chunk * (facts.key + facts.value) + 2 * doublings * chunk**2
        states += facts.key * facts.value
    return 2 * facts.batch * facts.heads * math.ceil(facts.seq / chunk) * chunk * (scores + states)


def _walk(target: Target, inputs: Inputs, facts: Facts, tile: Tile, save: bool = False) -> Any:
    """Return outputs and last state; with `save`, each chunk's first state."""
    spec = _specs(facts, tile, lambda n: n)
    ins = _tokens(inputs, facts, tile, spec)
    tokens = len(ins)
    if inputs.initial is not None:
        ins.append((inputs.initial, spec["state"]))
    b, heads, state = facts.batch, facts.heads, (facts.key, facts.value)
    if save:
        outs = [(jax.ShapeDtypeStruct((b, heads, tile.chunks, *state), jnp.float32), spec["states"])]
    else:
        wide = jax.ShapeDtypeStruct((b, heads, tile.chunks * tile.chunk, facts.value), inputs.v.dtype)
        outs = [
            (wide, spec["value"]),
            (jax.ShapeDtypeStruct((b, heads, *state), jnp.float32), spec["state"]),
        ]

    def kernel(*refs: Any) -> None:
        blocks, written, state_ref, first = refs[:tokens], refs[tokens:-1], refs[-1], None
        if inputs.initial is not None:
            first, written = written[0], written[1:]
        n = pl.program_id(2)

        @pl.when(n == 0)
        def _() -> None:
            state_ref[...] = jnp.zeros_like(state_ref) if first is None else first[...]

        for g in range(tile.heads):
            chunk, starts = _chunk(blocks, g, facts)
            before = state_ref[g]
            after, out = step(before, chunk, starts, jnp.dtype(facts.dtype))
            if save:
                written[0][g] = before
            else:
                written[0][g] = out.astype(written[0].dtype)
            state_ref[g] = after

        if not save:

            @pl.when(n == tile.chunks - 1)
            def _() -> None:
                written[1][...] = state_ref[...]

    made = _call(kernel, target, facts, tile, ins, outs, ("states" if save else "forward",))
    if save:
        return made[0]
    return made[0][:, :, : facts.seq].swapaxes(1, 2), made[1]


def _walk_back(target: Target, inputs: Inputs, dout: jax.Array, dlast: jax.Array, facts: Facts, tile: Tile) -> Inputs:
    """Return the arguments' cotangents."""
    states = _walk(target, inputs, facts, tile, save=True)
    last = tile.chunks - 1
    spec = _specs(facts, tile, lambda n: last - n)
    ins = _tokens(inputs, facts, tile, spec)
    outs = [(jax.ShapeDtypeStruct(x.shape, x.dtype), at) for x, at in ins]
    tokens = len(ins)
    ins += [(states, spec["states"]), (_by_heads(dout, tile), spec["value"]), (dlast, spec["state"])]
    outs.append((jax.ShapeDtypeStruct(dlast.shape, jnp.float32), spec["state"]))

    def kernel(*refs: Any) -> None:
        blocks, (states_ref, dout_ref, dlast_ref) = refs[:tokens], refs[tokens : tokens + 3]
        dq_ref, dk_ref, dv_ref, drows_ref, *ddecay_refs, dfirst_ref, dstate_ref = refs[tokens + 3 :]
        n = pl.program_id(2)

        @pl.when(n == 0)
        def _() -> None:
            dstate_ref[...] = dlast_ref[...]

        for g in range(tile.heads):
            chunk, starts = _chunk(blocks, g, facts)
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), chunk)
            run: Any = partial(step, starts=starts, dtype=jnp.dtype(facts.dtype))
            _, back = jax.vjp(run, states_ref[g], wide)
            dstate, d = back((dstate_ref[g], dout_ref[g].astype(jnp.float32)))
            dstate_ref[g] = dstate
            dq_ref[g] = d.q.astype(dq_ref.dtype)
            dk_ref[g] = d.k.astype(dk_ref.dtype)
            dv_ref[g] = d.v.astype(dv_ref.dtype)
            drows_ref[g, 0:1, :] = jnp.zeros_like(starts)
            drows_ref[g, 1:2, :] = jnp.zeros_like(starts) if ddecay_refs else d.log_decay
            for ddecay_ref in ddecay_refs:
                ddecay_ref[g] = d.log_decay
            if facts.delta:
                drows_ref[g, 2:3, :] = d.beta

        @pl.when(n == last)
        def _() -> None:
            dfirst_ref[...] = dstate_ref[...]

    dq, dk, dv, drows, *ddecays, dfirst = _call(kernel, target, facts, tile, ins, outs, ("backward",))

    def whole(x: jax.Array, like: jax.Array) -> jax.Array:
        return x[:, :, : facts.seq].swapaxes(1, 2).astype(like.dtype)

    def row(x: jax.Array, like: jax.Array) -> jax.Array:
        """(B, H, chunks, C) to (B, S, H)."""
        x = jnp.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2)
        return x[:, : facts.seq].reshape(like.shape).astype(like.dtype)

    decay, beta = inputs.log_decay, inputs.beta
    ddecay = None
    if decay is not None:
        ddecay = whole(ddecays[0], decay) if ddecays else row(drows[:, :, :, 1], decay)
    return Inputs(
        whole(dq, inputs.q),
        whole(dk, inputs.k),
        whole(dv, inputs.v),
        ddecay,
        None if beta is None else row(drows[:, :, :, 2], beta),
        None,
        None if inputs.initial is None else dfirst,
    )


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
