"""A partitioned program on one device: its operations, and the arrays that they read and write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import DTypeLike

from jaxscale.layout import Boxes
from jaxscale.plan.collectives import Collective

ALIAS = "alias"
"""Name of an operation that only gives an array a second number."""

LANES = 128
"""Minor dimensions of at least half this size are padded to a multiple of it on TPUs."""

ELEMENTWISE = frozenset(
    "add add_any sub mul div max min neg abs sign exp log tanh logistic rsqrt sqrt square integer_pow pow erf sin cos "
    "floor clamp select_n eq ne lt le gt ge and or not convert_element_type reduce_precision name copy".split()
)
"""Primitives that compute each element of a result from one element of each operand."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on arrays. Arrays are identified by numbers; equal arrays have the same number.

    Args:
      name: the primitive, "reshard", "loop", "branch" or `ALIAS`.
      reads: numbers of the operands.
      writes: numbers of the results, and their bytes on the device.
      scope: the named scopes.
      sent: the collectives.
      body: operations of a loop's body or of a branch.
      carried: for each carry of a loop, by its number in the body: its initial value, its next value, its bytes.
      rows: for each row that a loop's body reads, by its number in the body: the stack, and the row's bytes.
      stacked: for each row that a loop's body writes, by its number in the body: the stack.
      length: iterations of a loop.
      results: results of a branch, by their numbers in the branch.
      scratch: temporary bytes while the operation runs, besides its results.
      inner: whether it gathers shards along another dimension than the first.
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
    scratch: int = 0
    inner: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of one device.

    Args:
      operations: the operations in the order in which they were traced.
      arguments: numbers of the arguments, and their bytes.
      results: numbers of the results; the first arguments are donated to the first results.
      narrow: the arguments with at most two bytes an element.
    """

    operations: tuple[Operation, ...]
    arguments: Mapping[int, int]
    results: tuple[int, ...]
    narrow: frozenset[int] = frozenset()


class Recorder:
    """Records a program while it is partitioned.

    Args:
      sizes: number of devices by mesh axis.
      platform: "tpu", "cuda" or "cpu".
    """

    def __init__(self, sizes: Mapping[str, int], platform: str):
        self.sizes, self.platform = sizes, platform
        self.operations: list[Operation] = []
        self.resharded: dict[int, int] = {}
        """For operands of the current operation, their numbers after resharding."""
        self.sent: tuple[Collective, ...] = ()
        """Collectives of the current operation."""
        self._repeated: dict[int, frozenset[int]] = {}
        self.unpadded: set[tuple[int, ...]] = set()
        """Shapes of arguments and of their rows. Compilers choose layouts for these that need no padding."""

    def alias(self, number: int, same: int) -> None:
        """Give an array a second number."""
        if number != same:
            self.operations.append(Operation(ALIAS, (number,), {same: 0}))

    def reshard(
        self,
        number: int,
        var: Any,
        made: int,
        after: Boxes,
        scope: str,
        *,
        dtype: DTypeLike | None = None,
        sliced: bool,
        inner: bool,
    ) -> None:
        """Record a change of sharding.

        Args:
          number: the array's number before the change.
          var: its variable.
          made: its number after the change.
          after: its sharding after the change.
          scope: the named scopes.
          dtype: the dtype in which a partial sum is reduced, if not its own: a cast of the result is fused into its
            users.
          sliced: whether each device only slices its own shard.
          inner: see `Operation`.
        """
        name = "slice" if sliced else "reshard"
        size = self.bytes_of(var, after)
        if dtype is not None and hasattr(var.aval, "dtype"):
            size = size * jnp.dtype(dtype).itemsize // var.aval.dtype.itemsize
        self.operations.append(Operation(name, (number,), {made: size}, scope, self.sent, inner=inner))
        self.sent = ()

    def operation(
        self, eqn: core.JaxprEqn, reads: Sequence[int], made: Iterable[tuple[Any, int, Boxes]], scope: str
    ) -> None:
        """Record an operation of a jaxpr.

        Args:
          eqn: the operation.
          reads: numbers of its operands, 0 for literals.
          made: variables, numbers and shardings of its results.
          scope: the named scopes.
        """
        repeated = self._repeats(eqn, reads)
        operands = tuple(self.resharded.get(n, n) for n in reads if n)
        writes = {n: self.bytes_of(v, boxes, repeated) for v, n, boxes in made if n not in operands}
        self._repeated |= dict.fromkeys(writes, repeated)
        scratch = self._masked(eqn) if self.platform == "cuda" and eqn.primitive.name.startswith("ragged_dot") else 0
        inner = eqn.params.get("all_gather_dimension", 0) > 0
        made_by = Operation(eqn.primitive.name, operands, writes, scope, self.sent, scratch=scratch, inner=inner)
        self.operations.append(made_by)
        self.sent = ()

    def _masked(self, eqn: Any) -> int:
        """Scratch bytes of a ragged product on GPUs: its rows, masked for each group and transposed.

        XLA for GPUs makes the product dense. Experts take it there with one group or few rows, and else a kernel or a
        loop over tiles (`pallas_kernels.grouped_matmul`), which is walked as any loop. The formula comes from buffer
        assignments of steps compiled for H100 (`experiments/planner_accuracy/MEMORY.md`). Experts' products are inside
        a `shard_map`, so that shapes are per-device.
        """
        rows, _, sizes = (v.aval for v in eqn.invars[:3])
        return 2 * math.prod(sizes.shape) * math.prod(rows.shape) * rows.dtype.itemsize

    def bytes_of(self, var: Any, boxes: Boxes, repeated: frozenset[int] = frozenset()) -> int:
        """Bytes of an array on one device; 0 in host memory. Dimensions in `repeated` count as 1."""
        aval = var.aval
        if not hasattr(aval, "shape") or getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0
        pieces = [math.prod(self.sizes[a] for a in axes if a not in boxes.partial) for axes in boxes.split]
        each = enumerate(zip(aval.shape, pieces, strict=True))
        local = [-(-n // k) for d, (n, k) in each if d not in repeated]
        padded = self.platform == "tpu" and tuple(aval.shape) not in self.unpadded
        if padded and len(local) > 2 and local[-1] >= LANES // 2:
            local[-1] = -(-local[-1] // LANES) * LANES
        return math.prod(local) * getattr(aval.dtype, "itemsize", 4)

    def _repeats(self, eqn: Any, reads: Sequence[int]) -> frozenset[int]:
        """Dimensions along which the result is a broadcast: compilers fuse broadcasts into their users."""
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
        if name not in ELEMENTWISE or not arrays or any(v.aval.shape != shape for v in arrays):
            return frozenset()
        return frozenset.intersection(*(of[id(v)] for v in arrays))
