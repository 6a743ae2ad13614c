"""DeepSeek-V3's and Kimi-K2's layout (Liu et al. 2024): weights in fp8 (e4m3), a float32 scale per 128×128 block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxscale import reading
from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.safetensors import DTYPES
from jaxscale.interop.stored.layout import (
    Arrays,
    Entries,
    Form,
    Kind,
    Planes,
    QuantisedLayout,
    finite,
    misfit,
    scale_type,
)

FLOATS = ("F8_E4M3", "F8_E5M2")
SCALES = ("F32", "F16", "BF16", "F8_E8M0")


class Fp8Blocks(QuantisedLayout):
    """fp8 codes with a scale per block of rows and columns, of a row, or of the whole matrix: weight = code · scale.

    Blocks at the lower and right edges may be cut short. `weight_scale_inv`, in spite of its name, is multiplied.
    Scales of activations are dropped.

    Args:
      config: fields of `quantization_config`.

    Raises:
      CheckpointError: the blocks are no two sizes.
    """

    methods = ("fp8", "fbgemm_fp8")
    forms = (
        Form(".weight", {"codes": ".weight", "scale": ".weight_scale_inv"}),
        Form(".weight", {"codes": ".weight", "scale": ".weight_scale"}),
    )
    dropped = (".activation_scale", ".input_scale", ".input_scale_ub", ".k_scale", ".v_scale")

    def __init__(self, config: Fields):
        block = config.get("weight_block_size", None)
        if block is not None and not _is_block(block):
            raise CheckpointError(
                f"{config.what} has weight_block_size = {short(block)}; supported are two sizes, such as [128, 128], "
                "and null"
            )
        config.only("fmt", "e4m3", "e5m2")
        config.only("scale_fmt", "float", "ue8m0")
        config.only("expert_dtype", "fp8")
        for name in ("activation_scheme", "modules_to_not_convert", "ignored_layers", "activation_scale_ub"):
            config.get(name, None)
        self.block = None if block is None else (block[0], block[1])

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, scale = entries["codes"], entries["scale"]
        fits = scale.shape in grids(codes.shape, self.block)
        if codes.dtype not in FLOATS or len(codes.shape) != 2 or scale.dtype not in SCALES or not fits:
            raise misfit(name, entries)
        return codes.shape

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        return scaled(arrays["codes"].astype(np.float32), finite(name, "the scale", arrays["scale"]), self.block)

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """See `QuantisedLayout.kind`."""
        codes, scale = entries["codes"], entries["scale"]
        numbers = codes.dtype.removeprefix("F8_").lower()
        return Kind(numbers, *block_shape(codes.shape, scale.shape, self.block), scale_type(name, scale))

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """See `QuantisedLayout.planes`."""
        scale = arrays["scale"]
        return Planes(arrays["codes"].view(np.uint8), scale if scale.ndim == 2 else scale.reshape(-1, 1))

    def tensors(self, kind: Kind, planes: Planes) -> dict[str, np.ndarray]:
        """See `QuantisedLayout.tensors`; the ending of the scales is that of blocks."""
        end = ".weight_scale" if self.block is None else ".weight_scale_inv"
        return {".weight": planes.codes.view(DTYPES[f"F8_{kind.numbers.upper()}"]), end: planes.scale}


def block_shape(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int | None, int | None]:
    """Return the outputs and the inputs that share a scale, `None` for all; see `grids`.

    Args:
      shape: that of the matrix.
      scales: that of the scales.
      block: rows and columns of a block, if there are any.
    """
    if scales in ((), (1,), (1, 1)):
        return None, None
    return (1, None) if block is None or scales[1:] in ((), (1,)) and scales[0] == shape[0] else block


def _is_block(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(reading.is_whole(n, 1) for n in block)


def grids(shape: tuple[int, ...], block: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """Return the shapes that the scales of a matrix may have: one scale, one per row, or one per block.

    Args:
      shape: that of the matrix.
      block: rows and columns of a block, if there are any.
    """
    whole: list[tuple[int, ...]] = [(), (1,), (1, 1)]
    if len(shape) != 2:
        return whole
    rows = [*whole, (shape[0],), (shape[0], 1)]
    return rows if block is None else [*rows, tuple(-(-n // b) for n, b in zip(shape, block, strict=True))]


def scaled(values: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> np.ndarray:
    """Multiply a matrix in place by the scale of the whole, of each row or of each block, and return it.

    Args:
      values: float32 (rows, columns).
      scale: float32; one of the shapes of `grids`.
      block: rows and columns of a block.
    """
    rows, columns = values.shape
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    if block is None or scale.shape in ((1, 1), (rows, 1)):
        values *= scale
        return values
    wide = np.repeat(scale, block[1], axis=1)[:, :columns]
    for i, row in enumerate(wide):
        values[i * block[0] : (i + 1) * block[0]] *= row
    return values
