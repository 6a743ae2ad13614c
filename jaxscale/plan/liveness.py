"""Memory of a program by liveness: an array is live from its operation to the last operation that reads it.

This estimates what XLA for TPUs allocates, without compiling, from a partitioned program (`jaxscale.plan.partition`)
that is rewritten as the compiler rewrites it (`jaxscale.plan.rewrites`). Elementwise operations are fused into the
products that they alone read, else into the operations that read them, and take no memory; matrix products, reductions,
collectives, kernels and loops do. Results reuse the memory of donated arguments. The order of operations depends on
the chip (`Habits`). `experiments/planner_accuracy/MEMORY.md` compares with compiled programs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from jaxscale.hardware import Topology
from jaxscale.plan.heap import Buffer, Heap
from jaxscale.plan.program import Operation, Program
from jaxscale.plan.rewrites import ALIASES, SUMS, is_sum, rewritten, with_fused_outputs

_UNFUSED = SUMS | frozenset(
    "pallas_call loop branch gather scatter scatter-add sort top_k all_gather all_gather_invariant all_to_all "
    "ragged_all_to_all ppermute cumsum device_put ragged_dot_general eigh qr argmax".split()
)
"""Primitives that read their operands from memory and write their results to memory."""

_STORED = _UNFUSED | frozenset("dot_general conv_general_dilated reduce_sum reduce_max reduce_min".split())
"""Primitives that write their results to memory; elementwise operations may be fused into their operands."""

_MOVES = frozenset("slice dynamic_slice transpose convert_element_type".split())
"""Primitives that may come between a weight and its gather."""

_IN_PLACE = frozenset("psum psum2 psum_invariant dynamic_update_slice scatter-add scatter loop branch".split())
"""Primitives that may reuse the memory of an operand that is not read again."""


@dataclasses.dataclass(frozen=True)
class Habits:
    """How XLA orders a chip's operations, read off compiled programs (`experiments/planner_accuracy/MEMORY.md`).

    Args:
      late: outside of loops the longest chain of operations comes first, and every other operation when its result is
        read; otherwise an operation runs as soon as it frees memory, else as late as possible.
      gathers_first: weights are gathered at the start of a loop's body.
      asynchronous_sums: the operand of a sum over devices stays in memory until the sum is read, in a loop until the
        iteration ends.
      copies_stacks: stacks of weights in the dtype of products are copied to other tiles before a loop.
      keeps_stacks: a loop's results do not reuse the memory of stacks whose rows it reads.
    """

    late: bool = False
    gathers_first: bool = False
    asynchronous_sums: bool = False
    copies_stacks: bool = False
    keeps_stacks: bool = False

    @classmethod
    def of(cls, hardware: Topology) -> Habits:
        """Return the habits for a chip; those for v5e where no compiled program of the chip was read.

        Args:
          hardware: the topology.
        """
        return _HABITS.get(hardware.chip.name, cls(keeps_stacks=hardware.chip.platform == "gpu"))


_HABITS = {
    "v5p": Habits(late=True, gathers_first=True),
    "v6e": Habits(late=True, gathers_first=True),
    "tpu7x": Habits(late=True, asynchronous_sums=True, copies_stacks=True),
}


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory of a program on one device.

    Args:
      arguments: bytes.
      temporaries: peak bytes of all other arrays, fragmentation included.
      at_peak: the arrays that are live at the peak, with their scopes and operations.
      moved: bytes that operations read and write, all iterations together.
    """

    arguments: int
    temporaries: int
    at_peak: tuple[Buffer, ...]
    moved: float


def allocation(program: Program, hardware: Topology) -> Allocation:
    """Return the memory of a program.

    Args:
      program: the program of one device.
      hardware: the devices; `jaxscale.plan.stand_ins` says which collectives their compiler replaces.
    """
    habits = Habits.of(hardware)
    block = _Block(rewritten(program, hardware, copied_stacks=habits.copies_stacks), program.results, habits)
    donated: dict[int, int] = {}
    heap = Heap()
    for result, (argument, size) in zip(program.results, program.arguments.items(), strict=False):
        number = block.canonical(result)
        if block.bytes.get(number) == size:
            donated[number] = argument
            if block.made_by(number) == "reshard":  # XLA copies arguments that a gathered result would overwrite
                heap.take("copies of parameters", size)
    block.run(heap, donated)
    return Allocation(sum(program.arguments.values()), heap.peak, heap.at_peak, block.moved(program.arguments))


class _Block:
    """The operations of a program, a loop's body or a branch, after fusion.

    Args:
      operations: before fusion.
      results: numbers of the arrays that are live at the end.
      habits: the order of operations.
      inside: whether this is the body of a loop or a branch.
    """

    def __init__(
        self, operations: Sequence[Operation], results: Iterable[int], habits: Habits, *, inside: bool = False
    ):
        self._habits, self._inside = habits, inside
        self._canonical: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        every: list[Operation] = []
        self._updated: dict[int, int] = {}  # bytes of the part that is written in place, and 0 of the array before
        for op in operations:
            if op.name in ALIASES and op.reads:
                self._canonical |= {n: op.reads[0] for n in op.writes if n != op.reads[0]}
            elif op.writes or op.body:
                every.append(dataclasses.replace(op, reads=tuple({self.canonical(n) for n in op.reads})))
                self.bytes |= op.writes
                if op.name == "dynamic_update_slice" and (part := self.canonical(op.reads[1])) in self.bytes:
                    self._updated |= {self.canonical(op.reads[0]): 0, **dict.fromkeys(op.writes, self.bytes[part])}
        self.results = {self.canonical(n) for n in results}
        every = with_fused_outputs(every, self.results)
        self._by = {n: op for op in every for n in op.writes}
        users: dict[int, list[Operation]] = defaultdict(list)
        for op in every:
            for n in op.reads:
                users[n].append(op)
        stored = {id(op) for op in every if self._stored(op, [u for n in op.writes for u in users[n]])}
        self.operations: list[Operation] = []
        self._read: list[dict[int, float]] = []  # by operation, arrays and the bytes of each that it reads at most
        sources: dict[int, dict[int, float]] = {}  # of fused arrays, the same
        for op in every:
            reads: dict[int, float] = {}
            most = sum(op.writes.values()) if op.name == "dynamic_slice" else math.inf
            for n in op.reads:
                for source, size in sources.get(n, {n: math.inf}).items():
                    reads[source] = reads.get(source, 0.0) + min(size, most)
            if id(op) in stored:
                reads = {n: size for n, size in reads.items() if n not in op.writes}
                self.operations.append(dataclasses.replace(op, reads=tuple(reads)))
                self._read.append(reads)
            else:
                sources |= dict.fromkeys(op.writes, reads)

    def canonical(self, n: int) -> int:
        """Return the number that stands for all aliases of an array."""
        while n in self._canonical:
            n = self._canonical[n]
        return n

    def made_by(self, n: int) -> str:
        """Return the name of the operation that makes an array; "" for an argument."""
        return self._by[n].name if n in self._by else ""

    def _stored(self, op: Operation, users: Sequence[Operation]) -> bool:
        """Return whether an operation's results are in memory, because it or one of its users is not fused."""
        if self.results & op.writes.keys() or (users and op.name in _STORED):
            return True
        if not users or not op.reads:
            return False
        unfused = _UNFUSED - {"loop"} if op.name == "broadcast_in_dim" else _UNFUSED
        return any(u.name in unfused for u in users)

    def _order(self, donated: Mapping[int, int]) -> list[Operation]:
        """Return a schedule of the operations."""
        maker = {n: i for i, op in enumerate(self.operations) for n in op.writes}
        if self._habits.late and not self._inside:
            return self._late_order(maker)
        return self._early_order(maker, donated)

    def _late_order(self, maker: Mapping[int, int]) -> list[Operation]:
        """Return a schedule with the longest chain of operations first, and others when their result is read."""
        ops = self.operations
        depth = [0] * len(ops)
        for i, op in enumerate(ops):
            depth[i] = 1 + len(op.body) + max((depth[maker[n]] for n in op.reads if n in maker), default=0)
        read_last = sorted(range(len(ops)), key=lambda i: (not self.results & ops[i].writes.keys(), -depth[i]))
        order: list[Operation] = []
        begun = set[int]()
        stack = [(i, False) for i in reversed(read_last)]
        while stack:
            i, complete = stack.pop()
            if complete:
                order.append(ops[i])
            elif i not in begun:
                begun.add(i)
                stack.append((i, True))
                needs = {maker[n] for n in ops[i].reads if n in maker} - begun
                stack += [(j, False) for j in sorted(needs, key=lambda j: depth[j])]
        return order

    def _early_order(self, maker: Mapping[int, int], donated: Mapping[int, int]) -> list[Operation]:
        """Return a schedule by the operation that frees the most memory, else the one whose result is read first."""
        ops = self.operations
        left = Counter(n for op in ops for n in op.reads)
        before = [{maker[n] for n in op.reads if n in maker} for op in ops]
        after: dict[int, set[int]] = defaultdict(set)
        for i, needs in enumerate(before):
            for j in needs:
                after[j].add(i)
        deadline = [*range(len(ops))]
        for i in reversed(deadline):
            deadline[i] = min((deadline[j] for j in after[i]), default=i)
        waiting = [len(needs) for needs in before]
        ready = [i for i, n in enumerate(waiting) if not n]

        def grows(i: int) -> int:
            freed = (self.bytes.get(n, 0) for n in ops[i].reads if left[n] == 1 and n not in self.results)
            return sum(size for n, size in ops[i].writes.items() if n not in donated) - sum(freed)

        first = self._first(before) if self._habits.gathers_first and self._inside else frozenset[int]()
        order: list[Operation] = []
        while ready:
            now = [i for i in ready if i in first] or ready
            size, _, i = min((grows(i), (deadline[i], i), i) for i in now)
            if size > 0:
                i = min(now, key=lambda i: (deadline[i], i))
            ready.remove(i)
            order.append(ops[i])
            left.subtract(ops[i].reads)
            for j in after[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
        return order

    def _first(self, before: Sequence[set[int]]) -> frozenset[int]:
        """Return the gathers of weights, and operations that slice or cast weights before them."""
        first = set[int]()
        for i, op in enumerate(self.operations):
            if any(c.kind == "all-gather" for c in op.sent) and all(
                not before[j] and self.operations[j].name in _MOVES for j in before[i]
            ):
                first |= {i, *before[i]}
        return frozenset(first)

    def run(self, heap: Heap, donated: Mapping[int, int]) -> None:
        """Allocate and free the arrays in the order of the schedule; all of them are freed at the end.

        Args:
          heap: the memory.
          donated: for some results the argument, or the loop carry, whose memory they reuse after it was last read.
        """
        left = Counter(n for op in self.operations for n in op.reads)
        live: dict[int, Buffer] = {}
        held: dict[int, list[Buffer]] = defaultdict(list)  # operands of sums, by the result that has to be read
        for op in self._order(donated):
            left.subtract(op.reads)
            dying = [n for n in op.reads if not left[n] and n not in self.results and n in live]
            made: dict[int, Buffer] = {}
            for n, size in sorted(op.writes.items(), key=lambda item: -item[1]):
                if n in donated and not left[donated[n]] and (donated[n] not in op.reads or not _needs_own_buffer(op)):
                    continue
                in_place = op.name in _IN_PLACE and not (self._habits.asynchronous_sums and is_sum(op))
                stays = {stack for stack, _ in op.rows.values()} if self._habits.keeps_stacks else ()
                reused = next((d for d in dying if live[d].size == size and d not in stays), None) if in_place else None
                if reused is not None:
                    dying.remove(reused)
                    made[n] = live.pop(reused)
                else:
                    made[n] = heap.take(f"{op.scope}/{op.name}", size)
            heap.drop(heap.take(f"{op.scope}/masked rows of each group", op.scratch))
            if op.body:
                _run_body(op, heap, self._habits)
            heap.drop(*(buffer for n in op.reads for buffer in held.pop(n, ())))
            freed = [live.pop(n) for n in dying]
            if self._habits.asynchronous_sums and is_sum(op):
                held[0 if self._inside else next(iter(op.writes))] += freed
            else:
                heap.drop(*freed)
            for n, buffer in made.items():
                if left[n] or n in self.results:
                    live[n] = buffer
                else:
                    heap.drop(buffer)
        heap.drop(*live.values(), *itertools.chain.from_iterable(held.values()))

    def moved(self, arguments: Mapping[int, int]) -> float:
        """Return the bytes that the operations read and write.

        Args:
          arguments: bytes by number of the arrays that come from outside.
        """
        sizes = {**arguments, **self.bytes}
        total = 0.0
        for op, read in zip(self.operations, self._read, strict=True):
            if op.body:
                inner = {n: size for n, (*_, size) in (*op.rows.items(), *op.carried.items())}
                total += op.length * _Block(op.body, _results_of(op), self._habits).moved({**sizes, **inner})
            else:
                part = self._updated if op.name == "dynamic_update_slice" else {}
                total += sum(min(size, part.get(n, sizes.get(n, 0))) for n, size in read.items())
                total += sum(part.get(n, sizes.get(n, 0)) for n in op.writes)
        return total


def _needs_own_buffer(op: Operation) -> bool:
    """Return whether an operation cannot write to the memory of its operands."""
    return op.name in _STORED - _IN_PLACE


def _results_of(op: Operation) -> list[int]:
    """Return the numbers of the arrays that are live at the end of a loop's body or a branch."""
    return [*(end for _, end, _ in op.carried.values()), *op.stacked] if op.name == "loop" else [*op.results]


def _run_body(op: Operation, heap: Heap, habits: Habits) -> None:
    """Allocate the arrays of a branch or of one iteration; a row that nothing else reads is written into its stack."""
    block = _Block(op.body, _results_of(op), habits, inside=True)
    carries = {block.canonical(end): n for n, (_, end, _) in op.carried.items()}
    read = {n for inner in block.operations for n in inner.reads}
    rows = {block.canonical(n) for n in op.stacked} - read - carries.keys()
    block.operations = [
        dataclasses.replace(inner, writes={n: 0 if n in rows else size for n, size in inner.writes.items()})
        for inner in block.operations
    ]
    block.run(heap, carries)
