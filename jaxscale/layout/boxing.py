"""Split, broadcast and partial tensors: the result of an einsum of them, and the bytes sent by a change between them.

The SBP signatures of OneFlow (Yuan et al. 2021, section 3.1). Along a mesh axis a tensor is *split* (each device has a
shard of one dimension), *broadcast* (each has all of it) or *partial* (each has a term of a sum).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxscale.errors import LayoutError, near
from jaxscale.layout.axes import MESH_AXES, check_mesh_axis


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A tensor's SBP signature: the mesh axes along which it is split or partial; along all others it is broadcast.

    Args:
      split: for each dimension, the mesh axes that it is split over, outermost first.
      partial: the mesh axes over which the devices' arrays must still be summed.

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
    def of(cls, spec: PartitionSpec | Sequence[str | tuple[str, ...] | None], ndim: int | None = None) -> Boxes:
        """Return the signature of an array with a partition spec.

        Args:
          spec: the mesh axes of each dimension.
          ndim: number of dimensions; those that a shorter spec lacks are not sharded. `None` is the spec's length.
        """
        parts = tuple(spec)
        return cls(parts + (None,) * ((len(parts) if ndim is None else ndim) - len(parts)))

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec; for a partial tensor, that of each term of the sum."""
        return PartitionSpec(*(s[0] if len(s) == 1 else s or None for s in self.split))

    def along(self, axis: str) -> str:
        """Return what the tensor is along a mesh axis: "S(dimension)", "B" or "P".

        Args:
          axis: name of the mesh axis.
        """
        at = next((d for d, s in enumerate(self.split) if axis in s), None)
        return "P" if axis in self.partial else "B" if at is None else f"S({at})"

    def words(self, sizes: Mapping[str, int]) -> str:
        """Write the signature for the mesh axes of more than one device, such as "data:B tensor:S(1)".

        Args:
          sizes: devices by mesh axis.
        """
        return " ".join(f"{a}:{self.along(a)}" for a, n in sizes.items() if n > 1) or "one device"

    def __str__(self) -> str:
        used = [a for a in MESH_AXES if self.along(a) != "B"]
        return "(" + (" ".join(f"{a}:{self.along(a)}" for a in used) or "B") + ")"


@dataclasses.dataclass(frozen=True)
class Move:
    """One step of a change from one signature to another.

    Args:
      kind: "slice", "mask" or "pad" (nothing is sent), "all-to-all", "reduce-scatter", "all-gather" or "all-reduce".
      axis: the mesh axis along which it happens.
      gathered: the dimension that was split over `axis` before, or `None`.
      cut: the dimension that is split over `axis` afterwards, or `None`.
      sent: bytes that each device sends, with ring algorithms.
    """

    kind: str
    axis: str
    gathered: int | None
    cut: int | None
    sent: int


def infer(equation: str, *operands: Boxes) -> Boxes:
    """Return the signature of an einsum's result when nothing is communicated.

    Along each mesh axis: operands that split one letter and broadcast the rest give a result split along that letter,
    or partial when the letter is summed; a partial operand among broadcast ones gives a partial result, because the
    product is linear in it.

    Args:
      equation: the einsum with its output, such as "bse,ef->bsf".
      *operands: the signature of each operand.

    Raises:
      LayoutError: along some mesh axis the devices cannot compute their part of the result without communication; the
        message gives a change that makes it possible.
    """
    inputs, output = _letters(equation)
    if len(inputs) != len(operands):
        raise LayoutError(
            f"einsum '{equation}' has {len(inputs)} operands and there are {len(operands)} signatures; give one each"
        )
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
                "matching shards; reshard one operand so that it splits the same letter or none"
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
    for letter, orders in cuts.items():
        if len(orders) > 1:  # the same mesh axes in another order: the loop has refused other axes
            raise LayoutError(
                f"einsum '{equation}': '{letter}' is split over {' and over '.join(map(str, sorted(orders)))}; nest "
                "the mesh axes in one order"
            )
    return Boxes(tuple(next(iter(cuts[letter])) for letter in output), frozenset(partial))


def rebox(before: Boxes, after: Boxes, shape: Sequence[int], itemsize: int, sizes: Mapping[str, int]) -> list[Move]:
    """Return the moves that change one signature into another, and the bytes that each sends.

    Moves that shrink what a device holds come first, so that the later ones send less: slices and reduce-scatters, then
    all-to-alls, then all-gathers.

    Args:
      before: the signature now.
      after: the signature to reach, over the same mesh; every pair is possible.
      shape: the global shape.
      itemsize: bytes of an element.
      sizes: devices by mesh axis.

    Raises:
      LayoutError: the signatures and the shape differ in their number of dimensions, or a dimension does not divide.
    """
    if not len(before.split) == len(after.split) == len(shape):
        raise LayoutError(f"{before} and {after} must both have the {len(shape)} dimensions of {tuple(shape)}")
    for boxes in (before, after):
        for d, axes in enumerate(boxes.split):
            pieces = math.prod(sizes[a] for a in axes)
            if shape[d] % pieces:
                near = max(1, (2 * shape[d] + pieces) // (2 * pieces)) * pieces
                raise LayoutError(
                    f"{boxes} splits dimension {d} of {tuple(shape)} over {pieces} devices, and {pieces} does not "
                    f"divide {shape[d]}; the nearest size that it divides is {near}"
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
    # mesh axis -> the dimension to split over it next, where the dimension's present axes are a prefix of its target's
    due = {
        target[len(now)]: d
        for d, (now, target) in enumerate(zip(split, after.split, strict=True))
        if list(target[: len(now)]) == now and len(target) > len(now)
    }
    # only a dimension's innermost mesh axis can be removed in place; it is removed if any of its axes has to be
    loose = {
        now[-1]: d
        for d, (now, target) in enumerate(zip(split, after.split, strict=True))
        if now and list(target[: len(now)]) != now
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
    match = re.fullmatch(r"([a-zA-Z,]*)->([a-zA-Z]*)", equation.replace(" ", ""))
    if not match:
        raise LayoutError(f"'{equation}' is not an einsum with its output written out, such as 'bse,ef->bsf'")
    inputs, output = match[1].split(","), match[2]
    for letter in output:
        if not any(letter in i for i in inputs):
            raise LayoutError(f"einsum '{equation}': '{letter}' is in the output only{near(letter, set(match[1]))}")
    return inputs, output
