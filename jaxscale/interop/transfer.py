"""Read tensors of a Hugging Face checkpoint ("theirs") as our parameters, and assemble theirs from ours."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.maps import Bound, Region
from jaxscale.interop.safetensors import Tensors, dtype_of, is_real

_MISSING = 10_000
"""Missing tensors are listed by name only if there are no more of them than about this."""


class Foreign:
    """A Hugging Face checkpoint with the interface of one of ours (`jaxscale.train.checkpoints.read.Arrays`).

    Args:
      tensors: their tensors.
      bound: a `Bound` per parameter of our model.
      ignored: regular expressions of tensor names that are not part of the model (rotary tables, masks).
      prefix: prefix that their names may lack (GPT-2's "transformer.").
      leading: prefix for the names of our parameters, "params/".

    Raises:
      CheckpointError: tensors are missing, extra or of another shape; the message lists them.
    """

    def __init__(
        self,
        tensors: Tensors,
        bound: Iterable[Bound],
        ignored: tuple[str, ...] = (),
        prefix: str = "",
        leading: str = "params/",
    ):
        self._tensors, self._ignored = tensors, [re.compile(p) for p in ignored]
        self._bound = {f"{leading}{b.name}": b for b in bound}
        self._prefix = prefix if any(k.startswith(prefix) for k in tensors) else ""
        self._without = prefix if prefix and not self._prefix else ""
        self.unused: list[str] = []  # tensors that match `ignored`
        self._check()

    @property
    def leaves(self) -> dict[str, Bound]:
        """The `Bound` of each of our arrays, by name."""
        return self._bound

    @property
    def tensors(self) -> Tensors:
        """Their tensors."""
        return self._tensors

    def their(self, key: str) -> str:
        """Return the name in this checkpoint for a key of the table."""
        return key.removeprefix(self._without)

    def _check(self) -> None:
        count = sum(math.prod(b.sizes[a] for a in b.numbered) for b in self._bound.values())
        if count > 2 * len(self._tensors) + _MISSING:
            raise CheckpointError(
                f"the config.json of {self._tensors.folder} describes a model of {count:,} tensors, but the files hold "
                f"{len(self._tensors):,}; use the config.json that belongs to them"
            )
        expected = {self.their(key): b for b in self._bound.values() for key, _ in b.keys()}
        wrong = [f"{key} is missing" for key in expected if key not in self._tensors]
        for key, tensor in self._tensors.items():
            if key not in expected:
                ignored = any(p.fullmatch(key) for p in self._ignored)
                self.unused += [key] if ignored else []
                wrong += [] if ignored else [f"{key} is not in the model"]
            elif tensor.shape != expected[key].their_shape:
                shape = list(expected[key].their_shape)
                wrong.append(f"{key} is {list(tensor.shape)}, and its config.json says {shape}")
            elif not is_real(dtype_of(tensor, key)):
                wrong.append(f"{key} has the unsupported dtype {tensor.dtype[:20]}")
        if wrong:
            more = f", and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise CheckpointError(
                f"the tensors in {self._tensors.folder} are not those of its config.json: {'; '.join(wrong[:20])}{more}"
            )

    def dtypes(self) -> set[np.dtype]:
        """Return the dtypes of their tensors, except of those whose parameter is float32 in any case."""
        free = [b for b in self._bound.values() if b.dtype != np.float32] or self._bound.values()
        keys = (self.their(key) for b in free for key, _ in b.keys())
        return {dtype_of(self._tensors[k], k) for k in keys}

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """Read regions of one of our arrays, in its dtype; only the necessary parts of files are read.

        Args:
          name: our array.
          regions: parts of it.
        """
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
                out[place] = piece  # rounds if our dtype is narrower, as requested by the caller
                del tensor, piece
        sizes = [int(np.prod([spans[a][1] - spans[a][0] for a in group])) for group in b.ours]
        return np.ascontiguousarray(out.reshape(sizes)[tuple(slice(*s) for s in inner)])

    def faults(self) -> Iterator[str]:
        """Yield nothing: their files have no digests to check."""
        return iter(())


def their_tensors(bound: Iterable[Bound]) -> dict[str, list[tuple[Bound, dict[str, int]]]]:
    """Return, by name of their tensor, our parameters that it consists of, with the tensor's numbers in each."""
    sources: dict[str, list[tuple[Bound, dict[str, int]]]] = {}
    for b in bound:
        for key, numbers in b.keys():
            sources.setdefault(key, []).append((b, numbers))
    return sources


def assemble(parts: list[tuple[Bound, dict[str, int]]], read: Callable[[str, Region], np.ndarray]) -> np.ndarray:
    """Assemble one of their tensors from our parameters.

    Args:
      parts: an entry of `their_tensors`.
      read: (name of our parameter, region) -> the values of that region.
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
