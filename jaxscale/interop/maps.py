"""Whose tensor is which: a line per tensor, read in both directions.

A family of models is described by a table of `Map`s. Each says in letters how one tensor of ours lies in one of
theirs, as einops writes it: `Map("attn/q/kernel", "model.layers.{l}.self_attn.q_proj.weight", "e h d", "(h d) e")`.
From that both directions follow, and which part of their file a part of ours needs, so that a shard is read alone.

- Letters are dimensions. `(h d)` is one dimension of theirs (or ours) that two letters share, the first outermost.
- A letter in braces numbers their tensors: `{l}` is the layer in the model, and a letter of ours such as `{x}` the
  expert. Ours has them all in one array.
- Several of ours in one of theirs, side by side along a letter, are written by `fused`.
- A path is that of a leaf, within its block where the key has `{l}`. A line without a leaf in the model is passed over
  (a bias that is not there), a leaf without a line is an error.
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

Region = tuple[tuple[int, int], ...]
"""First and past-the-last index along each dimension."""

_BLOCK = re.compile(r"runs/(\d+)/blocks/(\d+)/(.+)")
_NUMBERED = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Map:
    """One tensor of ours in one of theirs.

    Args:
      path: of our leaf, "embed/weight", or within its block, "attn/q/kernel".
      key: their name for it.
      ours: a letter for each of our dimensions (but the layers').
      theirs: those of their dimensions; the same letters, but for those that number keys. By default `ours`.
      along: the letter along which it shares their tensor with others (see `fused`).
      parts: paths of all that share it, in order.
      sizes: of letters that the shape of ours does not tell, as `{"two": 2}`.
      flip: a letter whose entries stand in another order in theirs, and the order: a function of its size that gives,
        for each of our places, theirs.
    """

    path: str
    key: str
    ours: str
    theirs: str = ""
    along: str | None = None
    parts: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    flip: tuple[str, Callable[[int], Any]] | None = None


def fused(key: str, along: str, *maps: Map) -> tuple[Map, ...]:
    """Lines for tensors that lie side by side in one of theirs.

    Args:
      key: theirs.
      along: the letter that counts them: `h` of "(h d) e" is queries' heads, then keys' and values'.
      *maps: each as if it were alone, in order; their keys are not looked at.
    """
    parts = tuple(m.path for m in maps)
    return tuple(dataclasses.replace(m, key=key, along=along, parts=parts) for m in maps)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A `Map` and the leaf of a model that it is about.

    Args:
      map: the line.
      name: the leaf, "runs/0/blocks/0/attn/q/kernel".
      shape: its shape.
      dtype: its type.
      layers: of its first dimension, the number in the model; empty where it has no such dimension.
      sizes: by letter.
      total: their size of `map.along`, and `offset` where ours begins in it.
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
        """The letters of each dimension of ours, `l` of the layers."""
        own = groups(self.map.ours)
        return (("l",), *own) if self.layers else own

    @property
    def theirs(self) -> tuple[tuple[str, ...], ...]:
        """The letters of each dimension of one of their tensors."""
        return groups(self.map.theirs or self.map.ours)

    @property
    def numbered(self) -> tuple[str, ...]:
        """Letters that number their tensors."""
        return tuple(_NUMBERED.findall(self.map.key))

    @property
    def letters(self) -> tuple[str, ...]:
        """All letters of ours, in order."""
        return tuple(a for group in self.ours for a in group)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of one of their tensors."""
        sizes = self.sizes if self.map.along is None else {**self.sizes, self.map.along: self.total}
        return tuple(math.prod(sizes[a] for a in group) for group in self.theirs)

    def key(self, at: dict[str, int]) -> str:
        """Their name of the tensor with these numbers (the layer's within our leaf)."""
        return self.map.key.format(**{**at, **({"l": self.layers[at["l"]]} if self.layers else {})})

    def keys(self) -> Iterator[tuple[str, dict[str, int]]]:
        """All their tensors, and the numbers of each."""
        for at in itertools.product(*(range(self.sizes[a]) for a in self.numbered)):
            numbers = dict(zip(self.numbered, at, strict=True))
            yield self.key(numbers), numbers

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """One of their tensors as ours without the letters that number them: (letter sizes...), nothing copied."""
        along, rest = self.map.along, [a for a in self.letters if a not in self.numbered]
        sizes = {a: self.total if a == along else self.sizes[a] for a in rest}
        split = rearrange(tensor, f"{self.map.theirs or self.map.ours} -> {' '.join(rest)}", **sizes)
        cut = slice(self.offset, self.offset + self.sizes.get(along or "", 0))
        return split[tuple(cut if a == along else slice(None) for a in rest)]

    def spans(self, region: Region) -> tuple[dict[str, tuple[int, int]], Region]:
        """By letter what a region of ours needs, and where the region lies in that.

        A dimension of several letters is needed whole where the region cuts it.
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
        """With the entries of `flip`'s letter in our order, or `back` in theirs."""
        if self.map.flip is None:
            return piece
        letter, order = self.map.flip
        there = np.asarray(order(self.sizes[letter]))
        return np.take(piece, np.argsort(there) if back else there, axis=list(letters).index(letter))


def groups(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The letters of each dimension: `"(h d) e"` is `(("h", "d"), ("e",))`."""
    return tuple(tuple(group) for group in ParsedExpression(pattern).composition)


def bind(table: Iterable[Map], infos: Iterable[Any], runs: Sequence[tuple[Sequence[Any], int]]) -> list[Bound]:
    """The line of every leaf.

    Args:
      table: the family's.
      infos: the model's `TensorInfo`s.
      runs: `TransformerConfig.runs`.

    Raises:
      CheckpointError: naming the leaves that no line is about.
    """
    lines = {(m.path, "{l}" in m.key): m for m in table}
    firsts = list(itertools.accumulate((len(group) * n for group, n in runs), initial=0))
    found: list[tuple[Map, Any, tuple[int, ...], dict[str, int]]] = []
    strange = []
    for info in infos:
        block = _BLOCK.fullmatch(info.path)
        line = lines.get((block[3] if block else info.path, block is not None))
        if line is None:
            strange.append(info.path)
            continue
        layers: tuple[int, ...] = ()
        if block:
            run, j = int(block[1]), int(block[2])
            group, repeats = runs[run]
            layers = tuple(firsts[run] + i * len(group) + j for i in range(repeats))
        found.append((line, info, layers, _sizes(line, info, bool(block))))
    if strange:
        raise CheckpointError(f"the table has no line for {_list(strange)}")
    by_path = {(info.path.rpartition(line.path)[0], line.path): sizes for line, info, _, sizes in found}
    bound = []
    for line, info, layers, sizes in found:
        total = offset = 0
        if line.along is not None:
            there = [by_path[info.path.rpartition(line.path)[0], p][line.along] for p in line.parts]
            total, offset = sum(there), sum(there[: line.parts.index(line.path)])
        bound.append(Bound(line, info.path, tuple(info.shape), np.dtype(info.dtype), layers, sizes, total, offset))
    return bound


def _sizes(line: Map, info: Any, stacked: bool) -> dict[str, int]:
    """The size of every letter, from the shape of ours."""
    sizes = dict(line.sizes)
    own = groups(line.ours)
    shape = tuple(info.shape)
    if stacked:
        sizes["l"], shape = shape[0], shape[1:]
    if len(own) != len(shape):
        raise CheckpointError(f"the table says '{line.ours}' of {info.path}, which has the shape {shape}")
    for group, n in zip(own, shape, strict=True):
        unknown = [a for a in group if a not in sizes]
        known = math.prod(sizes[a] for a in group if a in sizes)
        if len(unknown) > 1 or n % known or (not unknown and n != known):
            raise CheckpointError(f"the table cannot take apart {info.path} of shape {shape} as '{line.ours}'")
        sizes |= {a: n // known for a in unknown}
    return sizes


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
