"""Read quantised weights of a checkpoint as they are: their codes and scales as the arrays of our stored weights."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.interop.maps import Bound, Region
from jaxscale.interop.stored.bits import pack_along, unpack
from jaxscale.interop.stored.layout import Decoded, Kind, Planes, QuantisedLayout, cannot_keep
from jaxscale.interop.transfer import Foreign, assemble, their_tensors
from jaxscale.interop.write import Parts, Written, plain_tensors
from jaxscale.layout import TensorInfo
from jaxscale.nn.formats import ByName, Divided, Stored
from jaxscale.nn.formats.blocks import block_of
from jaxscale.nn.formats.packing import unit
from jaxscale.nn.formats.stored import dimensions

FACTS = "kept"
"""Entry of a run's facts with the `Kind` of each kept parameter."""

FIELDS = {"codes": "uint8", "scale": "", "zero/codes": "uint8", "scale/codes": "uint8", "scale/scale": "float32"}
"""Arrays of a kept weight, in a checkpoint of ours, and their types; "" is the format's."""


@dataclasses.dataclass(frozen=True)
class Keep:
    """How one of our parameters is kept.

    Args:
      bound: the parameter.
      contracted: the dimensions that a product sums over.
      kind: how the checkpoint has it.
      format: the same as a format of ours.
    """

    bound: Bound
    contracted: tuple[int, ...]
    kind: Kind
    format: Stored

    def block(self, field: str) -> dict[str, int]:
        """Return, by letter of our dimensions, how many entries share one of an array's."""
        single = dict.fromkeys(self.bound.letters, 1)
        return single | {a[0]: n for a, n in zip(self.bound.ours, self.blocks(field), strict=True)}

    def blocks(self, field: str) -> tuple[int, ...]:
        """Return, for each of our dimensions, how many entries share one of an array's."""
        shape = self.bound.shape
        if field == "codes":
            return (1,) * len(shape)
        if field == "scale/scale":
            lead = len(dimensions(len(shape), self.contracted)[0])
            return (*(1,) * lead, *shape[lead:])
        return self.format.block(shape, self.contracted)

    @property
    def scales(self) -> str:
        """The array of scales, or of their codes."""
        return "scale" if self.format.float_scales else "scale/codes"

    def dtype(self, field: str) -> np.dtype:
        """Return the type of an array."""
        return _dtype(FIELDS[field] or str(self.format.scale))


class Kept(Foreign):
    """A quantised checkpoint with the arrays of our stored weights.

    Args:
      tensors: its tensors.
      bound: a `Bound` per parameter of our model.
      infos: a `TensorInfo` per parameter.
      ignored: see `Foreign`.
      prefix: see `Foreign`.

    Raises:
      CheckpointError: see `Foreign`; a quantised weight has no form as a stored weight.
    """

    def __init__(
        self,
        tensors: Decoded,
        bound: Iterable[Bound],
        infos: Iterable[TensorInfo],
        ignored: tuple[str, ...] = (),
        prefix: str = "",
    ):
        bound = list(bound)
        super().__init__(tensors, bound, ignored, prefix)
        self._decoded = tensors
        contracted = {i.path: i for i in infos}
        self.keeps = {b.name: keep for b in bound if (keep := self._keep(b, contracted[b.name])) is not None}
        self._last: tuple[str, Planes] | None = None
        self._lock = threading.Lock()

    @property
    def format(self) -> ByName:
        """The formats of the kept parameters."""
        groups: dict[Stored, list[str]] = {}
        for name, keep in self.keeps.items():
            groups.setdefault(keep.format, []).append(name)
        return ByName(tuple(groups), tuple(map(tuple, groups.values())))

    def _keep(self, b: Bound, info: TensorInfo) -> Keep | None:
        names = [self.their(key) for key, _ in b.keys()]
        stored = [name for name in names if name in self._decoded.weights]
        if not stored:
            return None
        if len(stored) < len(names):
            other = next(name for name in names if name not in self._decoded.weights)
            raise cannot_keep(stored[0], f"{other}, which is in the same array here, is not quantised")
        kinds = {self._decoded.kind(name): name for name in stored}
        if len(kinds) > 1:
            (_, one), (_, two), *_ = kinds.items()
            raise cannot_keep(one, f"{two}, which is in the same array here, is quantised in another way")
        return Keep(b, info.contracted or (), next(iter(kinds)), _format(next(iter(kinds)), b, info, stored[0]))

    @property
    def facts(self) -> dict[str, Any]:
        """The `Kind` of each kept parameter as plain values, for `tensors_as_kept`."""
        return {name: dataclasses.asdict(keep.kind) for name, keep in self.keeps.items()}

    def dtypes(self) -> set[np.dtype]:
        """See `Foreign.dtypes`; of parameters that are not quantised."""
        every = self._bound
        try:
            self._bound = {n: b for n, b in every.items() if b.name not in self.keeps}
            return super().dtypes()
        finally:
            self._bound = every

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Foreign.read`; the arrays of kept weights are named "params/.../kernel/codes" and so on."""
        for field in FIELDS:
            keep = self.keeps.get(name.removeprefix("params/").removesuffix(f"/{field}"))
            if keep is not None and name.endswith(f"/{field}"):
                return {region: self._array(keep, field, region) for region in regions}
        return super().read(name, regions)

    def _array(self, keep: Keep, field: str, region: Region) -> np.ndarray:
        if field != "codes":
            return self._plane(keep, field, region)
        bits, axis = keep.format.bits, keep.format.axis(keep.bound.shape, keep.contracted)
        assert axis is not None
        per, words = unit(bits)
        (start, stop), needed = region[axis], list(region)
        first, last = start // words, -(-stop // words)  # whole units of codes
        needed[axis] = (first * per, last * per)
        packed = pack_along(self._plane(keep, field, tuple(needed)), bits, axis)
        inner = [slice(None)] * packed.ndim
        inner[axis] = slice(start - first * words, stop - first * words)
        return np.ascontiguousarray(packed[tuple(inner)])

    def _plane(self, keep: Keep, field: str, region: Region) -> np.ndarray:
        """Read a region of the codes, one in a byte, of the scales, or of the zero points."""
        b, block = keep.bound, keep.block(field)
        sizes = [block[a[0]] for a in b.ours]
        whole = tuple((i * n, j * n) for (i, j), n in zip(region, sizes, strict=True))
        spans, inner = b.spans(whole)
        counts = {a: -(-(spans[a][1] - spans[a][0]) // block[a]) for a in b.letters}
        out = np.empty(tuple(counts.values()), keep.dtype(field))
        rest = [a for a in b.letters if a not in b.numbered]
        for at in itertools.product(*(range(*spans[a]) for a in b.numbered)):
            numbers = dict(zip(b.numbered, at, strict=True))
            place = tuple(numbers[a] - spans[a][0] if a in numbers else slice(None) for a in b.letters)
            tensor = self._spread(self.their(b.key(numbers)), field, keep.kind)
            piece = b.flipped(b.view(tensor), rest)[tuple(slice(*spans[a], block[a]) for a in rest)]
            out[place] = piece
        out = out.reshape([math.prod(counts[a] for a in group) for group in b.ours])
        cut = zip(inner, sizes, strict=True)
        return np.ascontiguousarray(out[tuple(slice(i // n, -(-j // n)) for (i, j), n in cut)])

    def _spread(self, name: str, field: str, kind: Kind) -> np.ndarray:
        """Return codes, or scales or zero points for each code, in the checkpoint's orientation."""
        with self._lock:  # several threads may read
            if self._last is None or self._last[0] != name:
                self._last = None
                self._last = (name, self._decoded.planes(name))
            planes = self._last[1]
        if field == "codes":
            return planes.codes
        if field == "scale/scale":
            assert planes.over is not None
            return np.broadcast_to(planes.over, planes.codes.shape)
        values = planes.zeros if field == "zero/codes" else planes.scale
        assert values is not None
        return spread(values, planes.codes.shape, kind)


def spread(values: np.ndarray, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Return one value per block for each entry of a weight.

    Args:
      values: one per block.
      shape: of the weight, as in `Planes`.
      kind: the sizes of blocks.
    """
    for axis, n in enumerate(kind.block(shape)):
        values = np.repeat(values, n, axis=axis)
    return values[tuple(map(slice, shape))]


def gathered(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Return the first of each block; the inverse of `spread`."""
    return np.ascontiguousarray(values[tuple(slice(None, None, n) for n in kind.block(values.shape))])


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _format(kind: Kind, b: Bound, info: TensorInfo, name: str) -> Stored:
    """Return a kind of quantised weights as a format of ours.

    Raises:
      CheckpointError: it has none for this parameter.
    """
    if info.contracted is None:
        raise cannot_keep(name, f"{b.name} is used in other ways than in products")
    _, inputs, outputs = dimensions(len(b.shape), info.contracted)
    letters = tuple(a for d in inputs for a in b.ours[d])
    single = all(b.sizes[a] == 1 for group in b.ours for a in group[1:])
    if not single or len(b.theirs) not in (2, 3) or letters != b.theirs[1]:
        raise cannot_keep(name, f"its inputs are not the columns of its matrix, as {b.name} needs them")
    if kind.columns is not None and block_of([b.shape[d] for d in inputs], kind.columns) is None:
        sizes = " x ".join(str(b.shape[d]) for d in inputs)
        raise cannot_keep(name, f"groups of {kind.columns} do not divide its {sizes} inputs")
    rows = kind.rows
    moved = b.map.along is not None or b.map.flip is not None
    if rows is not None and (moved or block_of([b.shape[d] for d in outputs], rows) is None):
        rows = 1  # each output has a scale of its own, equal within a block
    try:
        format = Stored(
            kind.numbers,
            kind.columns,
            rows,
            scale=Divided() if kind.scale == "e4m3" else kind.scale,
            zeros=kind.zeros,
            activations=kind.activations,
        )
        covered = format.covers(info)
    except ConfigError as e:
        raise cannot_keep(name, str(e)) from None
    if not covered:
        raise cannot_keep(name, f"{b.name} is of the vocabulary, whose parameters are plain arrays")
    return format


def tensors_as_kept(
    keeps: Mapping[str, Keep],
    bound: Iterable[Bound],
    layout: QuantisedLayout,
    read: Callable[[str, Region], np.ndarray],
) -> dict[str, Written]:
    """Return the tensors of a checkpoint with the codes and scales of our stored weights, in another program's layout.

    Args:
      keeps: the stored format of each quantised parameter, by name, and what it is in the layout.
      bound: a `Bound` per parameter of our model.
      layout: the layout of the checkpoint's tensors.
      read: (name of an array of our checkpoint, region) -> the values of that region.
    """
    plain = [b for b in bound if b.name not in keeps]
    written = plain_tensors(plain, read)
    writer = _Writer(keeps, layout, read)
    for key, parts in their_tensors(keep.bound for keep in keeps.values()).items():
        shape = parts[0][0].their_shape
        kind = keeps[parts[0][0].name].kind
        for end, like in layout.tensors(kind, _empty(shape, kind)).items():
            name = key.removesuffix(".weight") + end
            written[name] = Written(like.dtype, like.shape, lambda k=key, p=parts, e=end: writer.tensors(k, p)[e])  # type: ignore[misc]
    return written


def _empty(shape: tuple[int, ...], kind: Kind) -> Planes:
    few = kind.scale in ("e8m0", "e4m3")
    blocks = tuple(-(-size // n) for size, n in zip(shape, kind.block(shape), strict=True))
    scale = np.zeros(blocks, np.uint8 if few else _dtype(kind.scale))
    over = np.zeros((1, 1), np.float32) if kind.scale == "e4m3" else None
    return Planes(np.zeros(shape, np.uint8), scale, scale.astype(np.uint8) if kind.zeros else None, over)


class _Writer:
    """Assembles the tensors of one kept weight after the other."""

    def __init__(
        self,
        keeps: Mapping[str, Keep],
        layout: QuantisedLayout,
        read: Callable[[str, Region], np.ndarray],
    ):
        self._keeps, self._layout, self._read = keeps, layout, read
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})

    def tensors(self, key: str, parts: Parts) -> dict[str, np.ndarray]:
        """Return the tensors of a weight, by the ending of their names."""
        if self._last[0] != key:
            self._last = ("", {})
            keep = self._keeps[parts[0][0].name]
            kind, own = keep.kind, keep.format
            codes = self._assembled(parts, "codes")
            scale = gathered(self._assembled(parts, keep.scales), kind)
            scale = scale.astype(_dtype(kind.scale)) if own.float_scales else scale  # a wider type than ours, if any
            zeros = gathered(self._assembled(parts, "zero/codes"), kind) if own.zeros else None
            over = self._assembled(parts, "scale/scale")[:1, :1] if kind.scale == "e4m3" else None
            if kind.zeros and zeros is None:  # symmetric integers, with the zero point in the middle
                half = np.uint8(2 ** (own.bits - 1))
                codes, zeros = codes ^ half, np.full(scale.shape, half)
            self._last = (key, self._layout.tensors(kind, Planes(codes, scale, zeros, over)))
        return self._last[1]

    def _assembled(self, parts: Parts, field: str) -> np.ndarray:
        """Return codes, or scales or zero points for each code, in the checkpoint's orientation."""
        dtype = self._keeps[parts[0][0].name].dtype(field)
        typed = [(dataclasses.replace(b, dtype=dtype), numbers) for b, numbers in parts]
        return assemble(typed, lambda name, region: self._region(self._keeps[name], field, region))

    def _region(self, keep: Keep, field: str, region: Region) -> np.ndarray:
        """Read a region that is whole along every dimension but those of layers and experts."""
        name, shape = f"{keep.bound.name}/{field}", keep.bound.shape
        if field == "codes":
            axis = keep.format.axis(shape, keep.contracted)
            assert axis is not None
            packed = list(region)
            packed[axis] = (0, shape[axis] * keep.format.bits // (8 * np.dtype(keep.format.word).itemsize))
            moved = np.moveaxis(self._read(name, tuple(packed)), axis, -1)
            return np.moveaxis(unpack(moved, keep.format.bits, shape[axis]), -1, axis)
        sizes = keep.blocks(field)
        values = self._read(name, tuple((i // n, -(-j // n)) for (i, j), n in zip(region, sizes, strict=True)))
        for d, n in enumerate(sizes):
            values = np.repeat(values, n, axis=d)
        return values
