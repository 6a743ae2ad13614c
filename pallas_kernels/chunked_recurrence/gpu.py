"""The recurrence on Hopper (Mosaic GPU): products of tiles in bfloat16, the state between chunks in registers.

Sums are float32. The delta rule's triangular system is solved by its inverse, whose products have operands of two
terms of bfloat16 each: float32 but for the last 7 bits. It is solved for all chunks at once (`gpu_prepare`), so that
only products with the state are serial (`gpu_forward`, and `gpu_backward` for the state's cotangent).

Counted for the delta rule, 16384 tokens of 16 heads of 128 x 128: 4096 blocks prepare, 32 walk over 256 chunks each;
0.74 GB are read and written (0.22 ms on an H100), 120 GFLOP multiplied. At 8 us a block, two on a multiprocessor, and
1.1 us a step, that is predicted to take 0.13 + 0.28 ms; with 32 heads 0.25 + 0.28 ms; with 128, which need the walk's
multiprocessors twice, 1.0 + 0.6 ms, or the 1.8 ms of 5.9 GB. With decay by channels (`gpu_channels`) 1.0 GB and 236
GFLOP; a block prepares for 20 us, one on a multiprocessor: 0.63 + 0.28 ms. None of these times has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.aot import SHARED_MEMORY
from pallas_kernels.chunked_recurrence import examples
from pallas_kernels.chunked_recurrence.gpu_backward import gradients, shared_memory, walk_back
from pallas_kernels.chunked_recurrence.gpu_channels import channel_gradients, channels_memory
from pallas_kernels.chunked_recurrence.gpu_forward import walk
from pallas_kernels.chunked_recurrence.gpu_prepare import prepare
from pallas_kernels.chunked_recurrence.gpu_tiles import BETA, SIDE, terms, vectors
from pallas_kernels.chunked_recurrence.inputs import Facts, Inputs
from pallas_kernels.dispatch import HOPPER, Target, hopper

WIDEST = 128
"""Widest keys: the state's columns of wider ones do not fit in registers."""


def supported(target: Target, *, facts: Facts, direction: str) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if why := hopper(target):
        return why
    if facts.dtype != "bfloat16":
        return f"a kernel for GPUs multiplies bfloat16, and products of {facts.dtype} are left to XLA"
    if facts.key > WIDEST:
        return (
            f"keys of width {facts.key} are left to XLA: a kernel for GPUs has a head's state in registers, and that "
            f"of keys wider than {WIDEST} does not fit"
        )
    if facts.key not in (SIDE, WIDEST) or facts.value % SIDE or not facts.value:
        return (
            f"a kernel for GPUs takes keys of width {SIDE} or {WIDEST} and values of a multiple of {SIDE}, not "
            f"{facts.key} and {facts.value}"
        )
    if facts.chunk not in (None, SIDE):
        return f"a kernel for GPUs has chunks of {SIDE} tokens, not {facts.chunk}"
    needs = channels_memory(facts.value, facts.delta) if facts.decay == "channels" else None
    if direction == "backward" and (needs or shared_memory(facts.key, facts.value, facts.delta)) > SHARED_MEMORY:
        return f"gradients of keys of width {facts.key} and values of {facts.value} do not fit in shared memory"
    return None if facts.seq and facts.batch else "there are no tokens"


def run(target: Target, inputs: Inputs, *cotangents: jax.Array, facts: Facts, direction: str) -> Any:
    """See `dispatch.Implementation`."""
    chunks = math.ceil(facts.seq / SIDE)

    def padded(x: jax.Array) -> jax.Array:
        """Add tokens of zeros, which change nothing, and round."""
        return jnp.pad(x.astype(jnp.bfloat16), ((0, 0), (0, chunks * SIDE - facts.seq), (0, 0), (0, 0)))

    def row(x: jax.Array) -> jax.Array:
        """(B, H, chunks, 64) to (B, S, H)."""
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2)[:, : facts.seq]

    log_decay, initial = inputs.log_decay, inputs.initial
    first = () if initial is None else (initial,)
    q, k, v = map(padded, inputs[:3])
    lines = vectors(inputs, facts, chunks)
    decays: tuple[jax.Array, ...] = ()
    if log_decay is not None and facts.decay == "channels":
        decays = tuple(map(padded, terms(log_decay)))
    prepared = prepare(target, q, k, v, lines, decays, delta=facts.delta, save=direction == "backward")
    if direction == "forward":
        dtype = jnp.bfloat16 if inputs.v.dtype == jnp.bfloat16 else jnp.float32
        out, last = walk(target, prepared, lines, first, dtype=dtype)
        return out[:, : facts.seq].astype(inputs.v.dtype), last
    dout, dlast = padded(cotangents[0]), cotangents[1]
    *new, states = walk(target, prepared, lines, first, dtype=jnp.bfloat16, save=True)
    dnew, dstates, dfirst = walk_back(target, dout, prepared, lines, dlast)
    through = () if prepared.solved is None else (prepared.solved, dnew)
    chunk = (q, k, new[0] if new else v, dout, states, dstates, lines)
    if decays:
        dq, dk, ddecay, *of_v = channel_gradients(target, *chunk, decays, *through)
        ddecay = ddecay[:, : facts.seq]
    else:
        dq, dk, dlines, *of_v = gradients(target, *chunk, *through)
        ddecay = dlines[..., 0, :].at[..., -1].add(jnp.sum(dlines[..., 1, :], -1))
        ddecay = row(lax.cumsum(ddecay, 3, reverse=True))
    dv = of_v[0] if of_v else dnew
    dbeta = None
    if inputs.beta is not None:
        # What a token adds is its rate times some x; v's cotangent is the rate times that of rate * x. So the rate's
        # own cotangent, x times the latter, needs no further product.
        rate = row(lines[..., BETA, :])[..., None]
        both = (x[:, : facts.seq].astype(jnp.float32) / rate for x in (dv, *new))
        dbeta = jnp.sum(math.prod(both), -1).astype(inputs.beta.dtype)
    dq, dk, dv = (x[:, : facts.seq].astype(like.dtype) for x, like in zip((dq, dk, dv), inputs[:3], strict=True))
    return Inputs(
        dq,
        dk,
        dv,
        None if log_decay is None else ddecay.reshape(log_decay.shape),
        dbeta,
        None,
        None if initial is None else dfirst,
    )


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run, lambda **case: supported(Target(HOPPER[1], "cuda"), **case) is None)
