"""Which weights of ours a layout of quantised weights can hold, and the `quantization_config` that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxscale import errors
from jaxscale.errors import CheckpointError
from jaxscale.interop.maps import Bound
from jaxscale.interop.stored.awq import AWQLayout
from jaxscale.interop.stored.compressed import CompressedTensors
from jaxscale.interop.stored.gptq import GPTQLayout
from jaxscale.interop.stored.layout import Kind, QuantisedLayout
from jaxscale.layout import TensorInfo
from jaxscale.nn import WeightFormat
from jaxscale.nn.formats import Divided, Stored
from jaxscale.nn.formats.stored import dimensions

WRITTEN: dict[str, type[QuantisedLayout]] = {
    layout.methods[0]: layout for layout in (CompressedTensors, GPTQLayout, AWQLayout)
}
"""The layouts that a run of ours can be written in, by `quant_method`."""


def written_as(method: str) -> type[QuantisedLayout]:
    """Return the layout of a `quant_method` to write.

    Args:
      method: its name.

    Raises:
      CheckpointError: there is no such layout, or it is only read.
    """
    if method not in WRITTEN:
        raise CheckpointError(f"weights are not written as '{method}'{errors.near(method, WRITTEN)}")
    return WRITTEN[method]


def kind_of(own: WeightFormat, b: Bound, info: TensorInfo, scale: str, layout: type[QuantisedLayout]) -> Kind:
    """Return how a parameter of ours is written in a layout.

    Args:
      own: its format.
      b: the parameter.
      info: the parameter.
      scale: dtype of the parameters that are written; scales have it if it holds all their values, else their own.
      layout: the layout.

    Raises:
      CheckpointError: the layout cannot hold it; the message names a format that it can.
    """
    try:
        plain = _plain(own)
        _, inputs, outputs = dimensions(len(b.shape), info.contracted or ())
        letters = tuple(a for d in inputs for a in b.ours[d])
        if any(len(a) != 1 for a in b.ours) or len(b.theirs) != 2 or letters != b.theirs[1]:
            raise CheckpointError("its inputs are not the columns of the other program's matrix")
        rows = plain.outputs
        whole = len([a for d in outputs for a in b.ours[d]]) == len(b.theirs[0]) and b.map.along is None
        over = isinstance(plain.scale, Divided)
        if (rows != 1 and (not whole or b.map.flip is not None)) or (over and not whole):
            raise CheckpointError("its outputs that share a scale are apart in the other program's matrix")
        if plain.activations is not None and not layout.rounds_activations:
            raise CheckpointError("its products round activations")
        if not plain.float_scales and not layout.few_scales:
            raise CheckpointError("its scales are not plain floats")
        own_scale = plain.scale if isinstance(plain.scale, str) else "e4m3"
        own_scale = scale if scale == "float32" and plain.float_scales else own_scale
        kind = Kind(plain.numbers, rows, plain.group, own_scale, plain.zeros, plain.activations)
        return layout.written(kind, b.their_shape)
    except CheckpointError as e:
        about = own.describe() if isinstance(own, Stored) else type(own).__name__
        near = layout.nearest(own.bits if isinstance(own, Stored) else 4)
        raise CheckpointError(
            f"{b.name} is stored as {about}, which {layout.methods[0]} does not hold: {e}; the nearest format is "
            f"{near}: jaxscale quantize RUN OUT --recipe '@GPTQ(weights=@{near}())'"
        ) from None


def _plain(own: WeightFormat) -> Stored:
    """Return a format that is integers or floats times scales that are floats, powers of two, or `Divided` ones."""
    if type(own) is not Stored:
        raise CheckpointError("it has more than codes, scales and zero points of integers")
    if own.centred or own.numbers.startswith("kmeans"):
        raise CheckpointError(f"it has a {'mean' if own.centred else 'table'} for each matrix")
    if not own.float_scales and own.scale not in ("e8m0", Divided()):
        raise CheckpointError("its scales are not plain floats")
    return own


def same_kinds(kinds: Mapping[str, Kind], bound: Iterable[Bound]) -> dict[Kind, list[str]]:
    """Return the names of the other program's modules by kind.

    Args:
      kinds: the kind of each quantised parameter of ours, by name.
      bound: a `Bound` per parameter.

    Raises:
      CheckpointError: parts of one matrix are not of one kind.
    """
    of_key: dict[str, set[Kind | None]] = {}
    for b in bound:
        for key, _ in b.keys():
            of_key.setdefault(key, set()).add(kinds.get(b.name))
    modules: dict[Kind, list[str]] = {}
    for key, own in of_key.items():
        if len(own) > 1:
            raise CheckpointError(f"{key} is of several matrices of ours, which are not stored in one format")
        kind = next(iter(own))
        if kind is not None:
            modules.setdefault(kind, []).append(key.removesuffix(".weight"))
    return modules


def other_modules(kinds: Mapping[str, Kind], bound: Sequence[Bound]) -> list[str]:
    """Return the names of the other program's linear layers that are not quantised: output head and routers.

    Args:
      kinds: see `same_kinds`.
      bound: a `Bound` per parameter.
    """
    names = {
        key.removesuffix(".weight")
        for b in bound
        if b.name not in kinds and len(b.their_shape) == 2 and not b.name.startswith("embed/")
        for key, _ in b.keys()
        if key.endswith(".weight")
    }
    return sorted(names | {"lm_head"})
