"""GPT-OSS's layout of experts: mxfp4 (Open Compute Project, Microscaling Formats 1.0), 32 inputs a block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxscale.interop.fields import Fields
from jaxscale.interop.stored.bits import e2m1, pack_along, unpack
from jaxscale.interop.stored.layout import Arrays, Entries, Form, Kind, Planes, QuantisedLayout, misfit, powers


class MXFP4Experts(QuantisedLayout):
    """`NAME_blocks` uint8 (experts, outputs, blocks, 16) and `NAME_scales` uint8 (experts, outputs, blocks).

    A byte has two codes of e2m1, the lower half first; a scale is 2^(e - 127). The weight is (experts, inputs,
    outputs), as transformers has it.

    Args:
      config: fields of `quantization_config`.
    """

    methods = ("mxfp4",)
    forms = (Form("", {"codes": "_blocks", "scale": "_scales"}),)

    def __init__(self, config: Fields):
        for name in ("modules_to_not_convert", "dequantize"):
            config.get(name, None)

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, scale = entries["codes"], entries["scale"]
        four = len(codes.shape) == 4 and codes.shape[:3] == scale.shape
        if not four or codes.shape[3] != 16 or codes.dtype != "U8" or scale.dtype != "U8":
            raise misfit(name, entries)
        experts, outputs, blocks, half = codes.shape
        return experts, 2 * half * blocks, outputs

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        scale = powers(name, arrays["scale"])
        values = e2m1(arrays["codes"])
        values *= scale[..., None]
        return np.ascontiguousarray(values.reshape(*scale.shape[:2], -1).transpose(0, 2, 1))

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """See `QuantisedLayout.kind`."""
        return Kind("e2m1", 1, 2 * entries["codes"].shape[-1], "e8m0")

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """See `QuantisedLayout.planes`."""
        codes, scale = arrays["codes"], arrays["scale"]
        powers(name, scale)
        codes = unpack(codes, 4, 2 * codes.shape[-1]).reshape(*scale.shape[:2], -1)
        return Planes(codes.transpose(0, 2, 1), scale.transpose(0, 2, 1))

    def tensors(self, kind: Kind, planes: Planes) -> dict[str, np.ndarray]:
        """See `QuantisedLayout.tensors`."""
        codes, scale = (x.transpose(0, 2, 1) for x in (planes.codes, planes.scale))
        packed = pack_along(codes.reshape(*scale.shape, -1), 4, -1)
        return {"_blocks": packed, "_scales": np.ascontiguousarray(scale)}
