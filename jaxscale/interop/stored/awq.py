"""AWQ's layout (Lin et al. 2023), as AutoAWQ writes it for its matrix product ("gemm")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import Fields
from jaxscale.interop.stored.bits import pack, unpack
from jaxscale.interop.stored.gptq import group_size, grouped, only_kind, with_zeros
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

_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Place in a word, in fours of bits from the lowest on, of each of eight outputs."""


class AWQLayout(QuantisedLayout):
    """weight[o, i] = (code[i, o] - zero[g, o]) · scale[g, o], where g is the group of input i.

    Eight outputs are in a word: the even ones in its lower half, the odd ones in its upper half.

    Args:
      config: fields of `quantization_config`.

    Raises:
      CheckpointError: another number of bits, or tensors for another kernel than "gemm".
    """

    methods = ("awq",)
    forms = (Form(".weight", {"codes": ".qweight", "zeros": ".qzeros", "scale": ".scales"}),)

    def __init__(self, config: Fields):
        config.only("w_bit" if "w_bit" in config.values else "bits", 4)
        config.only("version", "gemm", "GEMM")
        config.only("format", "gemm")
        self.group = group_size(config)
        for name in (
            "zero_point",
            "modules_to_not_convert",
            "backend",
            "exllama_config",
            "fuse_max_seq_len",
            "do_fuse",
        ):
            config.get(name, None)

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, zeros, scale = (entries[role] for role in ("codes", "zeros", "scale"))
        if len(codes.shape) != 2 or codes.dtype != "I32" or zeros.dtype != "I32":
            raise misfit(name, entries)
        inputs, outputs = codes.shape[0], 8 * codes.shape[1]
        groups = -(-inputs // (self.group or inputs))
        if scale.shape != (groups, outputs) or zeros.shape != (groups, outputs // 8):
            raise misfit(name, entries)
        return outputs, inputs

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        scale = finite(name, "the scale", arrays["scale"])
        codes, zeros = (_unpack(arrays[role]) for role in ("codes", "zeros"))
        group = np.arange(len(codes)) // (self.group or len(codes))
        return grouped(np.ascontiguousarray(codes.T), zeros.T, scale.T, group)

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """See `QuantisedLayout.kind`."""
        return Kind("uint4", 1, self.group, scale_type(name, entries["scale"]), zeros=True)

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """See `QuantisedLayout.planes`."""
        return Planes(_unpack(arrays["codes"]).T, arrays["scale"].T, _unpack(arrays["zeros"]).T)

    def tensors(self, kind: Kind, planes: Planes) -> dict[str, np.ndarray]:
        """See `QuantisedLayout.tensors`."""
        assert planes.zeros is not None
        return {".qweight": _pack(planes.codes.T), ".qzeros": _pack(planes.zeros.T), ".scales": planes.scale.T}

    @classmethod
    def written(cls, kind: Kind, shape: tuple[int, ...]) -> Kind:
        """See `QuantisedLayout.written`."""
        if shape[0] % 8:
            raise CheckpointError(f"its {shape[0]} outputs do not fill words of 8")
        return with_zeros(kind, (4,))

    @classmethod
    def nearest(cls, bits: int) -> str:
        """See `QuantisedLayout.nearest`."""
        return "uint4"

    @classmethod
    def settings(cls, kinds: Mapping[Kind, Sequence[str]], others: Sequence[str], symmetric: bool) -> dict[str, Any]:
        """See `QuantisedLayout.settings`."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": only_kind(kinds).columns or -1,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": list(others),
        }


def _pack(codes: np.ndarray) -> np.ndarray:
    """Return the words of codes (rows, 8 · words), the inverse of `_unpack`."""
    eights = codes.reshape(len(codes), -1, 8)[:, :, np.argsort(_ORDER)]
    return pack(np.ascontiguousarray(eights.reshape(len(codes), -1)), 4)


def _unpack(words: np.ndarray) -> np.ndarray:
    """Return the codes (rows, 8 · words), uint8, of a matrix of words."""
    codes = unpack(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    return codes[:, :, _ORDER].reshape(len(words), -1)
