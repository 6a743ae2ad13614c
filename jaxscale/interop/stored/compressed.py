"""The layout of the package compressed-tensors, which llm-compressor writes: packed integers, int8, fp8, fp4."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale import reading
from jaxscale.errors import CheckpointError, count, near
from jaxscale.interop.fields import Fields, plain_pattern, short
from jaxscale.interop.safetensors import DTYPES
from jaxscale.interop.stored.bits import e2m1, pack, pack_along, unpack, words_of
from jaxscale.interop.stored.fp8 import FLOATS, SCALES, block_shape, grids, scaled
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
    powers,
    scale_type,
)

_INPUTS = "input_activations"
_MAY = {"zeros": ".weight_zero_point", "group": ".weight_g_idx"}
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)


class CompressedTensors(QuantisedLayout):
    """weight = (code - zero) · scale, with a scale per matrix, output, group of inputs, or block.

    | tensors | codes |
    |---|---|
    | `weight_packed` of int32, `weight_shape` | 1 to 8 bits without gaps, plus half of their range |
    | `weight` of int8 or fp8 | one in a byte |
    | `weight_packed` of uint8 | two fp4 (e2m1) in a byte; scales in fp8 over a float32 one (nvfp4), or powers of two |

    Activations that are rounded to integers with a scale for each token stay rounded, where weights are integers with a
    scale for each output. Other settings of activations are not kept, which `unrounded` says; those of caches are not.

    Args:
      config: fields of `quantization_config`.

    Raises:
      CheckpointError: a format, a kind of sparsity or a transform of weights that cannot be decoded.
    """

    methods = ("compressed-tensors",)
    rounds_activations = True
    few_scales = True
    forms = (
        Form(".weight", {"codes": ".weight_packed", "scale": ".weight_scale", "shape": ".weight_shape"}, _MAY),
        Form(".weight", {"codes": ".weight_packed", "scale": ".weight_scale", "global": ".weight_global_scale"}),
        Form(".weight", {"codes": ".weight_packed", "scale": ".weight_scale"}),
        Form(".weight", {"codes": ".weight", "scale": ".weight_scale"}, _MAY),
    )
    dropped = tuple(f".{a}_{b}" for a in "input output k v q".split() for b in ("scale", "zero_point", "global_scale"))

    def __init__(self, config: Fields):
        self._format = config.only("format", *_FORMATS)
        config.only("quantization_status", "compressed")
        for name in ("sparsity_config", "transform_config"):
            if not isinstance(config.get(name, None) or {}, dict):
                raise CheckpointError(f"{config.what} has {name} = {short(config.get(name))}, which is not an object")
        sparsity = config.get("sparsity_config", None) or {}
        if sparsity.get("format", "dense") not in (None, "dense"):
            raise CheckpointError(
                f"{config.what} has a sparsity_config of format {short(sparsity['format'])}; only 'dense' is supported"
            )
        if (config.get("transform_config", None) or {}).get("config_groups"):
            raise CheckpointError(
                f"{config.what} has a transform_config; only weights that are not transformed are supported"
            )
        for name in ("ignore", "kv_cache_scheme", "global_compression_ratio", "version"):
            config.get(name, None)
        self._schemes = _schemes(config)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """See `QuantisedLayout.shape`."""
        codes, scale = entries["codes"], entries["scale"]
        if len(codes.shape) != 2:
            raise misfit(name, entries)
        rows, columns = codes.shape
        groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == rows else 0
        types: tuple[str, ...] = SCALES
        if "shape" in entries:
            columns = int(small("shape").reshape(-1)[-1]) if entries["shape"].shape == (2,) else 0
            fits = codes.dtype == "I32" and codes.shape[1] == words_of(columns, self._bits(name)) > 0
        elif codes.dtype == "U8":
            columns *= 2
            types = ("F8_E4M3",) if "global" in entries else ("U8",)
            fits = groups > 0 and columns % groups == 0
            over = entries.get("global")
            fits = fits and (over is None or over.shape in ((), (1,)) and over.dtype in SCALES)
        else:
            fits = codes.dtype in ("I8", *FLOATS)
        grid = scale.shape in grids((rows, columns), self._block(name)) or 0 < groups <= columns
        if not fits or not grid or scale.dtype not in types:
            raise misfit(name, entries)
        if "zeros" in entries:
            packed = "shape" in entries and entries["zeros"].dtype == "I32"  # along the outputs
            own = (words_of(rows, self._bits(name)), max(groups, 1)) if packed else scale.shape
            if math.prod(entries["zeros"].shape) != math.prod(own) or packed and entries["zeros"].shape != own:
                raise misfit(name, entries)
        if "group" in entries and entries["group"].shape != (columns,):
            raise misfit(name, entries)
        if codes.dtype == "U8":
            self._check_fp4(name, "nvfp4" if "global" in entries else "mxfp4")
        self._check_scales(name, (rows, columns), groups, math.prod(scale.shape))
        self._shapes[name] = rows, columns
        return rows, columns

    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """See `QuantisedLayout.decode`."""
        rows, columns = self._shapes[name]
        codes, scale, zeros = arrays["codes"], arrays["scale"], arrays.get("zeros")
        if codes.dtype == np.uint8:
            values = e2m1(codes)
            scale = powers(name, scale) if scale.dtype == np.uint8 else scale.astype(np.float32)
            if "global" in arrays:
                scale = scale / _over(name, arrays["global"])
        elif "shape" in arrays:
            bits = self._bits(name)
            half = np.float32(2 ** (bits - 1))
            values = unpack(codes, bits, columns).astype(np.float32) - half
            if zeros is not None and zeros.dtype == np.int32:  # packed along the outputs
                zeros = unpack(zeros.T, bits, rows).T.astype(np.float32) - half
        else:
            values = codes.astype(np.float32)
        group = arrays.get("group")
        if group is not None and group.size and group.max() >= (scale.shape[1] if scale.ndim == 2 else 1):
            raise CheckpointError(f"weight_g_idx of {name} names groups that its scales do not have")
        return _scaled(values, finite(name, "the scale", scale), zeros, group, self._block(name))

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """See `QuantisedLayout.kind`."""
        codes, scale = entries["codes"], entries["scale"]
        if "group" in entries and (small("group") >= 0).any():
            raise cannot_keep(name, "its inputs are in groups of another order (weight_g_idx)")
        if self._format == "mixed-precision":
            raise cannot_keep(name, "the format is mixed-precision")
        rows, columns = self._shapes[name]
        shared = block_shape((rows, columns), scale.shape, self._block(name))
        if len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 1:
            shared = 1, -(-columns // scale.shape[1])
        if "zeros" in entries and (codes.dtype != "I32" or entries["zeros"].dtype != "I32"):
            raise cannot_keep(name, "its zero points are not packed")
        if codes.dtype == "U8":
            return Kind("e2m1", 1, columns // scale.shape[1], "e4m3" if "global" in entries else "e8m0")
        numbers = {"I8": "int8", "I32": f"int{self._bits(name)}"}.get(codes.dtype, codes.dtype[3:].lower())
        kind = Kind("u" * ("zeros" in entries) + numbers, *shared, scale_type(name, scale), "zeros" in entries)
        plain = kind.columns is None and kind.numbers.startswith("int")
        return dataclasses.replace(kind, activations=_token_bits(self._scheme(name)) if plain else None)

    def unrounded(self, widen: bool) -> str | None:
        """See `QuantisedLayout.unrounded`."""
        lost = next((s for _, s in self._schemes if s[_INPUTS] and (widen or _token_bits(s) is None)), None)
        if lost is None:
            return None
        why = (
            "--widen imports plain matrices"
            if widen
            else (
                "kept are integers with a scale for each token, computed as it runs, beside symmetric integers with a "
                "scale for each output"
            )
        )
        return (
            f"activations are not rounded, as they are in the program that wrote this folder "
            f"({short(lost[_INPUTS].get('type'))}, {short(lost[_INPUTS].get('num_bits'))} bits): {why}"
        )

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """See `QuantisedLayout.planes`."""
        codes, scale = arrays["codes"], arrays["scale"]
        scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
        if codes.dtype == np.uint8:
            over = _over(name, arrays["global"]).reshape(1, 1) if "global" in arrays else None
            real = powers(name, scale) if over is None else scale
            finite(name, "the scale", real if over is None else real.astype(np.float32) / over)
            return Planes(unpack(codes, 4, self._shapes[name][1]), scale.view(np.uint8), over=over)
        if codes.dtype != np.int32:
            return Planes(codes.view(np.uint8), scale)
        rows, columns = self._shapes[name]
        bits = self._bits(name)
        unpacked = unpack(codes, bits, columns)
        if "zeros" in arrays:
            return Planes(unpacked, scale, unpack(arrays["zeros"].T, bits, rows).T)
        return Planes(unpacked ^ np.uint8(2 ** (bits - 1)), scale)  # in two's complement

    def tensors(self, kind: Kind, planes: Planes) -> dict[str, np.ndarray]:
        """See `QuantisedLayout.tensors`."""
        if kind.numbers == "e2m1":
            packed = {".weight_packed": pack_along(planes.codes, 4, -1)}
            if planes.over is None:
                return {**packed, ".weight_scale": planes.scale}
            few = planes.scale.view(DTYPES["F8_E4M3"])
            return {**packed, ".weight_scale": few, ".weight_global_scale": planes.over.reshape(1)}
        scale = planes.scale.reshape(-1) if planes.scale.size == 1 else planes.scale
        if self._format in ("int-quantized", "float-quantized", "naive-quantized"):
            stored = np.dtype(np.int8) if kind.numbers == "int8" else DTYPES[f"F8_{kind.numbers.upper()}"]
            return {".weight": planes.codes.view(stored), ".weight_scale": scale}
        bits = int(kind.numbers[-1])
        codes = planes.codes if kind.zeros else planes.codes ^ np.uint8(2 ** (bits - 1))
        shape = np.array(codes.shape, np.int64)
        zeros = (
            {} if planes.zeros is None else {".weight_zero_point": pack(np.ascontiguousarray(planes.zeros.T), bits).T}
        )
        return {".weight_packed": pack(codes, bits), ".weight_scale": scale, ".weight_shape": shape, **zeros}

    @classmethod
    def written(cls, kind: Kind, shape: tuple[int, ...]) -> Kind:
        """See `QuantisedLayout.written`."""
        if kind.activations is not None and kind != Kind("int8", 1, None, kind.scale, activations=8):
            raise CheckpointError("its products round activations otherwise than those of w8a8")
        if kind.numbers == "e2m1":
            if (kind.rows, kind.columns, kind.scale) not in ((1, 32, "e8m0"), (1, 16, "e4m3")):
                raise CheckpointError("its fp4 has a power of two for 32 inputs (mxfp4), or nvfp4's scales for 16")
            return kind
        if kind.scale in ("e8m0", "e4m3"):
            raise CheckpointError("only its fp4 has scales of few bits")
        if kind.numbers == "e4m3":
            if (kind.rows is None) != (kind.columns is None) and kind.rows != 1:
                raise CheckpointError("blocks of fp8 have a number of outputs and of inputs")
            return kind
        if not kind.numbers.removeprefix("u").startswith("int"):
            raise CheckpointError("it holds integers, fp8 (e4m3), mxfp4 and nvfp4")
        if kind.numbers.startswith("u") and not kind.zeros:
            raise CheckpointError("its integers have no sign and no zero points")
        if kind.rows != 1 and (kind.rows, kind.columns, kind.zeros) != (None, None, False):
            raise CheckpointError("integers have scales for each output in it, or one for the matrix")
        return kind

    @classmethod
    def nearest(cls, bits: int) -> str:
        """See `QuantisedLayout.nearest`."""
        return "fp8" if bits == 8 else f"int{max(bits, 2)}"

    @classmethod
    def settings(cls, kinds: Mapping[Kind, Sequence[str]], others: Sequence[str], symmetric: bool) -> dict[str, Any]:
        """See `QuantisedLayout.settings`; several kinds name their modules, and one is of all linear layers."""
        formats = {_format(kind): modules[0] for kind, modules in kinds.items()}
        if len(formats) > 1:
            (a, one), (b, other), *_ = formats.items()
            raise CheckpointError(
                f"{one} would be {a} and {other} {b}, and a folder of compressed-tensors has one of fp8, packed "
                "integers, int8 with rounded activations, mxfp4 and nvfp4"
            )
        format = next(iter(formats))
        groups = {
            f"group_{n}": {
                "targets": ["Linear"] if len(kinds) == 1 else list(modules),
                "weights": _weights(kind),
                "input_activations": None if kind.activations is None else _TOKENS,
                "output_activations": None,
                "format": format,
            }
            for n, (kind, modules) in enumerate(kinds.items())
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(others),
        }

    def _scheme(self, name: str) -> dict[str, Any]:
        """Return the settings of a weight: those whose targets name its module, else those of all of a kind."""
        module = name.removesuffix(".weight")
        if len(self._schemes) == 1:
            return self._schemes[0][1]
        named = [s for targets, s in self._schemes if any(_names(t, module) for t in targets)]
        kinds = [s for targets, s in self._schemes if "Linear" in targets]
        if not named and not kinds:
            raise CheckpointError(f"no entry of config_groups in quantization_config is for {module}")
        return (named or kinds)[0]

    def _check_fp4(self, name: str, kind: str) -> None:
        """Check that quantization_config says of a weight in fp4 that it is one."""
        scheme = self._scheme(name)
        strategies = (None, "tensor_group" if kind == "nvfp4" else "group")
        known: dict[str, tuple[Any, ...]] = {
            "num_bits": (4,),
            "type": (None, "float"),
            "symmetric": (None, True),
            "strategy": strategies,
        }
        for field, values in known.items():
            if scheme.get(field) not in values:
                raise CheckpointError(
                    f"the tensors of {name} are {kind}, and config_groups in quantization_config says {field} = "
                    f"{short(scheme.get(field))}; in {kind} it is {short(values[-1])}"
                )
        formats = (f"{kind}-pack-quantized", "mixed-precision")
        if self._format not in formats:
            raise CheckpointError(
                f"the tensors of {name} are {kind}, and quantization_config says format = {short(self._format)}; in "
                f"{kind} it is {short(formats[0])}"
            )

    def _check_scales(self, name: str, shape: tuple[int, int], groups: int, scales: int) -> None:
        """Check that the scales of a weight are as many as quantization_config says."""
        scheme, (rows, columns) = self._scheme(name), shape
        strategy, size = scheme.get("strategy"), scheme.get("group_size")
        what = f"config_groups in quantization_config says strategy = {short(strategy)}"
        if strategy == "channel" and scales != rows:
            raise CheckpointError(f"{name} has {count(scales, 'scale')}, and {what}, which makes {rows}")
        if strategy not in ("group", "tensor_group") or not isinstance(size, int) or size < 1:
            return
        need = -(-columns // size)
        if not groups and rows * need != scales:
            raise CheckpointError(
                f"{name} has {count(scales, 'scale')}, and {what} with group_size = {size}, which makes {rows} x {need}"
            )
        if groups and groups != need:
            raise CheckpointError(
                f"{name} has {count(groups, 'scale')} for the {columns} inputs of an output, and config_groups in "
                f"quantization_config says group_size = {size}, which makes {need}"
            )

    def _bits(self, name: str) -> int:
        return self._scheme(name)["num_bits"]

    def _block(self, name: str) -> tuple[int, int] | None:
        block = self._scheme(name).get("block_structure")
        return None if block is None else (block[0], block[1])


def _schemes(config: Fields) -> list[tuple[list[str], dict[str, Any]]]:
    """Return (targets, settings of weights) of each of `config_groups`."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{config.what} has config_groups = {short(groups)}, which names no weights")
    schemes = []
    for name, group in groups.items():
        weights, targets = (group.get(k) if isinstance(group, dict) else None for k in ("weights", "targets"))
        where = f"config_groups.{name} of {config.what}"
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise CheckpointError(f"{where} has no weights or no targets")
        own = group.get("format")
        if own is not None and own not in _FORMATS:
            raise CheckpointError(f"{where} has the format {short(own)}{near(short(own), _FORMATS)}")
        if not reading.is_whole(weights.get("num_bits"), 1) or weights["num_bits"] > 8:
            raise CheckpointError(f"{where} has num_bits = {short(weights.get('num_bits'))}; supported are 1 to 8")
        block = weights.get("block_structure")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(map(reading.is_whole, block))
        ):
            raise CheckpointError(
                f"{where} has block_structure = {short(block)}; supported are two sizes, as [128, 128]"
            )
        if len(groups) > 1:
            for target in targets:
                if str(target).startswith("re:"):
                    plain_pattern(target[3:], where)
        inputs = group.get("input_activations")
        if inputs is not None and not isinstance(inputs, dict):
            raise CheckpointError(f"{where} has input_activations = {short(inputs)}, which are no settings")
        schemes.append(([str(t) for t in targets], {**weights, _INPUTS: inputs}))
    return schemes


def _over(name: str, over: np.ndarray) -> np.ndarray:
    """Return the number that the scales of nvfp4 are divided by, float32."""
    over = finite(name, "weight_global_scale", over)
    if not (over > 0).all():
        raise CheckpointError(
            f"weight_global_scale of {name} is {over.reshape(-1)[0]:g}, and must be above 0; the file is damaged, "
            "download it again"
        )
    return over


def _token_bits(scheme: dict[str, Any]) -> int | None:
    """Return the bits of activations that our products round as the scheme says; `None` if there are none."""
    inputs = scheme[_INPUTS] or {}
    rounding = (inputs.get("type"), inputs.get("strategy"), inputs.get("dynamic"), inputs.get("symmetric", True))
    weights = (scheme.get("type", "int"), scheme.get("symmetric", True))
    fits = rounding == ("int", "token", True, True) and weights == ("int", True)
    fits = fits and scheme.get("strategy") in ("channel", "tensor") and scheme["num_bits"] > 1
    return inputs["num_bits"] if fits and inputs.get("num_bits") in range(2, 9) else None


_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Settings of activations that are rounded with a scale for each token."""


def _format(kind: Kind) -> str:
    if kind.numbers == "e2m1":
        return "mxfp4-pack-quantized" if kind.scale == "e8m0" else "nvfp4-pack-quantized"
    if kind.numbers == "e4m3":
        return "float-quantized"
    return "pack-quantized" if kind.activations is None else "int-quantized"


def _weights(kind: Kind) -> dict[str, Any]:
    """Return the settings of weights that were quantised here."""
    if kind.numbers == "e2m1":
        few = "torch.uint8" if kind.scale == "e8m0" else "torch.float8_e4m3fn"
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group" if kind.scale == "e8m0" else "tensor_group",
            "group_size": kind.columns,
            "dynamic": False,
            "scale_dtype": few,
            "zp_dtype": few,
        }
    if kind.columns is None:
        strategy = "tensor" if kind.rows is None else "channel"
    else:
        strategy = "group" if kind.rows == 1 else "block"
    return {
        "num_bits": 8 if kind.numbers == "e4m3" else int(kind.numbers[-1]),
        "type": "float" if kind.numbers == "e4m3" else "int",
        "symmetric": not kind.zeros,
        "strategy": strategy,
        "group_size": kind.columns if strategy == "group" else None,
        "block_structure": [kind.rows, kind.columns] if strategy == "block" else None,
        "dynamic": False,
    }


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target


def _scaled(
    values: np.ndarray,
    scale: np.ndarray,
    zeros: np.ndarray | None,
    group: np.ndarray | None,
    block: tuple[int, int] | None,
) -> np.ndarray:
    """Return (values - zeros) · scale, where the second dimension of zeros and scales may be of groups of inputs."""
    rows, columns = values.shape
    zeros = None if zeros is None else zeros.astype(np.float32).reshape(scale.shape)
    if scale.ndim == 2 and scale.shape[0] == rows and scale.shape[1] > 1:
        size = -(-columns // scale.shape[1])
        of = np.arange(columns) // size if group is None or (group < 0).any() else group
        if zeros is not None:
            values -= zeros[:, of]
        values *= scale[:, of]
        return values
    if zeros is not None:
        ones = scaled(np.ones_like(values), zeros, block)
        values -= ones
    return scaled(values, scale, block)
