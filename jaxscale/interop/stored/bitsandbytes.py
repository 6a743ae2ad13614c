"""The layout of the package bitsandbytes: nf4 and fp4 (Dettmers et al. 2023), and int8 (Dettmers et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxscale import reading
from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.stored.layout import (
    Arrays,
    Entries,
    Form,
    Kind,
    Planes,
    QuantisedLayout,
    cannot_keep,
    finite,
    misfit,
)
from jaxscale.nn.formats.numbers import NF4

_FOUR = {"codes": ".weight", "scale": ".weight.absmax", "map": ".weight.quant_map"}
_NESTED = {"outer": ".weight.nested_absmax", "outer_map": ".weight.nested_quant_map"}
_STATE = ".weight.quant_state.bitsandbytes__"
_LARGEST_STATE = 4096


class BitsAndBytes(QuantisedLayout):
    """Four bits: weight = map[code] · absmax of its block of the flat weight. Eight bits: code · SCB / 127 of a row.

    With double quantisation the absmax are themselves codes of blocks: map[code] · absmax + offset.

    Args:
      config: fields of `quantization_config`.

    Raises:
      CheckpointError: it says neither four nor eight bits.
    """

    methods = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
    forms = (
        Form(".weight", {**_FOUR, "state": f"{_STATE}nf4"}, _NESTED),
        Form(".weight", {**_FOUR, "state": f"{_STATE}fp4"}, _NESTED),
        Form(".weight", {"codes": ".weight", "scale": ".SCB"}, {"format": ".weight_format"}),
    )

    def __init__(self, config: Fields):
        four, eight = (config.only(f"load_in_{n}bit", False, True) for n in (4, 8))
        if four == eight:
            raise CheckpointError(f"{config.what} has load_in_4bit = load_in_8bit = {four}; one of them must be true")
        config.only("bnb_4bit_quant_storage", "uint8")
        for name in ("_load_in_4bit", "_load_in_8bit", "llm_int8_threshold", "llm_int8_skip_modules"):
            config.get(name, None)
        for name in ("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "bnb_4bit_quant_type"):
            config.get(name, None)
        for name in ("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"):
            config.get(name, None)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, scale = entries["codes"], entries["scale"]
        if "state" not in entries:
            if codes.dtype != "I8" or len(codes.shape) != 2 or scale.shape != codes.shape[:1]:
                raise misfit(name, entries)
            if "format" in entries and small("format").reshape(-1)[:1].tolist() not in ([0], []):
                raise CheckpointError(f"{name} has a weight_format for one kind of GPU; only row by row is supported")
            return codes.shape
        if math.prod(entries["state"].shape) > _LARGEST_STATE:
            raise misfit(name, entries)
        state = _state(name, small("state"))
        count = math.prod(state["shape"])
        blocks = -(-count // state["blocksize"])
        nested = "outer" in entries
        if (
            codes.dtype != "U8"
            or math.prod(codes.shape) != -(-count // 2)
            or scale.shape != (blocks,)
            or entries["map"].shape != (16,)
            or nested != (scale.dtype == "U8")
            or (nested and "nested_blocksize" not in state)
            or (nested and entries["outer"].shape != (-(-blocks // state["nested_blocksize"]),))
        ):
            raise misfit(name, entries)
        return tuple(state["shape"])

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """See `QuantisedLayout.kind`; nf4 is kept, with the scales that double quantisation stands for."""
        if "state" not in entries:
            raise cannot_keep(name, "int8 of bitsandbytes can only be widened")
        state = _state(name, small("state"))
        if not np.array_equal(small("map").astype(np.float32), np.asarray(NF4, np.float32)):
            raise cannot_keep(name, "its table is not that of nf4")
        if state["shape"][1] % state["blocksize"]:
            raise cannot_keep(name, f"blocks of {state['blocksize']} do not divide its {state['shape'][1]} inputs")
        return Kind("nf4", 1, state["blocksize"], "float32")

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """See `QuantisedLayout.planes`."""
        state = _state(name, arrays["state"])
        shape = state["shape"]
        return Planes(_codes(arrays["codes"]).reshape(shape), _absmax(name, arrays, state).reshape(shape[0], -1))

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        if "state" not in arrays:
            values = arrays["codes"].astype(np.float32)
            values *= finite(name, "SCB", arrays["scale"])[:, None]
            values *= np.float32(1 / 127)  # as its own kernel does: multiplied last, not divided
            return values
        state = _state(name, arrays["state"])
        count, size = math.prod(state["shape"]), state["blocksize"]
        scale = _absmax(name, arrays, state)
        values = arrays["map"].astype(np.float32)[_codes(arrays["codes"])[:count]]
        values *= np.repeat(scale, size)[:count]
        return values.reshape(state["shape"])


def _codes(packed: np.ndarray) -> np.ndarray:
    """Return the codes of bytes, the upper half of each first."""
    flat = packed.reshape(-1)
    return np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)


def _absmax(name: str, arrays: Arrays, state: dict[str, Any]) -> np.ndarray:
    """Return the float32 scale of each block."""
    scale = arrays["scale"]
    if "outer" in arrays:
        outer = np.repeat(arrays["outer"].astype(np.float32), state["nested_blocksize"])[: len(scale)]
        scale = arrays["outer_map"].astype(np.float32)[scale] * outer + np.float32(state.get("nested_offset", 0.0))
    return finite(name, "the absmax", scale)


def _state(name: str, data: np.ndarray) -> dict[str, Any]:
    """Parse the JSON that bitsandbytes stores in a tensor: the shape and the size of blocks."""
    try:
        state = reading.parse_json(data.astype(np.uint8).tobytes())
        shape = state["shape"]
        sizes = [*shape, state["blocksize"], *([state["nested_blocksize"]] if "nested_blocksize" in state else [])]
        if len(shape) != 2 or not all(reading.is_whole(n, 1) for n in sizes):
            raise ValueError(f"its shape or its blocks are {short(sizes)}")
        float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"the quant_state of {name} cannot be read: {e}") from None
    return state
