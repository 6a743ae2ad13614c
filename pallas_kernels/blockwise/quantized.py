"""Arrays in eight bits with a float32 scale per block, and the choice of a block: a tile of a parameter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise.codecs import codec, encode_stochastic
from pallas_kernels.blockwise.reference import absmax_of, blocks_of, scaled, unblock
from pallas_kernels.dispatch import KernelError

SMALLEST_BLOCK = 32
"""Fewest elements of a block; with fewer, a scale takes more than an eighth of a byte per element."""
LANES = 128
"""Largest last dimension of a tile: the lanes of a TPU register."""
WHOLE_AXES = ("layers", "experts", "heads", "kv_heads")
"""Logical axes that a tile spans only as a last resort: short ones, which tensor and expert parallelism shard."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["tile", "format", "signed", "flat"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as 8-bit codes and the largest magnitude of each block; a pytree of the two.

    Args:
      codes: of the array's shape, uint8 ("dynamic", unsigned "linear"), int8 or float8_e4m3fn.
      scales: float32, of shape `codes.shape / tile`, or `(ceil(size / flat),)` in the flat form.
      tile: the block's extent in every dimension; `()` in the flat form.
      format: the codec's name.
      signed: whether the codec is signed.
      flat: elements of a block in the flat form, whose blocks are runs of the flattened array; else `None`.
    """

    codes: jax.Array
    scales: jax.Array
    tile: tuple[int, ...]
    format: str
    signed: bool
    flat: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised array."""
        return tuple(self.codes.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.size + 4 * math.prod(self.scales.shape)


def quantize_blockwise(
    x: jax.Array,
    *,
    block_size: int = 256,
    signed: bool = True,
    format: str = "dynamic",
    tile: Sequence[int] | None = None,
    key: jax.Array | None = None,
    moment: bool = False,
) -> Quantized:
    """Divide each block by its largest magnitude and round to 8 bits (Dettmers et al. 2022).

    A block of zeros stays zeros. In a block with an infinity or a NaN no element is dequantised to a finite number, so
    that the fault shows. A block whose largest magnitude is below 1.2e-38 (not a normal float32) counts as zeros.

    Args:
      x: float, of any shape.
      block_size: elements of a block when there is no `tile`, a power of two: x is flattened, and its last block may be
        shorter.
      signed: False for numbers that are never negative.
      format: "dynamic", "linear", "fp8" or "fp8_expanded".
      tile: a block's extent in every dimension of x, dividing it; `tile_for` chooses one.
      key: of `jax.random`; round at random to one of the two neighbours so that the mean is x. Without it, round to the
        nearest.
      moment: round as optimizers round their moments: with signed=False, a positive number never becomes 0
        (`Codec.encode_moment`).

    Raises:
      KernelError: the format does not exist, the tile does not divide x, the block size is not a power of two, or both
        a key and `moment` are set.
    """
    codec(format, signed)  # raises for a format that does not exist
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelError(f"quantize_blockwise takes floats, and x is {x.dtype}; cast it to float32 first")
    if key is not None and moment:
        raise KernelError("rounding at random may make a second moment 0; leave out key or moment")
    if tile is None and (block_size < 1 or block_size & (block_size - 1)):
        raise KernelError(f"block_size={block_size} is not a power of two; 256 is usual")
    tile = () if tile is None else tuple(int(t) for t in tile)
    flat = None if tile else block_size
    if tile:
        check_tile(tuple(x.shape), tile, "x")
    return _quantize(x, key, tile, flat, format, bool(signed), bool(moment))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _quantize(
    x: jax.Array,
    key: jax.Array | None,
    tile: tuple[int, ...],
    flat: int | None,
    format: str,
    signed: bool,
    moment: bool,
) -> Quantized:
    """Quantise in one program; within another program it is inlined."""
    code = codec(format, signed)
    blocks = blocks_of(x.astype(jnp.float32), tile, flat)
    scales = code.scales(blocks, absmax_of(blocks, tile, flat))
    units = code.bend(scaled(blocks, _expand(scales, tile, flat)), _expand(scales, tile, flat))
    encode = code.encode_moment if moment else code.encode
    codes = encode(units) if key is None else encode_stochastic(code, units, key)
    return Quantized(unblock(codes, x.shape), _squeeze(scales, tile, flat), tile, format, signed, flat)


def dequantize_blockwise(q: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Return the array that `q` stands for, computed in float32.

    Args:
      q: codes and scales.
      dtype: the result's dtype.

    Raises:
      KernelError: codes, scales and tile do not fit each other.
    """
    check_quantized(q, "q")
    return _dequantize(q, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _dequantize(q: Quantized, dtype: jnp.dtype) -> jax.Array:
    blocks = blocks_of(q.codes, q.tile, q.flat)
    code, scales = codec(q.format, q.signed), _expand(q.scales, q.tile, q.flat)
    values = code.unbend(code.decode(blocks), scales) * scales
    return unblock(values, q.codes.shape).astype(dtype)


def tile_for(
    shape: Sequence[int], axes: Sequence[str | None] | None = None, *, width: int = LANES
) -> tuple[int, ...] | None:
    """Return the tile of a parameter that shares a scale, chosen from shape and names alone, so the same on any mesh.

    A tile is a piece of a row: the largest power of two up to `width` that divides the last dimension that is not
    "layers". It joins rows, whose scales may differ, only where the piece has fewer than `SMALLEST_BLOCK` elements, and
    only to reach that number. It then takes rows of one other dimension, the first from the right that suffices and is
    not one of `WHOLE_AXES`; where none suffices alone, several dimensions share, `WHOLE_AXES` last. The extent along
    "layers" is 1.

    Args:
      shape: the parameter's shape, unsharded, with its stacked layers.
      axes: a logical name for each dimension; `None` when they are unknown.
      width: largest extent of the last dimension, a power of two; kernels need 128.

    Returns:
      the tile, or `None` where no tile has `SMALLEST_BLOCK` elements: keep such a tensor in 32 bits.

    Raises:
      KernelError: the number of names is not that of dimensions, or `width` is not a power of two.
    """
    if width < 1 or width & (width - 1):
        raise KernelError(f"width={width} is not a power of two; {LANES} is usual")
    names = [None] * len(shape) if axes is None else list(axes)
    if len(names) != len(shape):
        raise KernelError(
            f"axes {tuple(names)} name {len(names)} dimensions, but the shape {tuple(shape)} has {len(shape)}"
        )
    own = [i for i, name in enumerate(names) if name != "layers"]
    tile = [1] * len(shape)
    if not own:
        return None
    tile[own[-1]] = _divisor(shape[own[-1]], width)
    needed = max(1, SMALLEST_BLOCK // tile[own[-1]])
    others = sorted(own[-2::-1], key=lambda i: names[i] in WHOLE_AXES)  # from the right, WHOLE_AXES last
    ordinary = [i for i in others if names[i] not in WHOLE_AXES]
    alone = [i for i in ordinary if shape[i] % needed == 0][:1]
    for i in alone or others:
        tile[i] = _divisor(shape[i], needed)
        needed //= tile[i]
    return tuple(tile) if needed == 1 else None


def _divisor(n: int, most: int) -> int:
    """Return the largest power of two up to `most`, itself one, that divides n (for n = 0: `most`)."""
    return math.gcd(n, most) if n else most


def check_tile(shape: tuple[int, ...], tile: tuple[int, ...], what: str) -> None:
    """Raise `KernelError` unless the tile has the shape's rank and divides it; the message names one that does."""
    if len(tile) == len(shape) and all(t > 0 and n % t == 0 for n, t in zip(shape, tile, strict=True)):
        return
    near = tile_for(shape) if shape else None
    hint = f"; {near} would" if near else ""
    raise KernelError(f"the tile {tile} does not divide {what}, whose shape is {shape}{hint}")


def check_quantized(q: Quantized, what: str) -> None:
    """Raise `KernelError` unless codes, scales, tile and format fit each other."""
    code = codec(q.format, q.signed)
    if q.codes.dtype != code.dtype:
        kind = "signed" if q.signed else "unsigned"
        raise KernelError(f"{what}'s codes are {q.codes.dtype}, and {kind} '{q.format}' codes are {code.dtype}")
    if q.scales.dtype != jnp.float32:
        raise KernelError(f"{what}'s scales are {q.scales.dtype}; they have to be float32")
    if q.flat is None:
        check_tile(q.shape, q.tile, what)
        want = tuple(n // t for n, t in zip(q.shape, q.tile, strict=True))
    else:
        want = (-(-q.size // q.flat),)
    if tuple(q.scales.shape) != want:
        raise KernelError(f"{what}'s scales are of shape {tuple(q.scales.shape)}; codes {q.shape} and tile need {want}")


def _expand(scales: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    """Return scales in a shape that broadcasts against `blocks_of`; scales in that shape stay."""
    if flat is not None:
        return scales.reshape(-1, 1)
    if scales.ndim == 2 * len(tile) and tile:
        return scales
    return scales.reshape([n for s in scales.shape for n in (s, 1)])


def _squeeze(scales: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    return scales.reshape(-1) if flat is not None else scales.reshape(scales.shape[::2])
