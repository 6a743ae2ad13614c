"""Formats by the names that users know, as `--weights int4` and `LoRA.base = @nf4()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxscale.config import call, register
from jaxscale.errors import ConfigError, near
from jaxscale.nn.formats.divided import Divided
from jaxscale.nn.formats.stored import NAMED, Stored
from jaxscale.nn.weight_format import WeightFormat

_OF_TENSOR = Divided("e4m3")  # scales of 8 bits over a float32 number for each matrix
_TWICE = Stored("e4m3", group=256, centred=True)

FORMATS: dict[str, tuple[Stored, str]] = {
    "int8": (Stored("int8"), "8-bit integers, a float32 scale for each output."),
    **{
        f"int{bits}": (
            Stored(f"int{bits}", group=group, scale="bfloat16"),
            f"{bits}-bit integers, a bfloat16 scale for each {group} inputs.",
        )
        for bits, group in ((7, 128), (6, 128), (5, 128), (4, 128), (3, 64), (2, 32))
    },
    "uint4": (
        Stored("uint4", group=128, scale="bfloat16", zeros=True),
        "4-bit integers with a zero point and a bfloat16 scale for each 128 inputs.",
    ),
    "ternary": (Stored("ternary"), "-1, 0 and 1 times the mean absolute value of an output (Ma et al. 2024)."),
    "binary": (Stored("binary"), "-1 and 1 times the mean absolute value of an output (Rastegari et al. 2016)."),
    "nf4": (Stored("nf4", group=64), "4-bit quantiles of a normal distribution, a float32 scale for each 64 inputs."),
    "nf4_double": (
        Stored("nf4", group=64, scale=_TWICE),
        "nf4 with scales of 8 bits, float32 scales for up to 256 of them (Dettmers et al. 2023, double quantisation).",
    ),
    "fp4": (Stored("e2m1", group=64), "4-bit floats (e2m1), a float32 scale for each 64 inputs."),
    "fp6": (Stored("e3m2"), "6-bit floats (e3m2), a float32 scale for each output (Xia et al. 2024)."),
    "fp8": (Stored("e4m3"), "8-bit floats (e4m3), a float32 scale for each output."),
    "fp8_blocks": (
        Stored("e4m3", group=128, outputs=128),
        "8-bit floats (e4m3), a float32 scale for each block of 128 x 128 (DeepSeek-AI 2024).",
    ),
    **{
        name: (
            Stored(numbers, group=32, scale="e8m0"), f"{numbers} with a power of two for each 32 inputs (OCP MX 1.0)."
        )
        for name, numbers in (
            ("mxfp4", "e2m1"), ("mxfp6", "e3m2"), ("mxfp6_e2m3", "e2m3"), ("mxfp8", "e4m3"), ("mxfp8_e5m2", "e5m2"),
            ("mxint8", "int8"),
        )
    },
    **{
        f"bfp{bits}": (
            Stored(f"int{bits}", group=32, scale="e8m0"),
            f"block floating point: {bits}-bit integers, a power of two for each 32 inputs.",
        )
        for bits in (4, 6)
    },
    "w8a8": (Stored("int8", activations=8), "int8, times activations rounded to 8 bits for each token."),
    "w6a8": (
        Stored("int6", group=128, scale="bfloat16", activations=8),
        "int6, times activations rounded to 8 bits for each token and 128 inputs.",
    ),
    "w4a8": (
        Stored("int4", group=128, scale="bfloat16", activations=8),
        "int4, times activations rounded to 8 bits for each token and 128 inputs.",
    ),
    "w4a4": (
        Stored("int4", group=128, scale="bfloat16", activations=4),
        "int4, times activations rounded to 4 bits for each token and 128 inputs.",
    ),
    "nvfp4": (
        Stored("e2m1", group=16, scale=_OF_TENSOR),
        "4-bit floats (e2m1), an e4m3 scale for each 16 inputs, over a float32 number for each matrix.",
    ),
    **{
        f"kmeans{bits}": (
            Stored(f"kmeans{bits}"), f"a table of {2**bits} numbers for each matrix, a float32 scale for each output."
        )
        for bits in (2, 3, 4)
    },
}  # fmt: skip
"""The format of each name, and what it is."""

NAMED.update({name: made for name, (made, _) in FORMATS.items()})


def _preset(name: str) -> Callable[..., Stored]:
    made, about = FORMATS[name]

    def preset(group: int | None = made.group) -> Stored:
        return dataclasses.replace(made, group=group)

    preset.__name__ = preset.__qualname__ = name
    preset.__doc__ = (
        f"Return the weight format `{name}`: {about}\n\nArgs:\n  group: inputs that share a scale; `None` is all."
    )
    return preset


PRESETS = {name: register(_preset(name), name=name) for name in FORMATS}
"""Functions that return the formats, as they are registered."""


def named(weights: WeightFormat | str, setting: str) -> WeightFormat | str:
    """Return a format's name, or the format itself where a binding changes it (`int2.group = 64`).

    Args:
      weights: a format, which is returned as it is, or a name.
      setting: what it is a value of, for the message.

    Raises:
      ConfigError: there is no format of this name.
    """
    if not isinstance(weights, str):
        return weights
    if weights not in FORMATS:
        hint = near(weights, FORMATS) or f"; there are {', '.join(FORMATS)}"
        raise ConfigError(f"{setting}: there is no weight format '{weights}'{hint}")
    made = call(weights)
    assert isinstance(made, Stored)
    return weights if made == FORMATS[weights][0] else made


@register
def GroupedIntegers(bits: int = 4, group: int | None = None) -> Stored:
    """Return integers with float32 scales: `Stored` with "int2" to "int8".

    Args:
      bits: of an integer, 2 to 8.
      group: inputs that share a scale; `None` is one scale for all inputs of an output.
    """
    return Stored(f"int{bits}", group=group)
