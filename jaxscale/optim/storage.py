"""Where optimizer state is kept: 8 bits a number where that is safe, 32 where it is not, by a rule one can read."""

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


def is_quantized(x: Any) -> bool:
    """For `is_leaf`: an 8-bit state is one thing to a `tree.map` over parameters."""
    return isinstance(x, Quantized)


@register
@dataclasses.dataclass(frozen=True)
class EightBit:
    """Block-wise 8-bit states (Dettmers et al. 2022), and which parameters keep 32 bits.

    A block is a tile of the per-layer, unsharded parameter, chosen from its shape and names alone, so that the state
    is the same to the bit on every layout. 2 + 8 / block_size bytes a parameter for two states, against 8. It is a
    piece of one row, since rows may have unlike scales (sparse or uneven gradients); only where the last dimension has
    fewer than 32 numbers for it does it join rows, up to 32.

    Args:
      block_size: the most numbers that share a scale, a power of two of at least 32. The TPU kernel takes 128, the
        GPU kernel multiples of it; XLA updates blocks of any size.
      format: "dynamic" (the paper's), "linear" or "fp8". The last two are coarse among small second moments, so use
        them for optimizers with a momentum only.
      min_size: a parameter with fewer elements per layer keeps 32 bits.
      keep: parameters keep 32 bits when a component of their path is one of these. The paper keeps embeddings, whose
        gradients are sparse and uneven; `()` keeps none.
      width: the most that a tile takes of a parameter's last dimension, a power of two: fewer than `block_size` where
        a layout cuts the last dimension more finely. `None` is `block_size`.

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
        """Why the states of a parameter keep 32 bits, or `None` when they take 8."""
        kept = [part for part in info.path.split("/") if part in self.keep]
        if kept:
            return f"'{kept[0]}' is in EightBit.keep"
        size = math.prod(n for n, a in zip(info.shape, info.axes, strict=True) if a not in STACKED)
        if size < self.min_size:
            return f"{size} elements per layer, below EightBit.min_size = {self.min_size}"
        if self.tile(info) is None:
            return f"its shape {info.shape} has no tile of a power of two of at least {SMALLEST_BLOCK} elements"
        return None

    def tile(self, info: TensorInfo) -> tuple[int, ...] | None:
        """The tile of a parameter that shares a scale, or `None` when its shape has none."""
        return tile_for(info.shape, info.axes, width=min(self.block_size, self.width or self.block_size))

    def store(self, x: jax.Array, info: TensorInfo, signed: bool) -> Moment:
        """A state as it is kept.

        Args:
          x: float32, of the parameter's shape.
          info: the parameter.
          signed: whether the state may be negative.
        """
        if self.why_32bit(info) is not None:
            return x.astype(jnp.float32)
        return quantize_blockwise(x, signed=signed, format=self.format, tile=self.tile(info), moment=True)

    def notes(self, infos: Tree) -> tuple[str, ...]:
        """A sentence per parameter that keeps 32 bits."""
        found = ((i.path, self.why_32bit(i)) for i in jax.tree.leaves(infos))
        return tuple(f"{path} keeps 32-bit optimizer state: {why}" for path, why in found if why is not None)


EIGHT_BIT = EightBit()
"""The paper's choices."""


def check_fits(tiles: Sequence[tuple[TensorInfo, tuple[int, ...]]], layout: Layout) -> None:
    """Raises unless every device's piece of every parameter is a whole number of tiles.

    Args:
      tiles: the parameters whose state is in 8 bits, each with its tile.
      layout: whose rules for `opt_state` cut them.

    Raises:
      LayoutError: naming a storage whose tiles fit all of them, or how to keep this parameter in 32 bits.
    """
    held = [_local(info, layout) for info, _ in tiles]
    for (info, tile), local in zip(tiles, held, strict=True):
        if not _divides(tile, local):
            shape = f"{info.path} {info.axes} of shape {info.shape}"
            instead = _fitting([info for info, _ in tiles], held) or _keeping(info)
            raise LayoutError(
                f"the 8-bit states of {shape} have tiles of {tile}, which {layout} would cut: a device holds {local}; "
                f"{instead}"
            )


def _local(info: TensorInfo, layout: Layout) -> tuple[int, ...]:
    spec = layout.spec(info.axes, info.shape, kind="opt_state", name=info.path)
    cuts = [math.prod(layout.sizes[m] for m in ((part,) if isinstance(part, str) else part or ())) for part in spec]
    return tuple(n // c for n, c in zip(info.shape, cuts, strict=True))


def _divides(tile: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    return tile is not None and all(n % t == 0 for n, t in zip(shape, tile, strict=True))


def _fitting(infos: Sequence[TensorInfo], held: Sequence[tuple[int, ...]]) -> str | None:
    """The storage of the widest tiles that fits every parameter."""
    for width in (128, 64, 32, 16, 8, 4, 2, 1):
        tiles = [tile_for(i.shape, i.axes, width=width) for i in infos]
        if all(map(_divides, tiles, held)):
            return (
                f"with the optimizer's storage=EightBit(width={width}) it fits, and every other parameter whose state "
                f"is in 8 bits (in gin: AdamW8bit.storage = @EightBit(), EightBit.width = {width})"
            )
    return None


def _keeping(info: TensorInfo) -> str:
    component = info.path.rsplit("/", 2)[-2] if "/" in info.path else info.path
    return f"no tile fits all parameters, so keep it in 32 bits by adding '{component}' to EightBit.keep"


def convert_state(state: Tree, like: Tree) -> Tree:
    """An optimizer's state in another precision: between 32-bit and 8-bit, or between two 8-bit storages.

    Args:
      state: a state, of arrays.
      like: the state to become, of arrays or shapes, as `jax.eval_shape(tx.init, params)`: the same but for which
        leaves are `Quantized`, and how.

    Raises:
      ConfigError: the two differ in more than that.
    """
    structure: Any
    wanted: Any
    have, structure = jax.tree.flatten(state, is_leaf=is_quantized)
    want, wanted = jax.tree.flatten(like, is_leaf=is_quantized)
    shapes = [tuple(x.shape) for x in have], [tuple(x.shape) for x in want]
    if structure != wanted or shapes[0] != shapes[1]:
        raise ConfigError(
            f"a state of {len(have)} tensors cannot become one of {len(want)} with other names or shapes; only the "
            "same optimizer's state converts between 8 and 32 bits"
        )
    return jax.tree.unflatten(structure, [convert(a, b) for a, b in zip(have, want, strict=True)])


def convert(x: Moment, like: Moment) -> Moment:
    """One state, kept as `like` is (an array or a `Quantized`, whose values do not matter)."""
    stored = lambda m: (m.tile, m.format, m.signed, m.flat) if is_quantized(m) else m.dtype  # noqa: E731
    if stored(x) == stored(like):
        return x
    value = dequantize_blockwise(_raised(x)) if is_quantized(x) else x
    if not is_quantized(like):
        return value.astype(like.dtype)
    tile, block_size = (None, like.flat) if like.flat is not None else (like.tile, 256)
    form: Any = dict(signed=like.signed, format=like.format, tile=tile, block_size=block_size)
    return quantize_blockwise(value, moment=True, **form)


def raise_zeros(state: Tree) -> Tree:
    """A state whose second moments in 8 bits are nowhere 0: zeros become the smallest positive value of their block.

    Older versions rounded small positive second moments to 0, and beside a first moment that is not 0 the next step
    would be that moment over eps. Where there was no gradient yet the first moment is 0, and so is the step.
    """
    return jax.tree.map(lambda x: _raised(x) if is_quantized(x) else x, state, is_leaf=is_quantized)


def _raised(q: Quantized) -> Quantized:
    if q.signed:
        return q
    code = codec(q.format, q.signed)
    return dataclasses.replace(q, codes=code.at(jnp.maximum(code.order(q.codes), 1)))
