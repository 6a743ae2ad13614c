"""GPTQ's layout (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it: integers packed along the inputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.stored.bits import pack, unpack, words_of
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
    scale_type,
)

_TRAINING = """damp_percent damp_auto_increment true_sequential act_group_aware static_groups model_name_or_path meta
    quantizer dataset tokenizer model_seqlen model_file_base_name block_name_to_quantize max_input_length backend
    module_name_preceding_first_block batch_size pad_token_id cache_block_outputs modules_in_block_to_quantize
    use_cuda_fp16 use_exllama exllama_config disable_exllama pack_dtype pack_impl desc_act sym lm_head mse rotation
    hyb_act offload_to_disk adapter""".split()


class GPTQLayout(QuantisedLayout):
    """weight[o, i] = (code[o, i] - zero[g, o]) · scale[g, o], where g is the group of input i.

    `qweight` has the codes of 32 / bits inputs in a word (3 bits run on into the next word), `qzeros` those of as many
    outputs. Zeros are stored minus one, but not in the format "gptq_v2".

    Args:
      config: fields of `quantization_config`.

    Raises:
      CheckpointError: a number of bits or a format of tensors that is unknown.
    """

    methods = ("gptq",)
    forms = (Form(".weight", {"codes": ".qweight", "zeros": ".qzeros", "scale": ".scales"}, {"group": ".g_idx"}),)

    def __init__(self, config: Fields):
        self.bits = config.only("bits", 4, 2, 3, 8)
        self.group = group_size(config)
        name = "checkpoint_format" if config.values.get("checkpoint_format") is not None else "format"
        self.add = 0 if config.only(name, "gptq", "gptq_v2") == "gptq_v2" else 1
        dynamic = config.get("dynamic", None) or {}
        if not isinstance(dynamic, dict):
            raise CheckpointError(f"{config.what} has dynamic = {short(dynamic)}, which is not an object")
        if any(not str(rule).startswith("-:") for rule in dynamic):
            raise CheckpointError(
                f"{config.what} has settings of single modules in 'dynamic'; supported are the same bits everywhere, "
                "and modules that are not quantised"
            )
        for field in (*_TRAINING, "format", "checkpoint_format"):
            config.get(field, None)

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, zeros, scale = (entries[role] for role in ("codes", "zeros", "scale"))
        if len(codes.shape) != 2 or len(scale.shape) != 2 or codes.dtype != "I32" or zeros.dtype != "I32":
            raise misfit(name, entries)
        inputs, outputs = codes.shape[0] * 32 // self.bits, codes.shape[1]
        group = self.group or inputs
        if (
            scale.shape != (-(-inputs // group), outputs)
            or zeros.shape != (scale.shape[0], words_of(outputs, self.bits))
            or ("group" in entries and entries["group"].shape != (inputs,))
        ):
            raise misfit(name, entries)
        return outputs, inputs

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        words, scale = arrays["codes"], finite(name, "the scale", arrays["scale"])
        inputs, outputs = words.shape[0] * 32 // self.bits, words.shape[1]
        codes = unpack(words.T, self.bits, inputs)
        zeros = self._zeros(arrays["zeros"], outputs)
        group = arrays["group"] if "group" in arrays else np.arange(inputs) // (self.group or inputs)
        if group.size and (group.min() < 0 or group.max() >= len(scale)):
            raise CheckpointError(f"g_idx of {name} names groups that its scales do not have")
        return grouped(codes, zeros.T, scale.T, group)

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """See `QuantisedLayout.kind`."""
        inputs = entries["codes"].shape[0] * 32 // self.bits
        if "group" in entries and (small("group") != np.arange(inputs) // (self.group or inputs)).any():
            raise cannot_keep(name, "its inputs are in groups of another order (desc_act)")
        return Kind(f"uint{self.bits}", 1, self.group, scale_type(name, entries["scale"]), zeros=True)

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """See `QuantisedLayout.planes`."""
        words, scale = arrays["codes"], arrays["scale"]
        codes = unpack(words.T, self.bits, words.shape[0] * 32 // self.bits)
        return Planes(codes, scale.T, self._zeros(arrays["zeros"], words.shape[1]).T)

    def _zeros(self, words: np.ndarray, outputs: int) -> np.ndarray:
        return (unpack(words, self.bits, outputs) + np.uint8(self.add)) & np.uint8(2**self.bits - 1)

    def tensors(self, kind: Kind, planes: Planes) -> dict[str, np.ndarray]:
        """See `QuantisedLayout.tensors`; with `g_idx`, which older files may lack."""
        assert planes.zeros is not None
        zeros = (planes.zeros.T - np.uint8(self.add)) & np.uint8(2**self.bits - 1)
        inputs = planes.codes.shape[1]
        return {
            ".qweight": pack(planes.codes, self.bits).T,
            ".qzeros": pack(np.ascontiguousarray(zeros), self.bits),
            ".scales": planes.scale.T,
            ".g_idx": (np.arange(inputs) // (self.group or inputs)).astype(np.int32),
        }

    @classmethod
    def written(cls, kind: Kind, shape: tuple[int, ...]) -> Kind:
        """See `QuantisedLayout.written`."""
        kind = with_zeros(kind, (2, 3, 4, 8))
        bits = int(kind.numbers[-1])
        if shape[1] * bits % 32:
            raise CheckpointError(f"codes of {bits} bits of {shape[1]} inputs do not fill words of 32 bits")
        return kind

    @classmethod
    def nearest(cls, bits: int) -> str:
        """See `QuantisedLayout.nearest`."""
        return f"int{next(b for b in (2, 3, 4, 8) if b >= bits)}"

    @classmethod
    def settings(cls, kinds: Mapping[Kind, Sequence[str]], others: Sequence[str], symmetric: bool) -> dict[str, Any]:
        """See `QuantisedLayout.settings`; with a zero point of 0 only "gptq_v2" is read alike by all programs."""
        kind = only_kind(kinds)
        return {
            "quant_method": "gptq",
            "bits": int(kind.numbers[-1]),
            "group_size": kind.columns or -1,
            "desc_act": False,
            "sym": symmetric,
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "lm_head": False,
            "dynamic": {rf"-:{re.escape(name)}$": {} for name in others if name != "lm_head"},
        }


def with_zeros(kind: Kind, widths: Sequence[int]) -> Kind:
    """Return a kind of integers with zero points, which symmetric ones have in the middle of the codes.

    Args:
      kind: what the weight is.
      widths: the widths of codes that the layout holds.

    Raises:
      CheckpointError: other numbers, or outputs that share a scale; the message is a clause.
    """
    numbers = kind.numbers.removeprefix("u")
    if not numbers.startswith("int") or int(numbers[-1]) not in widths:
        raise CheckpointError(f"it holds integers of {', '.join(map(str, widths))} bits")
    if kind.numbers != numbers and not kind.zeros:
        raise CheckpointError("its integers have no sign and no zero points")
    if kind.rows != 1:
        raise CheckpointError("each output has scales of its own in it")
    return dataclasses.replace(kind, numbers=f"u{numbers}", zeros=True)


def only_kind(kinds: Mapping[Kind, Sequence[str]]) -> Kind:
    """Return the one kind of all weights of a folder.

    Args:
      kinds: the names of modules by kind.

    Raises:
      CheckpointError: there are several.
    """
    one, *rest = kinds
    if rest:
        raise CheckpointError(
            f"{kinds[one][0]} and {kinds[rest[0]][0]} differ in bits, group or type of scales, and a folder of this "
            "layout has one of each; --as compressed-tensors holds several"
        )
    return one


def group_size(config: Fields) -> int | None:
    """Return the inputs that share a scale; `None` if all of an output do.

    Args:
      config: fields of `quantization_config`, whose `group_size` is a size or -1.
    """
    value = config.get("group_size", None)
    return None if value in (None, -1) else config.size("group_size")


def grouped(codes: np.ndarray, zeros: np.ndarray, scale: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return (codes - zeros) · scale, float32.

    Args:
      codes: uint8 (outputs, inputs).
      zeros: uint8 (outputs, groups).
      scale: float32 (outputs, groups).
      group: the group of each input.
    """
    values = codes.astype(np.float32)
    group = np.asarray(group)
    values -= zeros.astype(np.float32)[:, group]
    values *= scale[:, group]
    return values
