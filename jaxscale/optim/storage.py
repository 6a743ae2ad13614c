"""The precision of optimizer state: which states are stored in 8 bits and which in 32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import ConfigError, LayoutError, near
from jaxscale.layout import STACKED, Layout, TensorInfo
from pallas_kernels.blockwise import FORMATS, Quantized, codec, dequantize_blockwise, quantize_blockwise, tile_for
from pallas_kernels.blockwise.quantized import SMALLEST_BLOCK

Tree = Any
Moment = Any
"""A state of one parameter: a float32 array of its shape, or a `Quantized`."""


def is_quantized(x: object) -> bool:
    """Return whether `x` is an 8-bit state (`Quantized`), for `is_leaf`.

    Args:
      x: any node of an optimizer's state.
    """
    return isinstance(x, Quantized)


@register
@dataclasses.dataclass(frozen=True)
class EightBit:
    """Block-wise 8-bit states (Dettmers et al. 2022), and which parameters keep 32-bit states.

    A block, the numbers that share a scale, is a tile of one layer of the parameter. Its shape depends on the
    parameter's global shape and logical axes alone, so that the state is bit for bit the same on every layout. Two
    8-bit states need 2 + 8 / block_size bytes per parameter; in float32 they need 8. A tile is part of one row, since
    rows may have different scales (sparse or uneven gradients); only if a tile can have fewer than 32 numbers of the
    last dimension does it span several rows, for up to 32 numbers.

    Args:
      block_size: the most numbers that share a scale, a power of two of at least 32. The TPU kernel needs 128, the
        GPU kernel multiples of 128; XLA updates blocks of any size.
      format: "dynamic" (the paper's), "fp8_expanded" (8-bit floats with dynamic range expansion, Xi et al. 2024, COAT),
        "linear" or "fp8". The last two are coarse for small second moments, so use them only for optimizers without a
        second moment. XLA updates the two of 8-bit floats.
      min_size: a parameter with fewer elements per layer keeps 32-bit states.
      keep: a parameter whose path has one of these components keeps 32-bit states. The paper keeps those of embeddings,
        whose gradients are sparse and uneven; `()` keeps none.
      width: the most elements of a parameter's last dimension in a tile, a power of two. Choose less than `block_size`
        if a layout shards the last dimension into smaller parts. `None` is `block_size`.

    Raises:
      ConfigError: a block size or format that does not exist.
    """

    block_size: int = 128
    format: str = "dynamic"
    min_size: int = 4096
    keep: tuple[str, ...] = ("embed", "positions")
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "min_size", "width"):
            if name == "width" and self.width is None:
                continue
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ConfigError(f"EightBit.{name} = {getattr(self, name)!r}: must be a whole number of at least 0")
        if self.block_size < SMALLEST_BLOCK or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"EightBit.block_size = {self.block_size}: must be a power of two of at least {SMALLEST_BLOCK}"
            )
        if self.width is not None and (self.width < 1 or self.width & (self.width - 1)):
            raise ConfigError(f"EightBit.width = {self.width}: must be a power of two; kernels take 128")
        if self.format not in FORMATS:
            raise ConfigError(f"EightBit.format = {self.format!r} does not exist{near(str(self.format), FORMATS)}")
        if isinstance(self.keep, str) or not isinstance(self.keep, tuple | list):
            raise ConfigError(f"EightBit.keep = {self.keep!r}: give a tuple of path components, as ('embed',)")
        object.__setattr__(self, "keep", tuple(self.keep))

    def why_32bit(self, info: TensorInfo) -> str | None:
        """Return the reason why a parameter's states are in 32 bits, or `None` if they are in 8.

        Args:
          info: the parameter.
        """
        matches = [part for part in info.path.split("/") if part in self.keep]
        if matches:
            return f"'{matches[0]}' is in EightBit.keep"
        size = math.prod(n for n, a in zip(info.shape, info.axes, strict=True) if a not in STACKED)
        if size < self.min_size:
            return f"{size} elements per layer, below EightBit.min_size = {self.min_size}"
        if self.tile(info) is None:
            return f"its shape {info.shape} has no tile of a power of two of at least {SMALLEST_BLOCK} elements"
        return None

    def tile(self, info: TensorInfo) -> tuple[int, ...] | None:
        """Return the shape of the tiles whose elements share a scale, or `None` if the parameter's shape has none.

        Args:
          info: the parameter.
        """
        return tile_for(info.shape, info.axes, width=min(self.block_size, self.width or self.block_size))

    def store(self, x: jax.Array, info: TensorInfo, signed: bool) -> Moment:
        """Convert a state to the precision in which it is stored.

        Args:
          x: the state in float32, of the parameter's shape.
          info: the parameter.
          signed: whether the state may be negative.

        Returns:
          A `Quantized`, or a float32 array of the parameter's shape.
        """
        if self.why_32bit(info) is not None:
            return x.astype(jnp.float32)
        return quantize_blockwise(x, signed=signed, format=self.format, tile=self.tile(info), moment=True)

    def notes(self, infos: Tree) -> tuple[str, ...]:
        """Return a sentence for each parameter with 32-bit states.

        Args:
          infos: a `TensorInfo` per parameter.
        """
        reasons = ((i.path, self.why_32bit(i)) for i in jax.tree.leaves(infos))
        return tuple(f"{path} keeps 32-bit optimizer state: {why}" for path, why in reasons if why is not None)


EIGHT_BIT = EightBit()
"""8-bit storage with the defaults: blocks of 128 numbers in the paper's format; embeddings keep 32 bits."""


def check_fits(tiles: Sequence[tuple[TensorInfo, tuple[int, ...]]], layout: Layout) -> None:
    """Check that every shard of every parameter is a whole number of tiles.

    Args:
      tiles: the parameters whose state is in 8 bits, each with its tile.
      layout: the layout whose rules for `opt_state` shard them.

    Raises:
      LayoutError: a shard would hold part of a tile. The message names a storage whose tiles fit all parameters, or how
        to keep this one in 32 bits.
    """
    shards = [_shard_shape(info, layout) for info, _ in tiles]
    for (info, tile), shard in zip(tiles, shards, strict=True):
        if not _divides(tile, shard):
            shape = f"{info.path} {info.axes} of shape {info.shape}"
            instead = _fitting([info for info, _ in tiles], shards) or _keeping(info)
            raise LayoutError(
                f"the 8-bit states of {shape} have tiles of {tile}, which {layout} would divide between devices: a "
                f"device holds {shard}; {instead}"
            )


def _shard_shape(info: TensorInfo, layout: Layout) -> tuple[int, ...]:
    spec = layout.spec(info.axes, info.shape, kind="opt_state", name=info.path)
    cuts = [math.prod(layout.sizes[m] for m in ((part,) if isinstance(part, str) else part or ())) for part in spec]
    return tuple(n // c for n, c in zip(info.shape, cuts, strict=True))


def _divides(tile: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    return tile is not None and all(n % t == 0 for n, t in zip(shape, tile, strict=True))


def _fitting(infos: Sequence[TensorInfo], shards: Sequence[tuple[int, ...]]) -> str | None:
    """Suggest the storage with the widest tiles that fit the shards of every parameter."""
    for width in (128, 64, 32, 16, 8, 4, 2, 1):
        tiles = [tile_for(i.shape, i.axes, width=width) for i in infos]
        if all(map(_divides, tiles, shards)):
            return (
                f"it and all other 8-bit states fit with the optimizer's storage=EightBit(width={width}) "
                f"(in gin: AdamW8bit.storage = @EightBit(), EightBit.width = {width})"
            )
    return None


def _keeping(info: TensorInfo) -> str:
    component = info.path.rsplit("/", 2)[-2] if "/" in info.path else info.path
    return f"no tile fits all parameters, so keep it in 32 bits by adding '{component}' to EightBit.keep"


def convert_state(state: Tree, like: Tree) -> Tree:
    """Convert an optimizer's state between 32 and 8 bits, or between two 8-bit storages.

    Args:
      state: a state, of arrays.
      like: a state in the target precision, of arrays or shapes, as `jax.eval_shape(tx.init, params)`. It may differ
        from `state` only in which leaves are `Quantized`, and in their tiles and formats.

    Returns:
      The state's values in the precision of `like`.

    Raises:
      ConfigError: the two differ in more than that.
    """
    structure: Any
    target_structure: Any
    leaves, structure = jax.tree.flatten(state, is_leaf=is_quantized)
    targets, target_structure = jax.tree.flatten(like, is_leaf=is_quantized)
    shapes = [tuple(x.shape) for x in leaves], [tuple(x.shape) for x in targets]
    if structure != target_structure or shapes[0] != shapes[1]:
        raise ConfigError(
            f"cannot convert a state of {len(leaves)} tensors to one of {len(targets)} with other names or shapes; "
            "only the state of the same optimizer converts between 8 and 32 bits"
        )
    return jax.tree.unflatten(structure, [convert(a, b) for a, b in zip(leaves, targets, strict=True)])


def convert(x: Moment, like: Moment) -> Moment:
    """Convert one state to the precision of another.

    Args:
      x: the state, an array or a `Quantized`.
      like: an array or a `Quantized` of the same shape; its values are not used.
    """

    def stored(m: Moment) -> object:
        return (m.tile, m.format, m.signed, m.flat) if is_quantized(m) else m.dtype

    if stored(x) == stored(like):
        return x
    value = dequantize_blockwise(_without_zeros(x)) if is_quantized(x) else x
    if not is_quantized(like):
        return value.astype(like.dtype)
    tile, block_size = (None, like.flat) if like.flat is not None else (like.tile, 256)
    form: Any = dict(signed=like.signed, format=like.format, tile=tile, block_size=block_size)
    return quantize_blockwise(value, moment=True, **form)


def raise_zeros(state: Tree) -> Tree:
    """Replace zeros in 8-bit second moments by the smallest positive value of their block.

    Older versions rounded small positive second moments to 0; if the first moment is not 0, the next update would be
    that moment over eps. An element without any gradient so far has a first moment of 0, so its update stays 0.

    Args:
      state: an optimizer's state.
    """
    return jax.tree.map(lambda x: _without_zeros(x) if is_quantized(x) else x, state, is_leaf=is_quantized)


def _without_zeros(q: Quantized) -> Quantized:
    if q.signed:
        return q
    code = codec(q.format, q.signed)
    return dataclasses.replace(q, codes=code.at(jnp.maximum(code.order(q.codes), 1)))
