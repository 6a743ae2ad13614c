"""The convolution on TPUs: both transforms, the product with the kernel's, and the way back, without leaving VMEM.

The grid is (groups of channels, rows of the batch), so that a group's kernel is read once for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Target
from pallas_kernels.fftconv import examples
from pallas_kernels.fftconv.monarch import Facts, Tables, filtered, spectrum
from pallas_kernels.tiles import lookup

VMEM = 48 * 2**20
"""Bytes of VMEM that a kernel may use: less than any generation has."""


def supported(target: Target, *, facts: Facts, direction: str) -> str | None:
    """Return why the kernel cannot serve a case, or `None`."""
    if facts.seq < 64:
        return f"a kernel takes 64 tokens or more, not {facts.seq}"
    if (needed := _vmem(facts, 1)) > VMEM:
        n1, n2 = facts.factors
        return f"a transform of {n1} x {n2} numbers takes {needed} bytes of VMEM, over {VMEM}"
    return None


def _vmem(facts: Facts, group: int) -> int:
    (_, n2), (a, b), rows = facts.factors, facts.keep, facts.rows
    tables = 2 * (2 * a * rows + a * n2 + 2 * n2 * b)
    blocks = 2 * group * (2 * rows * n2 + 2 * a * b)
    working = 8 * a * max(n2, b) + 2 * rows * n2
    return 4 * (2 * tables + blocks + working)


def _group(target: Target, facts: Facts) -> int:
    """Channels of a group: as many as the table's that divide all and fit."""
    want = lookup("fftconv", target.kind or "TPU", size=math.prod(facts.factors))["channels"]
    fits = [g for g in range(1, want + 1) if facts.channels % g == 0 and _vmem(facts, g) <= VMEM]
    return max(fits, default=1)


def run(target: Target, x: jax.Array, *others: jax.Array, facts: Facts, direction: str) -> Any:
    """See `dispatch.Implementation`."""
    group, back_and_forth = _group(target, facts), direction == "convolve"
    tables = [jnp.asarray(t) for t in facts.tables()]
    b, c = x.shape[:2]
    rows = pl.BlockSpec((None, group, *x.shape[2:]), lambda g, n: (n, g, 0, 0))
    waves = pl.BlockSpec((group, *facts.keep), lambda g, n: (g, 0, 0))
    whole = [pl.BlockSpec(t.shape, lambda g, n: (0, 0, 0)) for t in tables]
    wave = jax.ShapeDtypeStruct((c, *facts.keep), jnp.float32)
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    size = math.prod(facts.factors)

    def convolve(*refs: Any) -> None:
        t = Tables(*(ref[...] for ref in refs[:5]))
        x_ref, re_ref, im_ref, y_ref = refs[5:]
        for i in range(group):
            y_ref[i] = filtered(x_ref[i], (re_ref[i], im_ref[i]), t)

    def add(*refs: Any) -> None:
        t = Tables(*(ref[...] for ref in refs[:5]))
        x_ref, dy_ref, re_ref, im_ref = refs[5:]

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            re_ref[...] = jnp.zeros_like(re_ref)
            im_ref[...] = jnp.zeros_like(im_ref)

        for i in range(group):
            re, im = spectrum(x_ref[i], dy_ref[i], t, size)
            re_ref[i] += re
            im_ref[i] += im

    return pl.pallas_call(
        convolve if back_and_forth else add,
        grid=(c // group, b),
        in_specs=[*whole, rows, *([waves] * 2 if back_and_forth else [rows])],
        out_specs=rows if back_and_forth else [waves, waves],
        out_shape=like if back_and_forth else (wave, wave),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=b * c * facts.flops,
            transcendentals=0,
            bytes_accessed=4 * (2 * math.prod(x.shape) + 2 * math.prod(wave.shape)),
        ),
        interpret=target.tpu(),
        name=f"fftconv_{direction}",
    )(*tables, x, *others)


def configurations(op: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of what ships, for the gate."""
    yield from examples.cases(run)
