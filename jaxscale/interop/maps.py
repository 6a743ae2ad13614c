"""Maps between our parameters and the tensors of a Hugging Face checkpoint ("theirs"), used in both directions.

A family of models has a table of `Map`s. Each says, in the notation of einops, how one of our tensors is arranged in
one of theirs: `Map("attn/q/kernel", "model.layers.{l}.self_attn.q_proj.weight", "e h d", "(h d) e")`. Import and export
both follow from that, and so does which part of their file a shard of ours needs.

- Letters are dimensions. `(h d)` is one dimension that combines two letters, the first outermost.
- A letter in braces numbers their tensors: `{l}` is the layer, and another letter, such as `{x}`, a dimension of ours,
  such as the expert. Ours has all of them in one array.
- `fused` is for several of our tensors that are concatenated in one of theirs.
- A path is that of a parameter, within its block if the key has `{l}`. A `Map` without a parameter in the model is
  ignored (a bias that the model lacks); a parameter without a `Map` is an error.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from einops import rearrange
from einops.parsing import ParsedExpression

from jaxscale.errors import CheckpointError
from jaxscale.layout import TensorInfo

Region = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension."""

_BLOCK = re.compile(r"runs/(\d+)/blocks/(\d+)/(.+)")
_AHEAD = re.compile(r"multi_token/(\d+)/run/blocks/0/(.+)")
_NUMBERED = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Map:
    """How one of our tensors is arranged in one of theirs.

    Args:
      path: path of our parameter, "embed/weight", or within its block, "attn/q/kernel".
      key: name of their tensor.
      ours: our dimensions, without that of layers, as an einops pattern.
      theirs: their dimensions, with the same letters but for those that number keys; by default `ours`.
      along: the letter along which several of our tensors are concatenated in theirs (see `fused`).
      parts: paths of all those tensors, in order.
      sizes: (letter, size) of letters whose size does not follow from our shape, as `(("two", 2),)`.
      flip: a letter whose entries have another order in theirs, and a function from its size to the index in theirs
        of each of our entries.
      beside: a parameter of the same block, without which another `Map` with this path applies; for stacks of layers
        of several kinds.
    """

    path: str
    key: str
    ours: str
    theirs: str = ""
    along: str | None = None
    parts: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    flip: tuple[str, Callable[[int], Any]] | None = None
    beside: str = ""


def fused(key: str, along: str, *maps: Map) -> tuple[Map, ...]:
    """Make the `Map`s of several tensors that are concatenated in one of theirs.

    Args:
      key: name of their tensor.
      along: the letter along which they are concatenated: `h` of "(h d) e" is query heads, then key and value heads,
        whose `d` may differ if `h` is the first letter.
      *maps: a `Map` of each tensor as if it were alone, in order; their keys are ignored.
    """
    parts = tuple(m.path for m in maps)
    return tuple(dataclasses.replace(m, key=key, along=along, parts=parts) for m in maps)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A `Map` with the parameter of a model that it applies to.

    Args:
      map: the map.
      name: our parameter, "runs/0/blocks/0/attn/q/kernel".
      shape: its shape.
      dtype: its dtype.
      layers: index in the model of each layer of its first dimension; empty if it is not stacked.
      sizes: size of each letter.
      total: entries along `map.along`, and the letters after it, in their dimension; for each of those before it.
      offset: where ours begin among them.
    """

    map: Map
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    layers: tuple[int, ...]
    sizes: dict[str, int]
    total: int
    offset: int

    @property
    def ours(self) -> tuple[tuple[str, ...], ...]:
        """The letters of each of our dimensions; `l` is that of layers."""
        own = groups(self.map.ours)
        return (("l",), *own) if self.layers else own

    @property
    def theirs(self) -> tuple[tuple[str, ...], ...]:
        """The letters of each dimension of their tensor."""
        return groups(self.map.theirs or self.map.ours)

    @property
    def numbered(self) -> tuple[str, ...]:
        """The letters that number their tensors."""
        return tuple(_NUMBERED.findall(self.map.key))

    @property
    def letters(self) -> tuple[str, ...]:
        """All letters of our dimensions, in order."""
        return tuple(a for group in self.ours for a in group)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of one of their tensors."""
        shape = []
        for group in self.theirs:
            before, after = self.cut(group)
            shape.append(math.prod(self.sizes[a] for a in before) * (self.total if after else 1))
        return tuple(shape)

    def cut(self, group: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the letters of one of their dimensions before `map.along`, and those from it on."""
        at = group.index(self.map.along) if self.map.along in group else len(group)
        return group[:at], group[at:]

    def key(self, at: dict[str, int]) -> str:
        """Return the name of their tensor with these numbers, by letter; `l` is an index of our stacked dimension."""
        return self.map.key.format(**{**at, **({"l": self.layers[at["l"]]} if self.layers else {})})

    def keys(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the name and the numbers of each of their tensors."""
        for at in itertools.product(*(range(self.sizes[a]) for a in self.numbered)):
            numbers = dict(zip(self.numbered, at, strict=True))
            yield self.key(numbers), numbers

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of their tensor with one dimension per letter of ours, without those that number tensors."""
        rest = [a for a in self.letters if a not in self.numbered]
        shape, region, dims = list[int](), list[slice](), list[str]()
        for group, n in zip(self.theirs, tensor.shape, strict=True):
            before, after = self.cut(group)
            shape.append(n // self.total if after else n)
            region.append(slice(None))
            dims.append(f"({' '.join(before)})")
            if after:
                own = math.prod(self.sizes[a] for a in after)
                shape.append(self.total)
                region.append(slice(self.offset, self.offset + own))
                dims.append(f"({' '.join(after)})")
        mine = tensor.reshape(shape)[tuple(region)]
        return rearrange(mine, f"{' '.join(dims)} -> {' '.join(rest)}", **{a: self.sizes[a] for a in rest})

    def spans(self, region: Region) -> tuple[dict[str, tuple[int, int]], Region]:
        """Return (start, stop) per letter that a region of ours needs, and where in that the region is.

        A dimension of several letters, or one with `flip`, is needed whole.

        Args:
          region: part of our tensor.
        """
        spans, inner = {}, []
        for group, (start, stop) in zip(self.ours, region, strict=True):
            if len(group) == 1 and (self.map.flip is None or group[0] != self.map.flip[0]):
                spans[group[0]] = (start, stop)
                inner.append((0, stop - start))
            else:
                spans |= {a: (0, self.sizes[a]) for a in group}
                inner.append((start, stop))
        return spans, tuple(inner)

    def flipped(self, piece: np.ndarray, letters: Sequence[str], back: bool = False) -> np.ndarray:
        """Reorder the entries of `flip`'s letter from their order to ours, or from ours to theirs.

        Args:
          piece: one dimension per letter.
          letters: the letters of its dimensions.
          back: from ours to theirs.
        """
        if self.map.flip is None:
            return piece
        letter, order = self.map.flip
        indices = np.asarray(order(self.sizes[letter]))
        return np.take(piece, np.argsort(indices) if back else indices, axis=list(letters).index(letter))


def groups(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Return the letters of each dimension of a pattern: `"(h d) e"` is `(("h", "d"), ("e",))`."""
    return tuple(tuple(group) for group in ParsedExpression(pattern).composition)


def bind(
    table: Iterable[Map],
    infos: Iterable[TensorInfo],
    runs: Sequence[tuple[Sequence[Any], int]],
    module_layers: str = "",
) -> list[Bound]:
    """Match every parameter of a model with its `Map`.

    Args:
      table: the family's `Map`s.
      infos: the model's `TensorInfo`s.
      runs: `TransformerConfig.runs`.
      module_layers: see `Family`.

    Raises:
      CheckpointError: parameters without a `Map`; the message lists them.
    """
    lines: dict[tuple[str, bool], list[Map]] = {}
    for m in table:
        lines.setdefault((m.path, "{l}" in m.key), []).append(m)
    infos = list(infos)
    paths = {info.path for info in infos}
    firsts = list(itertools.accumulate((len(group) * n for group, n in runs), initial=0))
    matched: list[tuple[Map, TensorInfo, tuple[int, ...], dict[str, int]]] = []
    unmatched = []
    for info in infos:
        path, layers = _in_block(info.path, runs, firsts)
        prefix = info.path.removesuffix(path)
        candidates = lines.get((path, bool(layers)), [])
        line = next((m for m in candidates if not m.beside or prefix + m.beside in paths), None)
        if line is None:
            unmatched.append(info.path)
            continue
        if module_layers and (ahead := _AHEAD.fullmatch(info.path)):
            layers = (int(ahead[1]),)
            line = dataclasses.replace(line, key=module_layers + line.key.partition("{l}.")[2])
        matched.append((line, info, layers, _sizes(line, info, bool(layers))))
    if unmatched:
        raise CheckpointError(f"the table has no line for {_list(unmatched)}")
    lengths_of = {(info.path.rpartition(m.path)[0], m.path): _along(m, sizes) for m, info, _, sizes in matched}
    bound = []
    for line, info, layers, sizes in matched:
        total = offset = 0
        if line.along is not None:
            lengths = [lengths_of[info.path.rpartition(line.path)[0], p] for p in line.parts]
            total, offset = sum(lengths), sum(lengths[: line.parts.index(line.path)])
        bound.append(Bound(line, info.path, tuple(info.shape), np.dtype(info.dtype), layers, sizes, total, offset))
    return bound


def _in_block(
    path: str, runs: Sequence[tuple[Sequence[Any], int]], firsts: Sequence[int]
) -> tuple[str, tuple[int, ...]]:
    """Return a parameter's path within its block, and the layers that it is stacked over; all of the path and `()`.

    The block of module k of multi-token prediction is layer depth + k of theirs, unless they have other names.
    """
    if block := _BLOCK.fullmatch(path):
        run, j = int(block[1]), int(block[2])
        group, repeats = runs[run]
        return block[3], tuple(firsts[run] + i * len(group) + j for i in range(repeats))
    if ahead := _AHEAD.fullmatch(path):
        return ahead[2], (firsts[-1] + int(ahead[1]),)
    return path, ()


def _along(line: Map, sizes: dict[str, int]) -> int:
    """Return the size of `along` and the letters after it in their dimension; 0 without `along`."""
    for group in groups(line.theirs or line.ours):
        if line.along in group:
            return math.prod(sizes[a] for a in group[group.index(line.along) :])
    return 0


def _sizes(line: Map, info: TensorInfo, stacked: bool) -> dict[str, int]:
    """Return the size of every letter, from the shape of our parameter."""
    sizes = dict(line.sizes)
    own = groups(line.ours)
    shape = tuple(info.shape)
    if stacked:
        sizes["l"], shape = shape[0], shape[1:]
    if len(own) != len(shape):
        raise CheckpointError(f"the table has '{line.ours}' for {info.path}, whose shape is {shape}")
    for group, n in zip(own, shape, strict=True):
        unknown = [a for a in group if a not in sizes]
        known = math.prod(sizes[a] for a in group if a in sizes)
        if len(unknown) > 1 or n % known or (not unknown and n != known):
            raise CheckpointError(f"the table cannot split {info.path} of shape {shape} as '{line.ours}'")
        sizes |= {a: n // known for a in unknown}
    return sizes


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
