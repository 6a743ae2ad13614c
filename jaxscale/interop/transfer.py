"""Their tensors read as ours, region by region, and ours written as theirs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.maps import Bound, Region
from jaxscale.interop.safetensors import SafeTensors, dtype_of, is_real

_MISSING = 10_000
"""So many tensors may be missing for their names to be worked out."""


class Foreign:
    """A checkpoint of theirs with the interface of one of ours (`jaxscale.train.checkpoints.read.Arrays`).

    Args:
      tensors: theirs.
      bound: a line per leaf of ours.
      ignored: patterns of keys that hold nothing of the model (tables of angles, masks).
      prefix: what their keys may lack (GPT-2's "transformer.").
      leading: put before the names of our leaves, as "params/".

    Raises:
      CheckpointError: listing every tensor that is missing, extra or of another shape.
    """

    def __init__(
        self,
        tensors: SafeTensors,
        bound: Iterable[Bound],
        ignored: tuple[str, ...] = (),
        prefix: str = "",
        leading: str = "params/",
    ):
        self._tensors, self._ignored = tensors, [re.compile(p) for p in ignored]
        self._bound = {f"{leading}{b.name}": b for b in bound}
        self._prefix = prefix if any(k.startswith(prefix) for k in tensors) else ""
        self._without = prefix if prefix and not self._prefix else ""
        self._check()

    @property
    def leaves(self) -> dict[str, Bound]:
        """By the name of our array, the line that it is made by."""
        return self._bound

    @property
    def tensors(self) -> SafeTensors:
        """Theirs."""
        return self._tensors

    def their(self, key: str) -> str:
        """Their name of a key of the table, in this checkpoint."""
        return key.removeprefix(self._without)

    def _check(self) -> None:
        count = sum(math.prod(b.sizes[a] for a in b.numbered) for b in self._bound.values())
        if count > 2 * len(self._tensors) + _MISSING:
            raise CheckpointError(
                f"the config.json of {self._tensors.folder} describes a model of {count:,} tensors, and the files hold "
                f"{len(self._tensors):,}; bring the config.json that came with them"
            )
        wanted = {self.their(key): b for b in self._bound.values() for key, _ in b.keys()}
        wrong = [f"{key} is missing" for key in wanted if key not in self._tensors]
        for key, found in self._tensors.items():
            if key not in wanted:
                if not any(p.fullmatch(key) for p in self._ignored):
                    wrong.append(f"{key} is not in the model")
            elif found.shape != wanted[key].their_shape:
                wrong.append(f"{key} is {list(found.shape)}, and its config.json says {list(wanted[key].their_shape)}")
            elif not is_real(dtype_of(found, key)):
                wrong.append(f"{key} is of type {found.dtype[:20]}, which has no values without a scale")
        if wrong:
            more = f", and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise CheckpointError(
                f"the tensors in {self._tensors.folder} are not those of its config.json: {'; '.join(wrong[:20])}{more}"
            )

    def dtypes(self) -> set[np.dtype]:
        """Of their tensors that are ours as well, those left out that are float32 here in any case."""
        free = [b for b in self._bound.values() if b.dtype != np.float32] or self._bound.values()
        keys = (self.their(key) for b in free for key, _ in b.keys())
        return {dtype_of(self._tensors[k], k) for k in keys}

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """Regions of one of our arrays, of its type; only what they need is read."""
        return {region: self._read(self._bound[name], region) for region in regions}

    def _read(self, b: Bound, region: Region) -> np.ndarray:
        spans, inner = b.spans(region)
        out = np.empty(tuple(spans[a][1] - spans[a][0] for a in b.letters), b.dtype)
        rest = [a for a in b.letters if a not in b.numbered]
        for at in itertools.product(*(range(*spans[a]) for a in b.numbered)):
            numbers = dict(zip(b.numbered, at, strict=True))
            place = tuple(numbers[a] - spans[a][0] if a in numbers else slice(None) for a in b.letters)
            with self._tensors.reading(self.their(b.key(numbers))) as tensor:
                piece = b.flipped(b.view(tensor), rest)[tuple(slice(*spans[a]) for a in rest)]
                out[place] = piece  # rounds where ours is narrower, which the caller asked for
                del tensor, piece
        sizes = [int(np.prod([spans[a][1] - spans[a][0] for a in group])) for group in b.ours]
        return np.ascontiguousarray(out.reshape(sizes)[tuple(slice(*s) for s in inner)])

    def faults(self) -> Iterator[str]:
        """None that could be told: their files have no digests."""
        return iter(())


def their_tensors(bound: Iterable[Bound]) -> dict[str, list[tuple[Bound, dict[str, int]]]]:
    """What each of their tensors is made of: the leaves that share it, and which numbers of theirs it has."""
    made: dict[str, list[tuple[Bound, dict[str, int]]]] = {}
    for b in bound:
        for key, numbers in b.keys():
            made.setdefault(key, []).append((b, numbers))
    return made


def assemble(parts: list[tuple[Bound, dict[str, int]]], read: Any) -> np.ndarray:
    """One of their tensors.

    Args:
      parts: an entry of `their_tensors`.
      read: `read(name of our leaf, region)` gives that region.
    """
    first = parts[0][0]
    out = np.empty(first.their_shape, first.dtype)
    for b, numbers in parts:
        spans = {a: (numbers[a], numbers[a] + 1) if a in numbers else (0, b.sizes[a]) for a in b.letters}
        region = tuple(spans[g[0]] if len(g) == 1 else (0, n) for g, n in zip(b.ours, b.shape, strict=True))
        piece = read(b.name, region).reshape([spans[a][1] - spans[a][0] for a in b.letters])
        piece = piece[tuple(0 if a in numbers else slice(None) for a in b.letters)]
        rest = [a for a in b.letters if a not in b.numbered]
        b.view(out)[...] = b.flipped(piece, rest, back=True)
    return out
