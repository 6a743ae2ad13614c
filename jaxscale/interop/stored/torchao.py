"""torchao's layout of int8 and fp8 weights in safetensors files (`_weight_qdata`, `_weight_scale`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import Fields
from jaxscale.interop.stored.fp8 import FLOATS, grids, scaled
from jaxscale.interop.stored.layout import Arrays, Entries, Form, QuantisedLayout, finite, misfit


class TorchAO(QuantisedLayout):
    """weight = (code - zero) · scale of its output or of the whole matrix; `Int8Tensor` and `Float8Tensor` of torchao.

    Args:
      config: fields of `quantization_config`.
    """

    methods = ("torchao",)
    forms = (Form("weight", {"codes": "_weight_qdata", "scale": "_weight_scale"}, {"zeros": "_weight_zero_point"}),)

    def __init__(self, config: Fields):
        for name in ("quant_type", "quant_type_kwargs", "modules_to_not_convert", "include_input_output_embeddings"):
            config.get(name, None)
        config.get("untie_embedding_weights", None)

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, scale = entries["codes"], entries["scale"]
        if codes.dtype not in ("I8", *FLOATS):
            raise CheckpointError(f"{name} has codes of {codes.dtype} in torchao's layout; supported are int8 and fp8")
        if len(codes.shape) != 2 or scale.shape not in grids(codes.shape, None):
            raise misfit(name, entries)
        if "zeros" in entries and entries["zeros"].shape != scale.shape:
            raise misfit(name, entries)
        return codes.shape

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        values = arrays["codes"].astype(np.float32)
        if "zeros" in arrays:
            values -= arrays["zeros"].astype(np.float32).reshape(-1, 1)
        return scaled(values, finite(name, "the scale", arrays["scale"]), None)
