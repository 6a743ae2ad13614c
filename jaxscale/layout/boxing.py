"""Split, broadcast, partial: what each device holds of a tensor, what an einsum makes of that, and what a change costs.

The algebra of OneFlow (Yuan et al. 2021, section 3.1). Along a mesh axis a tensor is *split* (each device has a piece
of one dimension), *broadcast* (each has all of it) or *partial* (each has a term of a sum).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxscale.errors import LayoutError, near
from jaxscale.layout.axes import MESH_AXES, check_mesh_axis


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A tensor's signature: along which mesh axes it is split and partial; along all others it is broadcast.

    Args:
      split: for each dimension, the mesh axes that cut it, outermost first.
      partial: the mesh axes over which the devices' arrays are yet to be summed.

    Raises:
      LayoutError: a mesh axis that does not exist, or that is named twice.
    """

    split: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", tuple((s,) if isinstance(s, str) else tuple(s or ()) for s in self.split))
        object.__setattr__(self, "partial", frozenset(self.partial))
        seen: set[str] = set()
        for axis in (*(a for s in self.split for a in s), *self.partial):
            check_mesh_axis(axis, "a signature")
            if axis in seen:
                raise LayoutError(f"the signature {self} has the mesh axis '{axis}' twice; use each once")
            seen.add(axis)

    @classmethod
    def of(cls, spec: PartitionSpec | Sequence[Any], ndim: int | None = None) -> Boxes:
        """The signature of an array laid out by a partition spec, which is never partial."""
        parts = tuple(spec)
        return cls(parts + (None,) * ((len(parts) if ndim is None else ndim) - len(parts)))

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of the split dimensions; of a partial tensor, that of each term."""
        return PartitionSpec(*(s[0] if len(s) == 1 else s or None for s in self.split))

    def along(self, axis: str) -> str:
        """What the tensor is along one mesh axis: "S(dimension)", "B" or "P"."""
        at = next((d for d, s in enumerate(self.split) if axis in s), None)
        return "P" if axis in self.partial else "B" if at is None else f"S({at})"

    def words(self, sizes: Mapping[str, int]) -> str:
        """The signature over the mesh axes of more than one device, as "data:B tensor:S(1)"."""
        return " ".join(f"{a}:{self.along(a)}" for a, n in sizes.items() if n > 1) or "one device"

    def __str__(self) -> str:
        used = [a for a in MESH_AXES if self.along(a) != "B"]
        return "(" + (" ".join(f"{a}:{self.along(a)}" for a in used) or "B") + ")"


@dataclasses.dataclass(frozen=True)
class Move:
    """One step of a change of signature.

    Args:
      kind: "slice", "mask" or "pad" (nothing is sent), "all-to-all", "reduce-scatter", "all-gather" or "all-reduce".
      axis: the mesh axis along which it happens.
      gathered: the dimension that was split along `axis` before, or `None`.
      cut: the dimension that is split along `axis` afterwards, or `None`.
      sent: bytes that each device sends, by the ring algorithms.
    """

    kind: str
    axis: str
    gathered: int | None
    cut: int | None
    sent: int


def infer(equation: str, *operands: Boxes) -> Boxes:
    """The signature of an einsum's result, with no communication.

    Along each mesh axis: operands that split one letter and broadcast the rest give a result split along that letter,
    or partial when the letter is summed; a partial operand among broadcast ones gives a partial result, since the
    product is linear in it.

    Args:
      equation: with its output, as "bse,ef->bsf".
      *operands: a signature each.

    Raises:
      LayoutError: along some axis the devices' pieces do not give a piece of the result; says what would.
    """
    inputs, output = _letters(equation)
    if len(inputs) != len(operands):
        raise LayoutError(f"einsum '{equation}' has {len(inputs)} operands and was given {len(operands)} signatures")
    for letters, boxes in zip(inputs, operands, strict=True):
        if len(letters) != len(boxes.split):
            raise LayoutError(
                f"einsum '{equation}': '{letters}' has {len(letters)} dimensions, and its signature {boxes} has "
                f"{len(boxes.split)}"
            )
    cuts: dict[str, set[tuple[str, ...]]] = {letter: set() for letters in inputs for letter in letters}
    for letters, boxes in zip(inputs, operands, strict=True):
        for letter, axes in zip(letters, boxes.split, strict=True):
            cuts[letter].add(axes)
    partial = set()
    for axis in MESH_AXES:
        kinds = [boxes.along(axis) for boxes in operands]
        cut = {letters[int(k[2:-1])] for letters, k in zip(inputs, kinds, strict=True) if k[0] == "S"}
        if "P" in kinds and (cut or kinds.count("P") > 1):
            raise LayoutError(
                f"einsum '{equation}': along '{axis}' the operands are {', '.join(kinds)}, and a product of sums is "
                "not the sum of products; make the partial operand broadcast (all-reduce) or split (reduce-scatter)"
            )
        if len(cut) > 1:
            raise LayoutError(
                f"einsum '{equation}': '{axis}' splits both {' and '.join(map(repr, sorted(cut)))}, so no device has "
                "the pieces that belong together; re-box one operand so that it splits the same letter or none"
            )
        for letter in cut:
            if any(letter in letters and k == "B" for letters, k in zip(inputs, kinds, strict=True)):
                raise LayoutError(
                    f"einsum '{equation}': '{axis}' splits '{letter}' in one operand and not in another; slice the "
                    "other along it, which sends nothing"
                )
            if letter not in output:
                partial.add(axis)
        if "P" in kinds:
            partial.add(axis)
    for letter, found in cuts.items():
        if len(found) > 1:  # the same axes, or the loop would have said so
            raise LayoutError(
                f"einsum '{equation}': '{letter}' is cut by {' and by '.join(map(str, sorted(found)))}; nest the mesh "
                "axes in one order"
            )
    return Boxes(tuple(next(iter(cuts[letter])) for letter in output), frozenset(partial))


def rebox(before: Boxes, after: Boxes, shape: Sequence[int], itemsize: int, sizes: Mapping[str, int]) -> list[Move]:
    """The moves from one signature to another, and the bytes each sends.

    Moves that shrink what a device holds come first, so that the later ones send less: slices and reduce-scatters, then
    all-to-alls, then what makes it grow.

    Args:
      before, after: signatures over the same mesh; every pair is possible.
      shape: of the whole tensor.
      itemsize: bytes of an element.
      sizes: devices by mesh axis.

    Raises:
      LayoutError: another number of dimensions, or a dimension that does not divide.
    """
    if not len(before.split) == len(after.split) == len(shape):
        raise LayoutError(f"{before} and {after} must both have the {len(shape)} dimensions of {tuple(shape)}")
    for boxes in (before, after):
        for d, axes in enumerate(boxes.split):
            pieces = math.prod(sizes[a] for a in axes)
            if shape[d] % pieces:
                near = max(1, (2 * shape[d] + pieces) // (2 * pieces)) * pieces
                raise LayoutError(
                    f"{boxes} cuts dimension {d} of {tuple(shape)} into {pieces} pieces, which does not divide; the "
                    f"nearest size that does is {near}"
                )
    whole = math.prod(shape) * itemsize
    moves: list[Move] = []
    split, partial = [list(s) for s in before.split], set(before.partial)
    while True:
        held = whole // math.prod(sizes[a] for s in split for a in s)
        move = _next_move(split, partial, after, held, sizes)
        if move is None:
            return moves
        moves.append(move)
        if move.gathered is not None:
            split[move.gathered].remove(move.axis)
        if move.cut is not None:
            split[move.cut].append(move.axis)
        partial.discard(move.axis)
        if move.kind in ("mask", "pad"):
            partial.add(move.axis)


def _next_move(
    split: list[list[str]], partial: set[str], after: Boxes, held: int, sizes: Mapping[str, int]
) -> Move | None:
    cut = {a for s in split for a in s}
    # what each dimension is to be cut by next, if all it is cut by now may stay
    due = {
        wanted[len(now)]: d
        for d, (now, wanted) in enumerate(zip(split, after.split, strict=True))
        if list(wanted[: len(now)]) == now and len(wanted) > len(now)
    }
    # only the innermost cut of a dimension can be undone in place, and it is undone if any below it has to go
    loose = {
        now[-1]: d
        for d, (now, wanted) in enumerate(zip(split, after.split, strict=True))
        if now and list(wanted[: len(now)]) != now
    }

    def move(kind: str, axis: str, share: float, gathered: int | None = None, cut: int | None = None) -> Move:
        return Move(kind, axis, gathered, cut, round(held * share))

    def others(axis: str) -> int:
        return sizes[axis] - 1

    for axis, d in due.items():
        if axis in partial:
            return move("reduce-scatter", axis, others(axis) / sizes[axis], cut=d)
        if axis not in cut:
            return move("slice", axis, 0, cut=d)
    for axis, d in loose.items():
        if axis in due:
            return move("all-to-all", axis, others(axis) / sizes[axis], gathered=d, cut=due[axis])
        if axis in after.partial:
            return move("pad", axis, 0, gathered=d)
    for axis, d in loose.items():
        return move("all-gather", axis, others(axis), gathered=d)
    for axis in sorted(partial - after.partial):
        return move("all-reduce", axis, 2 * others(axis) / sizes[axis])
    for axis in sorted(after.partial - partial):
        return move("mask", axis, 0)
    return None


def _letters(equation: str) -> tuple[list[str], str]:
    found = re.fullmatch(r"([a-zA-Z,]*)->([a-zA-Z]*)", equation.replace(" ", ""))
    if not found:
        raise LayoutError(f"'{equation}' is not an einsum with its output written out, such as 'bse,ef->bsf'")
    inputs, output = found[1].split(","), found[2]
    for letter in output:
        if not any(letter in i for i in inputs):
            raise LayoutError(f"einsum '{equation}': '{letter}' is in the output only{near(letter, set(found[1]))}")
    return inputs, output
