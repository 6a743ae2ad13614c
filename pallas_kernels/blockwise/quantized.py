"""Arrays in eight bits with a float32 scale a block, and which tile of a parameter a block is."""

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
"""Elements; a scale for fewer is more than an eighth of a byte each."""
LANES = 128
"""What the last dimension of a tile is at most: the lanes of a TPU register."""
WHOLE_AXES = ("layers", "experts", "heads", "kv_heads")
"""Logical axes that a tile leaves alone where it can: they are short, and what tensor and expert parallelism cut."""


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
      scales: float32; of `codes.shape / tile`, or of `(ceil(size / flat),)`.
      tile: the block's extent in every dimension; `()` in the flat form.
      format: the codec's name.
      signed: of the codec.
      flat: elements of a block in the flat form, which runs through the flattened array; else `None`.
    """

    codes: jax.Array
    scales: jax.Array
    tile: tuple[int, ...]
    format: str
    signed: bool
    flat: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array this stands for."""
        return tuple(self.codes.shape)

    @property
    def size(self) -> int:
        """Elements."""
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
    """Divides each block by its largest magnitude and rounds to 8 bits (Dettmers et al. 2022).

    A block of zeros stays zeros. In a block with an infinity or a NaN no element comes back finite, so that a fault
    shows. A block whose largest magnitude is below 1.2e-38 (no normal float32) counts as zeros.

    Args:
      x: float, of any shape.
      block_size: elements of a block when there is no `tile`: x is flattened, and its last block may be short; a
        power of two.
      signed: False for what is never negative.
      format: "dynamic", "linear" or "fp8".
      tile: a block's extent in every dimension of x, dividing it; `tile_for` chooses one.
      key: of `jax.random`, rounds at random to one of the two neighbours so that the mean is x; nearest without.
      moment: round as optimizers do what they keep: of an unsigned x, a positive number never becomes 0
        (`Codec.encode_moment`).

    Raises:
      KernelError: a format that there is not, a tile that does not divide x, a block size that is no power of two, both
        a key and `moment`.
    """
    codec(format, signed)  # raises for a format that does not exist
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelError(f"quantize_blockwise takes floats, and x is {x.dtype}; cast it to float32 first")
    if key is not None and moment:
        raise KernelError("a second moment is not rounded at random, which may make it 0; leave out key or moment")
    if tile is None and (block_size < 1 or block_size & (block_size - 1)):
        raise KernelError(f"block_size={block_size} is no power of two; 256 is usual")
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
    """One program where it is called outside of any; within another it is inlined."""
    code = codec(format, signed)
    blocks = blocks_of(x.astype(jnp.float32), tile, flat)
    scales = absmax_of(blocks, tile, flat)
    units = scaled(blocks, _expand(scales, tile, flat))
    encode = code.encode_moment if moment else code.encode
    codes = encode(units) if key is None else encode_stochastic(code, units, key)
    return Quantized(unblock(codes, x.shape), _squeeze(scales, tile, flat), tile, format, signed, flat)


def dequantize_blockwise(q: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """The array that `q` stands for, computed in float32 and cast to `dtype`.

    Raises:
      KernelError: codes, scales and tile do not fit each other.
    """
    check_quantized(q, "q")
    return _dequantize(q, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _dequantize(q: Quantized, dtype: jnp.dtype) -> jax.Array:
    blocks = blocks_of(q.codes, q.tile, q.flat)
    values = codec(q.format, q.signed).decode(blocks) * _expand(q.scales, q.tile, q.flat)
    return unblock(values, q.codes.shape).astype(dtype)


def tile_for(
    shape: Sequence[int], axes: Sequence[str | None] | None = None, *, width: int = LANES
) -> tuple[int, ...] | None:
    """Which tile of a parameter shares a scale: from its shape and names alone, so the state is the same on any mesh.

    A piece of a row: the largest power of two up to `width` that divides the last dimension, which is not "layers".
    Rows, whose scales may be unlike, are joined only where that is fewer than `SMALLEST_BLOCK` numbers, and only to
    have as many: of one other dimension, from the right the first that can and is not one of `WHOLE_AXES`; where none
    can alone, several share, and `WHOLE_AXES` come last. "layers" gives 1.

    Args:
      shape: the parameter's, unsharded, with its stacked layers.
      axes: a logical name a dimension; `None` when they are unknown.
      width: the most that the last dimension gives, a power of two; kernels take 128.

    Returns:
      the tile, or `None` where no `SMALLEST_BLOCK` numbers can be had: keep such a tensor in 32 bits.

    Raises:
      KernelError: as many names as dimensions are needed, and a power of two.
    """
    if width < 1 or width & (width - 1):
        raise KernelError(f"width={width} is no power of two; {LANES} is usual")
    names = [None] * len(shape) if axes is None else list(axes)
    if len(names) != len(shape):
        raise KernelError(f"axes {tuple(names)} name {len(names)} dimensions, and the shape {tuple(shape)} has others")
    own = [i for i, name in enumerate(names) if name != "layers"]
    tile = [1] * len(shape)
    if not own:
        return None
    tile[own[-1]] = _divisor(shape[own[-1]], width)
    needed = max(1, SMALLEST_BLOCK // tile[own[-1]])
    others = sorted(own[-2::-1], key=lambda i: names[i] in WHOLE_AXES)  # from the right, the whole ones last
    ordinary = [i for i in others if names[i] not in WHOLE_AXES]
    alone = [i for i in ordinary if shape[i] % needed == 0][:1]
    for i in alone or others:
        tile[i] = _divisor(shape[i], needed)
        needed //= tile[i]
    return tuple(tile) if needed == 1 else None


def _divisor(n: int, most: int) -> int:
    """The largest power of two up to `most`, itself one, that divides n (n = 0: `most`)."""
    return math.gcd(n, most) if n else most


def check_tile(shape: tuple[int, ...], tile: tuple[int, ...], what: str) -> None:
    """Raises `KernelError` unless the tile has the shape's rank and divides it; names one that does."""
    if len(tile) == len(shape) and all(t > 0 and n % t == 0 for n, t in zip(shape, tile, strict=True)):
        return
    near = tile_for(shape) if shape else None
    hint = f"; {near} would" if near else ""
    raise KernelError(f"the tile {tile} does not divide {what}, whose shape is {shape}{hint}")


def check_quantized(q: Quantized, what: str) -> None:
    """Raises `KernelError` unless codes, scales, tile and format fit each other."""
    code = codec(q.format, q.signed)
    if q.codes.dtype != code.dtype:
        kind = "signed" if q.signed else "unsigned"
        raise KernelError(f"{what}'s codes are {q.codes.dtype}, and {kind} '{q.format}' codes are {code.dtype}")
    if q.scales.dtype != jnp.float32:
        raise KernelError(f"{what}'s scales are {q.scales.dtype}; they are float32")
    if q.flat is None:
        check_tile(q.shape, q.tile, what)
        want = tuple(n // t for n, t in zip(q.shape, q.tile, strict=True))
    else:
        want = (-(-q.size // q.flat),)
    if tuple(q.scales.shape) != want:
        raise KernelError(f"{what}'s scales are of shape {tuple(q.scales.shape)}; codes {q.shape} and tile need {want}")


def _expand(scales: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    """Scales as they broadcast against `blocks_of`; what is so already stays."""
    if flat is not None:
        return scales.reshape(-1, 1)
    if scales.ndim == 2 * len(tile) and tile:
        return scales
    return scales.reshape([n for s in scales.shape for n in (s, 1)])


def _squeeze(scales: jax.Array, tile: tuple[int, ...], flat: int | None) -> jax.Array:
    return scales.reshape(-1) if flat is not None else scales.reshape(scales.shape[::2])
