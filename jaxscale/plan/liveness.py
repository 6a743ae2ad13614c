"""Memory of a program by liveness: an array is live from its operation to the last operation that reads it.

This estimates what XLA for TPUs allocates, without compiling, from a partitioned program (`jaxscale.plan.partition`).
Elementwise operations are fused into the operations that read them and take no memory; matrix products, reductions,
collectives, kernels and loops do. An operation runs as soon as it frees memory, otherwise as late as possible. Casts of
the rows of a stack are hoisted out of the loop and cast the whole stack, the sum of two all-reduced arrays is
all-reduced once, and results reuse the memory of donated arguments. `experiments/planner_accuracy/MEMORY.md` compares
with compiled programs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxscale.hardware import Topology
from jaxscale.plan.heap import Buffer, Heap
from jaxscale.plan.program import ALIAS, Operation, Program
from jaxscale.plan.stand_ins import is_whole_sum

_ALIASES = frozenset({ALIAS, "reshape", "squeeze", "expand_dims", "name", "copy", "optimization_barrier", "pvary"})
"""Primitives whose result is their operand."""

_SUMS = frozenset("reshard psum psum2 psum_invariant reduce_scatter".split())

_UNFUSED = _SUMS | frozenset(
    "pallas_call loop branch gather scatter scatter-add sort top_k all_gather all_gather_invariant all_to_all "
    "ragged_all_to_all ppermute cumsum device_put ragged_dot_general eigh qr argmax".split()
)
"""Primitives that read their operands from memory and write their results to memory."""

_STORED = _UNFUSED | frozenset("dot_general conv_general_dilated reduce_sum reduce_max reduce_min".split())
"""Primitives that write their results to memory; elementwise operations may be fused into their operands."""

_IN_PLACE = frozenset("psum psum2 psum_invariant dynamic_update_slice scatter-add scatter loop branch".split())
"""Primitives that may reuse the memory of an operand that is not read again."""

_LARGE = 2**20
"""Smaller sums over devices are not combined, in bytes."""


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
    """The memory of a program.

    Args:
      program: the program of one device.
      hardware: the devices; `jaxscale.plan.stand_ins` says which collectives their compiler replaces.
    """
    numbers = itertools.count(-1, -1)
    operations = _with_sums_combined(
        _with_hoisted_casts(_with_whole_sums(program.operations, hardware, numbers), numbers), numbers
    )
    block = _Block(operations, program.results)
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
    """

    def __init__(self, operations: Sequence[Operation], results: Iterable[int]):
        self._canonical: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        every: list[Operation] = []
        for op in operations:
            if op.name in _ALIASES and op.reads:
                self._canonical |= {n: op.reads[0] for n in op.writes if n != op.reads[0]}
            elif op.writes or op.body:
                every.append(dataclasses.replace(op, reads=tuple({self.canonical(n) for n in op.reads})))
                self.bytes |= op.writes
        self.results = {self.canonical(n) for n in results}
        self._by = {n: op for op in every for n in op.writes}
        users: dict[int, list[Operation]] = defaultdict(list)
        for op in every:
            for n in op.reads:
                users[n].append(op)
        stored = {id(op) for op in every if self._stored(op, [u for n in op.writes for u in users[n]])}
        self.operations: list[Operation] = []
        sources: dict[int, frozenset[int]] = {}  # of fused arrays, the arrays in memory that they are computed from
        for op in every:
            reads = frozenset[int]().union(*(sources.get(n, {n}) for n in op.reads))
            if id(op) in stored:
                self.operations.append(dataclasses.replace(op, reads=tuple(reads - {*op.writes})))
            else:
                sources |= dict.fromkeys(op.writes, reads)

    def canonical(self, n: int) -> int:
        """The number that stands for all aliases of an array."""
        while n in self._canonical:
            n = self._canonical[n]
        return n

    def made_by(self, n: int) -> str:
        """The name of the operation that makes an array."""
        return self._by[n].name if n in self._by else ""

    def _stored(self, op: Operation, users: Sequence[Operation]) -> bool:
        """Whether an operation's results are in memory, because it or one of its users is not fused."""
        if self.results & op.writes.keys() or (users and op.name in _STORED):
            return True
        if not users or not op.reads:
            return False
        unfused = _UNFUSED - {"loop"} if op.name == "broadcast_in_dim" else _UNFUSED
        return any(u.name in unfused for u in users)

    def _order(self, donated: Mapping[int, int]) -> list[Operation]:
        """A schedule: the operation that frees the most memory, otherwise the one whose result is read first."""
        ops = self.operations
        maker = {n: i for i, op in enumerate(ops) for n in op.writes}
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

        order: list[Operation] = []
        while ready:
            size, _, i = min((grows(i), (deadline[i], i), i) for i in ready)
            if size > 0:
                i = min(ready, key=lambda i: (deadline[i], i))
            ready.remove(i)
            order.append(ops[i])
            left.subtract(ops[i].reads)
            for j in after[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
        return order

    def run(self, heap: Heap, donated: Mapping[int, int]) -> None:
        """Allocates and frees the arrays in the order of the schedule; all of them are freed at the end.

        Args:
          heap: the memory.
          donated: for some results the argument, or the loop carry, whose memory they reuse after it was last read.
        """
        left = Counter(n for op in self.operations for n in op.reads)
        live: dict[int, Buffer] = {}
        for op in self._order(donated):
            left.subtract(op.reads)
            dying = [n for n in op.reads if not left[n] and n not in self.results and n in live]
            made: dict[int, Buffer] = {}
            for n, size in sorted(op.writes.items(), key=lambda item: -item[1]):
                if n in donated and not left[donated[n]] and (donated[n] not in op.reads or not _needs_own_buffer(op)):
                    continue
                reused = next((d for d in dying if live[d].size == size), None) if op.name in _IN_PLACE else None
                if reused is not None:
                    dying.remove(reused)
                    made[n] = live.pop(reused)
                else:
                    made[n] = heap.take(f"{op.scope}/{op.name}", size)
            if op.body:
                _run_body(op, heap)
            heap.drop(*(live.pop(n) for n in dying))
            for n, buffer in made.items():
                if left[n] or n in self.results:
                    live[n] = buffer
                else:
                    heap.drop(buffer)
        heap.drop(*live.values())

    def moved(self, arguments: Mapping[int, int]) -> float:
        """Bytes that the operations read and write."""
        sizes = {**arguments, **self.bytes}
        total = 0.0
        for op in self.operations:
            if op.body:
                inner = {n: size for n, (*_, size) in (*op.rows.items(), *op.carried.items())}
                total += op.length * _Block(op.body, _results_of(op)).moved({**sizes, **inner})
            else:
                total += sum(sizes.get(n, 0) for n in (*op.reads, *op.writes))
        return total


def _needs_own_buffer(op: Operation) -> bool:
    """Whether an operation cannot write to the memory of its operands."""
    return op.name in _STORED - _IN_PLACE


def _results_of(op: Operation) -> list[int]:
    """The numbers of the arrays that are live at the end of a loop's body or a branch."""
    return [*(end for _, end, _ in op.carried.values()), *op.stacked] if op.name == "loop" else [*op.results]


def _run_body(op: Operation, heap: Heap) -> None:
    """Allocates the arrays of a branch or of one iteration. A row that nothing else reads is written into its stack."""
    block = _Block(op.body, _results_of(op))
    carries = {block.canonical(end): n for n, (_, end, _) in op.carried.items()}
    read = {n for inner in block.operations for n in inner.reads}
    rows = {block.canonical(n) for n in op.stacked} - read - carries.keys()
    block.operations = [
        dataclasses.replace(inner, writes={n: 0 if n in rows else size for n, size in inner.writes.items()})
        for inner in block.operations
    ]
    block.run(heap, carries)


def _with_whole_sums(
    operations: Sequence[Operation], hardware: Topology, numbers: Iterator[int]
) -> tuple[Operation, ...]:
    """Replaces reduce-scatters by all-reduces with a slice of the result, where the compiler does."""
    result: list[Operation] = []
    for op in operations:
        if op.body:
            op = dataclasses.replace(op, body=_with_whole_sums(op.body, hardware, numbers))
        payload = max((c.payload for c in op.sent if is_whole_sum(c, hardware)), default=0)
        if payload and len(op.writes) == 1:
            ((made, size),) = op.writes.items()
            whole = next(numbers)
            result.append(dataclasses.replace(op, writes={whole: max(size, payload)}))
            op = Operation("slice", (whole,), {made: size}, op.scope)
        result.append(op)
    return tuple(result)


def _with_hoisted_casts(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """Replaces casts of rows to a smaller dtype by a cast of the whole stack before the loop."""
    result: list[Operation] = []
    same: dict[int, int] = {}
    casts: dict[tuple[int, int], int] = {}
    for op in operations:
        if op.name in _ALIASES and op.reads:
            same |= {n: same.get(op.reads[0], op.reads[0]) for n in op.writes}
        if op.name == "loop":
            users: dict[int, list[Operation]] = defaultdict(list)
            for inner in op.body:
                for n in {*inner.reads}:
                    users[n].append(inner)
            rows, reads, gone = dict(op.rows), [*op.reads], set[int]()
            for row, (stack, size) in op.rows.items():
                narrow = [u for u in users[row] if u.name == "convert_element_type" and sum(u.writes.values()) < size]
                if not narrow or len(narrow) < len(users[row]):
                    continue
                for cast in narrow:
                    ((made, size),) = cast.writes.items()
                    key = same.get(stack, stack), size * op.length
                    if key not in casts:
                        casts[key] = next(numbers)
                        result.append(Operation(cast.name, (stack,), {casts[key]: key[1]}, "casts of weights"))
                    rows[made] = casts[key], size
                    reads.append(casts[key])
                    gone.add(id(cast))
            body = _with_hoisted_casts([inner for inner in op.body if id(inner) not in gone], numbers)
            op = dataclasses.replace(op, body=body, rows=rows, reads=tuple(reads))
        result.append(op)
    return tuple(result)


def _with_sums_combined(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """Adds arrays before they are summed over devices and not after, as for the two gradients of a tied table."""
    same = {n: op.reads[0] for op in operations if op.name in _ALIASES and op.reads for n in op.writes}

    def named(n: int) -> int:
        while n in same:
            n = same[n]
        return n

    maker = {n: i for i, op in enumerate(operations) for n in op.writes if op.name not in _ALIASES}
    uses = Counter(named(n) for op in operations if op.name not in _ALIASES for n in {*op.reads})
    replaced: dict[int, list[Operation]] = {}

    def unsummed(n: int) -> tuple[int, list[int]]:
        """The array before its sums over devices, and the indices of the operations that sum it."""
        sums: list[int] = []
        n = named(n)
        while (
            n in maker and operations[maker[n]].name in _SUMS and uses[n] == 1 and len(operations[maker[n]].reads) == 1
        ):
            sums.append(maker[n])
            n = named(operations[maker[n]].reads[0])
        return n, sums

    for i, op in enumerate(operations):
        if op.name not in ("add", "add_any") or len(op.reads) != 2 or len(op.writes) != 1:
            continue
        (a, first), (b, second) = map(unsummed, op.reads)
        if not first or not second or a not in maker or b not in maker:
            continue
        ((_, size),) = op.writes.items()
        whole = operations[maker[a]].writes[a]
        if whole == operations[maker[b]].writes[b] and whole >= size and whole > _LARGE:
            number = next(numbers)
            replaced |= {j: [] for j in (*first, *second)}
            replaced[i] = [
                Operation(op.name, (a, b), {number: whole}, op.scope),
                Operation("reshard", (number,), op.writes, op.scope),
            ]
    return tuple(o for i, op in enumerate(operations) for o in replaced.get(i, [op]))
