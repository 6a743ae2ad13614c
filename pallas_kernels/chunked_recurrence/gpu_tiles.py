"""Shared by the recurrence's kernels for Hopper: products of tiles in shared memory, and what decays a chunk's rows.

Every operand is made of tiles of 64 x 64 in bfloat16, and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked_recurrence.inputs import FAR, Facts, Inputs
from pallas_kernels.flash_attention.gpu_walk import LOG2E, plgpu, spread, swizzled

SIDE = 64
"""Tokens of a chunk, and rows and columns of a tile."""
SHAPE = (SIDE, SIDE)
WIDE: Any = plgpu.Layout.WGMMA
"""How registers hold sums of products."""
TOTAL, COLUMNS, BEGIN, SINCE, UNTIL, BETA, RATES = range(7)
"""Lines of `vectors`; those of channels follow the last one."""
LEAST_RATE = 1e-15
"""The delta rule's rate where it is 0, which rounds away in every sum: what a token adds is divided by its rate."""


def vectors(inputs: Inputs, facts: Facts, chunks: int) -> jax.Array:
    """Return float32 (B, H, chunks, lines, 64): what a chunk's rows and columns are multiplied by.

    Lines: the decay's logarithm in base 2, summed since the chunk began, twice, since the compiler cannot give one load
    two layouts; the first row that each row sees; the decay since the chunk began, 0 after a restart; the decay until
    its end, 0 before a restart; and the delta rule's rate, twice. With decay by channels the decays of these lines are
    1, and for each 64 channels there is one more line: the decay of the state over the whole chunk.

    Args:
      inputs: the arrays.
      facts: of them.
      chunks: number of chunks.
    """
    b, s, h = facts.batch, facts.seq, facts.heads

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.reshape(b, s, -1), ((0, 0), (0, chunks * SIDE - s), (0, 0)))
        return jnp.moveaxis(x.reshape(b, chunks, SIDE, -1), 3, 1)

    starts = cut(jnp.zeros((b, s), bool) if inputs.starts is None else inputs.starts)
    runs = jnp.cumsum(starts.astype(jnp.int32), -1)
    # without decay no sum: XLA would compute it, slowly, while it compiles
    channels = facts.decay == "channels"
    decay = None if channels else inputs.log_decay
    total = jnp.zeros((b, h, chunks, SIDE)) if decay is None else jnp.cumsum(cut(decay), -1)
    begin = lax.cummax(jnp.where(starts, jnp.arange(SIDE), 0).astype(jnp.int32), axis=3).astype(jnp.float32)
    since = jnp.exp(jnp.where(runs > 0, FAR, total))
    until = jnp.exp(jnp.where(runs != runs[..., -1:], FAR, total[..., -1:] - total))
    lines = [total * LOG2E, total * LOG2E, jnp.broadcast_to(begin, total.shape), since, until]
    if inputs.beta is not None:
        rate = cut(inputs.beta.astype(jnp.float32))
        lines += [jnp.where(jnp.abs(rate) < LEAST_RATE, LEAST_RATE, rate)] * 2
    if channels and inputs.log_decay is not None:
        whole = jnp.pad(inputs.log_decay, ((0, 0), (0, chunks * SIDE - s), (0, 0), (0, 0)))
        whole = jnp.moveaxis(jnp.sum(whole.reshape(b, chunks, SIDE, h, facts.key), 2), 2, 1)
        keeps = (jnp.exp(whole) * since[..., -1:]).reshape(b, h, chunks, -1, SIDE)
        lines += [keeps[..., i, :] for i in range(keeps.shape[3])]
    return jnp.stack(lines, 3)


def terms(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the decay's logarithm in base 2 in two terms of bfloat16.

    Args:
      log_decay: float32.
    """
    x = log_decay * LOG2E
    high = upper(x)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def upper(x: Any) -> Any:
    """Return float32 numbers without their lower half, which is a bfloat16."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16)), jnp.float32)


def buffer(*tiles: int) -> Any:
    """Return shared memory for tiles."""
    return plgpu.SMEM((*tiles, *SHAPE), jnp.bfloat16, transforms=swizzled(SIDE, jnp.bfloat16))


def wide(x: Any) -> Any:
    """Return a matrix with the layout of sums of products; the compiler is slow to find it by itself."""
    return plgpu.layout_cast(x, WIDE)


def load(tile: Any) -> Any:
    """Return a tile as float32 in registers."""
    return wide(plgpu.load(tile, layout=WIDE).astype(jnp.float32))


def put(tile: Any, x: Any) -> None:
    """Write a matrix in registers to a tile."""
    tile[...] = wide(x.astype(tile.dtype))


def products(*pairs: tuple[Any, Any]) -> Any:
    """Return the sum of products of tiles in shared memory, in float32."""
    return together(pairs)[0]


def together(*sums: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Return sums of products of tiles in shared memory, in float32: the latency of one for all of them.

    Args:
      *sums: the pairs of tiles of each.
    """

    def run(*accs: Any) -> tuple[Any, ...]:
        for acc, pairs in zip(accs, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)
        return tuple(acc[...] for acc in accs)

    # Without the barrier the compiler may use sums before it waits for them, and then waits for every product.
    made = pl.run_scoped(run, *[plgpu.ACC(SHAPE, jnp.float32)] * len(sums))
    return tuple(lax.optimization_barrier(tuple(map(wide, made))))


Terms = Sequence[Any]
"""Two tiles of shared memory whose sum is a matrix, of float32 but for the last 7 bits."""


def split(terms: Terms, x: Any) -> None:
    """Write a matrix in registers to two tiles."""
    high = upper(x)
    put(terms[0], high)
    put(terms[1], x - high)


def times(a: Terms, b: Terms) -> Any:
    """Return the product of matrices of two terms each."""
    return products((a[0], b[0]), (a[0], b[1]), (a[1], b[0]))


class Lines:
    """The lines of a chunk, and the matrices made of them.

    Args:
      lines_s: lines of `vectors` in shared memory.
      channels: number of the first line of channels, with decay by channels.
    """

    def __init__(self, lines_s: Any, channels: int | None = None) -> None:
        self.lines_s = lines_s
        self.channels = channels

    def zero(self) -> Any:
        """Return a 0 that the compiler cannot know before it is here.

        What does not change during a loop would be computed before it and kept in registers that are needed for sums:
        eight for the descriptors of each tile that is multiplied, 32 for a mask.
        """
        return self.lines_s[BEGIN, 0].astype(jnp.int32)  # a chunk's first row sees itself

    def places(self) -> tuple[Any, Any]:
        """Return the number of each row and of each column, as matrices."""
        zero = self.zero()
        row, column = (wide(plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=WIDE)) for axis in (0, 1))
        return row + zero, column + zero

    def of(self, line: int, axis: int = 0) -> Any:
        """Return factors of rows (axis 0) or of columns, as a matrix."""
        x = plgpu.load(self.lines_s.at[line], layout=WIDE.reduce(1 - axis), optimized=False)
        return wide(spread(x, SHAPE, axis))

    def keeps(self, tile: int = 0) -> Any:
        """Return the decay over the whole chunk of a tile of the state: a scalar, or by channels factors of rows."""
        return self.lines_s[SINCE, SIDE - 1] if self.channels is None else self.of(self.channels + tile)

    def tiles(self, buffer_s: Any) -> list[Any]:
        """Return the tiles of a buffer (n, 64, 64)."""
        zero = self.zero()
        return [buffer_s.at[zero + i] for i in range(buffer_s.shape[0])]

    def sees(self) -> Any:
        """Return whether each row sees each column."""
        row, column = self.places()
        return (column >= self.of(BEGIN).astype(jnp.int32)) & (column <= row)

    def decays(self) -> Any:
        """Return the decay from each column's token to each row's, 0 where the row does not see it."""
        sees = self.sees()
        return wide(jnp.where(sees, jnp.exp2(self.of(TOTAL) - self.of(COLUMNS, 1)), 0.0))
