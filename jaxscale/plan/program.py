"""A traced program as one device executes it: its operations, and the arrays that they read and write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxscale.layout import Boxes
from jaxscale.plan.collectives import Collective

ALIAS = "alias"
"""An operation that gives an array another number."""

LANES = 128
"""A TPU's minor dimension is padded to a multiple of so many elements, where it has at least half as many."""

_ELEMENTWISE = frozenset(
    "add add_any sub mul div max min neg abs sign exp log tanh logistic rsqrt sqrt square integer_pow pow erf sin cos "
    "floor clamp select_n eq ne lt le gt ge and or not convert_element_type reduce_precision name copy".split()
)
"""Primitives whose results repeat themselves where all operands do."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on arrays, which go by numbers; equal arrays have one number.

    Args:
      name: the primitive; "reshard", "loop", "branch" or `ALIAS`.
      reads: the arrays that it takes.
      writes: bytes of those that it makes.
      scope: its named scopes.
      sent: collectives.
      body: of a loop or a branch.
      carried: of a loop, by a carry's number inside of it: its number before, that of its next value, and its bytes.
      rows: of a loop, by number inside of it: the stack whose row it is, and its bytes.
      stacked: of a loop, by number inside of it: the stack that it becomes a row of.
      length: of a loop.
      results: of a branch, the numbers inside of it.
    """

    name: str
    reads: tuple[int, ...]
    writes: Mapping[int, int]
    scope: str = ""
    sent: tuple[Collective, ...] = ()
    body: tuple[Operation, ...] = ()
    carried: Mapping[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    rows: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    stacked: Mapping[int, int] = dataclasses.field(default_factory=dict)
    length: int = 1
    results: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in the order in which they were traced.

    Args:
      operations: those.
      arguments: bytes by number.
      results: numbers; the first take the memory of the first arguments.
    """

    operations: tuple[Operation, ...]
    arguments: Mapping[int, int]
    results: tuple[int, ...]


class Recorder:
    """Records a program while it is partitioned.

    Args:
      sizes: the mesh axes' sizes.
      platform: "tpu", "cuda" or "cpu".
    """

    def __init__(self, sizes: Mapping[str, int], platform: str):
        self.sizes, self.platform = sizes, platform
        self.operations: list[Operation] = []
        self.resharded: dict[int, int] = {}
        """Of the operands of the operation that is partitioned, the numbers in the sharding that it takes."""
        self.sent: tuple[Collective, ...] = ()
        """What this operation sends."""
        self._repeated: dict[int, frozenset[int]] = {}

    def nested(self) -> Recorder:
        """A recorder with operations of its own."""
        return Recorder(self.sizes, self.platform)

    def alias(self, number: int, same: int) -> None:
        """Another number for an array."""
        if number != same:
            self.operations.append(Operation(ALIAS, (number,), {same: 0}))

    def reshard(self, number: int, var: Any, made: int, after: Boxes, scope: str, *, sliced: bool) -> None:
        """A change of sharding; `sliced` if each device only takes a part of what it has."""
        name = "slice" if sliced else "reshard"
        self.operations.append(Operation(name, (number,), {made: self.bytes_of(var, after)}, scope, self.sent))
        self.sent = ()

    def operation(self, eqn: Any, reads: Sequence[int], made: Iterable[tuple[Any, int, Boxes]], scope: str) -> None:
        """An operation of a jaxpr.

        Args:
          eqn: it.
          reads: numbers of its operands, 0 for literals.
          made: variables, numbers and shardings of its results.
          scope: its named scopes.
        """
        repeated = self._repeats(eqn, reads)
        operands = tuple(self.resharded.get(n, n) for n in reads if n)
        writes = {n: self.bytes_of(v, boxes, repeated) for v, n, boxes in made if n not in operands}
        self._repeated |= dict.fromkeys(writes, repeated)
        self.operations.append(Operation(eqn.primitive.name, operands, writes, scope, self.sent))
        self.sent = ()

    def bytes_of(self, var: Any, boxes: Boxes, repeated: frozenset[int] = frozenset()) -> int:
        """Bytes of an array on one device, repetitions along some dimensions left out; none in host memory."""
        aval = var.aval
        if not hasattr(aval, "shape") or getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0
        pieces = [math.prod(self.sizes[a] for a in axes) for axes in boxes.split]
        each = enumerate(zip(aval.shape, pieces, strict=True))
        local = [-(-n // k) for d, (n, k) in each if d not in repeated]
        if self.platform == "tpu" and len(local) > 2 and local[-1] >= LANES // 2:
            local[-1] = -(-local[-1] // LANES) * LANES
        return math.prod(local) * getattr(aval.dtype, "itemsize", 4)

    def _repeats(self, eqn: Any, reads: Sequence[int]) -> frozenset[int]:
        """Dimensions along which a result repeats itself: compilers broadcast as late as they can."""
        name, shape = eqn.primitive.name, getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        every = frozenset(range(len(shape)))
        if name == "iota":
            return every - {eqn.params["dimension"]}
        of = {id(v): self._repeated.get(n, frozenset()) for v, n in zip(eqn.invars, reads, strict=True)}
        if name == "broadcast_in_dim":
            places, operand = eqn.params["broadcast_dimensions"], eqn.invars[0]
            sizes = getattr(operand.aval, "shape", ())
            return every - {to for d, to in enumerate(places) if sizes[d] == shape[to] and d not in of[id(operand)]}
        arrays = [v for v in eqn.invars if getattr(v.aval, "shape", ()) and not isinstance(v, core.Literal)]
        if name not in _ELEMENTWISE or not arrays or any(v.aval.shape != shape for v in arrays):
            return frozenset()
        return frozenset.intersection(*(of[id(v)] for v in arrays))
