"""Collectives out of changes of signature: what must be sent so that a named tensor lies as its next user wants it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from jaxscale.layout import Boxes, Layout, TensorInfo, as_used, rebox
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.boxing import Move, infer
from jaxscale.layout.rules import Kind
from jaxscale.plan.collectives import Collective

_SENT = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")


@dataclasses.dataclass(frozen=True)
class Mover:
    """Reads a layout's rules; every method that returns collectives returns those of one step.

    Args:
      layout: with its sizes known; needs no devices.
      manual: mesh axes that a `shard_map` around the arithmetic cuts; shapes are of what it left.
    """

    layout: Layout
    manual: frozenset[str] = frozenset()

    def over(self, *axes: str | None, kind: Kind = "activations") -> tuple[str, ...]:
        """The mesh axes of more than one device that cut dimensions of these names, outermost first."""
        rules, sizes = self.layout.resolved_rules, self.layout.sizes
        found = [m for a in axes if a is not None for m in rules.target(kind, a)]
        return tuple(m for m in found if sizes[m] > 1 and m not in self.manual)

    def devices(self, over: Sequence[str]) -> int:
        """How many devices these mesh axes span."""
        count = 1
        for m in over:
            count *= self.layout.sizes[m]
        return count

    def used(self, info: TensorInfo) -> TensorInfo:
        """A tensor as it is used: with zeros behind a vocabulary that devices do not divide."""
        return as_used(info, self.layout, self.manual)

    def boxes(self, info: TensorInfo, kind: Kind = "activations", partial: Sequence[str] = ()) -> Boxes:
        """A tensor's signature by the rules.

        Raises:
          LayoutError: naming the tensor that cannot be laid out.
        """
        shape = self.used(info).shape if kind == "activations" else info.shape
        spec = self.layout.spec(info.axes, shape, kind=kind, name=info.path, manual=self.manual)
        return Boxes(Boxes.of(spec, len(info.shape)).split, frozenset(partial))

    def local_bytes(self, info: TensorInfo, kind: Kind = "activations") -> int:
        """Bytes of a tensor on one device."""
        whole = self.used(info) if kind == "activations" else info
        return whole.nbytes // self.devices([m for s in self.boxes(info, kind).split for m in s])

    def change(self, info: TensorInfo, before: Boxes, after: Boxes, times: int, name: str) -> list[Collective]:
        """What turns one signature of a tensor into another, so many times; moves of a kind in a row are one.

        Args:
          info: the tensor; its dtype is that in which it travels.
          before, after: see `jaxscale.layout.rebox`.
          times: how often in a step.
          name: what for.
        """
        itemsize = jnp.dtype(info.dtype).itemsize
        moves = rebox(before, after, self.used(info).shape, itemsize, self.layout.sizes)
        found = []
        for kind, group in itertools.groupby((m for m in moves if m.kind in _SENT), key=lambda m: m.kind):
            together = list(group)
            payloads = [_payload(m, self.layout.sizes[m.axis]) for m in together]
            payload = payloads[-1] if kind == "all-gather" else payloads[0]
            found += self.send(kind, [m.axis for m in together], payload, times, name)
        return found

    def send(
        self, kind: str, over: Sequence[str], payload: int, times: int, name: str, certain: bool = True
    ) -> list[Collective]:
        """One collective over these mesh axes; none where they have one device, or nothing is sent."""
        axes = tuple(a for a in MESH_AXES if a in over and self.layout.sizes[a] > 1)
        if not axes or not payload or not times:
            return []
        return [Collective(kind, axes, self.devices(axes), payload, times, certain, name=name)]

    def summed(self, info: TensorInfo, over: Sequence[str], times: int, name: str) -> list[Collective]:
        """The sum over these mesh axes of what devices hold of a tensor, on all of them."""
        return self.send("all-reduce", over, self.local_bytes(info), times, name)


def _payload(move: Move, n: int) -> int:
    """The whole that a move is about, from what each device sends of it by the ring algorithms."""
    return round(move.sent * n / (n - 1) / (2 if move.kind == "all-reduce" else 1))


@dataclasses.dataclass(frozen=True)
class Product:
    """`x · kernel`, by names alone: what it leaves to be summed, forward and backward.

    Args:
      mover: the layout's.
      x, kernel, y: named tensors as they are used; a name stands for the same dimension in all three.
    """

    mover: Mover
    x: TensorInfo
    kernel: TensorInfo
    y: TensorInfo

    def forward(self) -> Boxes:
        """y's signature before any sum."""
        return self._infer(self.x, self.kernel, self.y)

    def input_gradient(self) -> Boxes:
        """That of x's cotangent."""
        return self._infer(self.y, self.kernel, self.x)

    def kernel_gradient(self) -> Boxes:
        """That of the kernel's."""
        return self._infer(self.x, self.y, self.kernel)

    def _infer(self, a: TensorInfo, b: TensorInfo, out: TensorInfo) -> Boxes:
        letter: dict[str | None, str] = {}
        for axis in (*a.axes, *b.axes, *out.axes):
            letter.setdefault(axis, chr(ord("a") + len(letter)))
        left, right, result = ("".join(letter[n] for n in t.axes) for t in (a, b, out))
        return infer(f"{left},{right}->{result}", self.mover.boxes(a), self.mover.boxes(b))
