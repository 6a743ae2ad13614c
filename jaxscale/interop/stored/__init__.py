"""Layouts of quantised weights in the folders of other programs, one file each."""

from __future__ import annotations

from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.stored.awq import AWQLayout
from jaxscale.interop.stored.bitsandbytes import BitsAndBytes
from jaxscale.interop.stored.compressed import CompressedTensors
from jaxscale.interop.stored.fp8 import Fp8Blocks
from jaxscale.interop.stored.gptq import GPTQLayout
from jaxscale.interop.stored.layout import Decoded, QuantisedLayout
from jaxscale.interop.stored.mxfp4 import MXFP4Experts
from jaxscale.interop.stored.torchao import TorchAO

LAYOUTS: tuple[type[QuantisedLayout], ...] = (
    Fp8Blocks,
    CompressedTensors,
    GPTQLayout,
    AWQLayout,
    MXFP4Experts,
    BitsAndBytes,
    TorchAO,
)
"""All layouts; `quantization_config.quant_method` in a config.json chooses one."""

METHODS: dict[str, type[QuantisedLayout]] = {method: layout for layout in LAYOUTS for method in layout.methods}
"""The layout of each `quant_method`."""

FIELD = "quantization_config"


def method_of(values: dict[str, Any]) -> str | None:
    """Return the `quant_method` of a config.json, "an unknown method" if it does not say, or `None` if not quantised.

    Args:
      values: the content of config.json.
    """
    config = values.get(FIELD)
    if not config:
        return None
    if not isinstance(config, dict):
        return short(config).strip("'")
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"  # older files of it have no quant_method
    return method if isinstance(method, str) else "an unknown method"


def layout_of(values: dict[str, Any], where: str) -> tuple[QuantisedLayout, Fields]:
    """Return the layout of a quantised checkpoint, and the fields of its `quantization_config`.

    Args:
      values: the content of config.json.
      where: the file, for messages.

    Raises:
      CheckpointError: the method or one of its settings is unknown.
    """
    method = method_of(values)
    config = values[FIELD]
    if method not in METHODS or not isinstance(config, dict):
        raise CheckpointError(
            f"{where} is quantised ({method}){near(str(method), METHODS)}; or use a checkpoint in bfloat16 or float32"
        )
    fields = Fields(config, f"{FIELD} of {where}")
    fields.get("quant_method", None)
    return METHODS[method](fields), fields


__all__ = ["FIELD", "LAYOUTS", "METHODS", "Decoded", "QuantisedLayout", "layout_of", "method_of"]
