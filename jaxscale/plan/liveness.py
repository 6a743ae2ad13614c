"""How much memory a program takes: its arrays from the operation that makes them to the last that reads them.

An estimate of what XLA for TPUs allocates, from a partitioned program (`jaxscale.plan.partition`) and not from a
compiled one. Elementwise operations are computed where they are read and take no memory; products, reductions,
collectives, kernels and loops do. Operations run when they free memory, else as late as they can. A cast of one row of
a stack is made of the whole stack before the loop, a sum of two sums over devices is one sum, and results take the
memory of donated arguments. `experiments/planner_accuracy/MEMORY.md` compares with compiled programs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxscale.hardware import Topology
from jaxscale.plan.heap import Buffer, Heap
from jaxscale.plan.program import ALIAS, Operation, Program
from jaxscale.plan.stand_ins import whole_sum

_SAME = frozenset({ALIAS, "reshape", "squeeze", "expand_dims", "name", "copy", "optimization_barrier", "pvary"})
"""Their result is their operand."""

_SUMS = frozenset("reshard psum psum2 psum_invariant reduce_scatter".split())

_WHOLE = _SUMS | frozenset(
    "pallas_call loop branch gather scatter scatter-add sort top_k all_gather all_gather_invariant all_to_all "
    "ragged_all_to_all ppermute cumsum device_put ragged_dot_general eigh qr argmax".split()
)
"""Take their operands from memory and leave their results there."""

_STORED = _WHOLE | frozenset("dot_general conv_general_dilated reduce_sum reduce_max reduce_min".split())
"""Leave their results in memory; what they take may be computed on the way."""

_IN_PLACE = frozenset("psum psum2 psum_invariant dynamic_update_slice scatter-add scatter loop branch".split())
"""May write where they read for the last time."""

_LARGE = 2**20
"""Bytes from which on sums of sums are looked for."""


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory of a program on one device.

    Args:
      arguments: their bytes.
      temporaries: bytes of all others at the fullest moment, with gaps between them.
      at_peak: arrays that are there then, by module and operation.
      moved: bytes that operations read and write, all iterations together.
    """

    arguments: int
    temporaries: int
    at_peak: tuple[Buffer, ...]
    moved: float


def allocation(program: Program, there: Topology) -> Allocation:
    """The memory of a program.

    Args:
      program: of one device.
      there: the hardware; its compiler's sums over devices are those of `jaxscale.plan.stand_ins`.
    """
    numbers = itertools.count(-1, -1)
    operations = _summed_once(_hoisted(_summed_whole(program.operations, there, numbers), numbers), numbers)
    block = _Block(operations, program.results)
    into: dict[int, int] = {}
    heap = Heap()
    for result, (argument, size) in zip(program.results, program.arguments.items(), strict=False):
        number = block.same(result)
        if block.bytes.get(number) == size:
            into[number] = argument
            if block.made_by(number) == "reshard":  # gathered into the place of what the step still reads: a copy
                heap.take("copies of parameters", size)
    block.run(heap, into)
    return Allocation(sum(program.arguments.values()), heap.peak, heap.at_peak, block.moved(program.arguments))


class _Block:
    """Operations of a program, a loop or a branch; those that are computed where they are read are not among them.

    Args:
      operations: all of them.
      results: numbers of what is there at the end.
    """

    def __init__(self, operations: Sequence[Operation], results: Iterable[int]):
        self._same: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        every: list[Operation] = []
        for op in operations:
            if op.name in _SAME and op.reads:
                self._same |= {n: op.reads[0] for n in op.writes if n != op.reads[0]}
            elif op.writes or op.body:
                every.append(dataclasses.replace(op, reads=tuple({self.same(n) for n in op.reads})))
                self.bytes |= op.writes
        self.results = {self.same(n) for n in results}
        self._by = {n: op for op in every for n in op.writes}
        users: dict[int, list[Operation]] = defaultdict(list)
        for op in every:
            for n in op.reads:
                users[n].append(op)
        stored = {id(op) for op in every if self._stored(op, [u for n in op.writes for u in users[n]])}
        sources: dict[int, frozenset[int]] = {}

        def stored_sources(n: int) -> frozenset[int]:
            """The arrays in memory that one is computed from, itself if it is there."""
            op = self._by.get(n)
            if op is None or id(op) in stored:
                return frozenset({n})
            if n not in sources:
                sources[n] = frozenset().union(*map(stored_sources, op.reads))
            return sources[n]

        self.operations = [
            dataclasses.replace(op, reads=tuple(frozenset().union(*map(stored_sources, op.reads)) - {*op.writes}))
            for op in every
            if id(op) in stored
        ]

    def same(self, n: int) -> int:
        """The number of an array that may go by several."""
        while n in self._same:
            n = self._same[n]
        return n

    def made_by(self, n: int) -> str:
        """The name of the operation that makes an array."""
        return self._by[n].name if n in self._by else ""

    def _stored(self, op: Operation, users: Sequence[Operation]) -> bool:
        if self.results & op.writes.keys() or (users and op.name in _STORED):
            return True
        if not users or not op.reads:
            return False
        taken = _WHOLE - {"loop"} if op.name == "broadcast_in_dim" else _WHOLE
        return any(u.name in taken for u in users)

    def _order(self, into: Mapping[int, int]) -> list[Operation]:
        """What frees memory first, else what is needed first."""
        ops = self.operations
        maker = {n: i for i, op in enumerate(ops) for n in op.writes}
        left = Counter(n for op in ops for n in op.reads)
        before = [{maker[n] for n in op.reads if n in maker} for op in ops]
        after: dict[int, set[int]] = defaultdict(set)
        for i, needs in enumerate(before):
            for j in needs:
                after[j].add(i)
        late = [*range(len(ops))]
        for i in reversed(late):
            late[i] = min((late[j] for j in after[i]), default=i)
        waiting = [len(needs) for needs in before]
        ready = [i for i, n in enumerate(waiting) if not n]

        def grows(i: int) -> int:
            freed = (self.bytes.get(n, 0) for n in ops[i].reads if left[n] == 1 and n not in self.results)
            return sum(size for n, size in ops[i].writes.items() if n not in into) - sum(freed)

        order: list[Operation] = []
        while ready:
            size, _, i = min((grows(i), (late[i], i), i) for i in ready)
            if size > 0:
                i = min(ready, key=lambda i: (late[i], i))
            ready.remove(i)
            order.append(ops[i])
            left.subtract(ops[i].reads)
            for j in after[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
        return order

    def run(self, heap: Heap, into: Mapping[int, int]) -> None:
        """Takes and gives back memory in the order of the operations, that of results at the end.

        Args:
          heap: the memory.
          into: of some results, the arrays from outside whose memory they take once nothing reads these.
        """
        left = Counter(n for op in self.operations for n in op.reads)
        live: dict[int, Buffer] = {}
        for op in self._order(into):
            left.subtract(op.reads)
            dying = [n for n in op.reads if not left[n] and n not in self.results and n in live]
            made: dict[int, Buffer] = {}
            for n, size in sorted(op.writes.items(), key=lambda item: -item[1]):
                if n in into and not left[into[n]] and (into[n] not in op.reads or not _separate(op)):
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
                inner = {n: size for n, (_, size) in op.rows.items()} | {
                    n: size for n, (*_, size) in op.carried.items()
                }
                total += op.length * _Block(op.body, _ends(op)).moved({**sizes, **inner})
            else:
                total += sum(sizes.get(n, 0) for n in (*op.reads, *op.writes))
        return total


def _separate(op: Operation) -> bool:
    """Whether an operation cannot write where it reads."""
    return op.name in _STORED - _IN_PLACE


def _ends(op: Operation) -> list[int]:
    """What is there at the end of a loop's body or a branch."""
    return [*(end for _, end, _ in op.carried.values()), *op.stacked] if op.name == "loop" else [*op.results]


def _run_body(op: Operation, heap: Heap) -> None:
    """One iteration of a loop, or a branch. A row of a stack that nothing else reads is written right into it."""
    block = _Block(op.body, _ends(op))
    carries = {block.same(end): n for n, (_, end, _) in op.carried.items()}
    read = {n for inner in block.operations for n in inner.reads}
    rows = {block.same(n) for n in op.stacked} - read - carries.keys()
    block.operations = [
        dataclasses.replace(inner, writes={n: 0 if n in rows else size for n, size in inner.writes.items()})
        for inner in block.operations
    ]
    block.run(heap, carries)


def _summed_whole(operations: Sequence[Operation], there: Topology, numbers: Iterator[int]) -> tuple[Operation, ...]:
    """With whole sums for the reduce-scatters that a compiler makes all-reduces of."""
    result: list[Operation] = []
    for op in operations:
        if op.body:
            op = dataclasses.replace(op, body=_summed_whole(op.body, there, numbers))
        payload = max((c.payload for c in op.sent if whole_sum(c, there)), default=0)
        if payload and len(op.writes) == 1:
            ((made, size),) = op.writes.items()
            whole = next(numbers)
            result.append(dataclasses.replace(op, writes={whole: max(size, payload)}))
            op = Operation("slice", (whole,), {made: size}, op.scope)
        result.append(op)
    return tuple(result)


def _hoisted(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """With casts to fewer bits of all of a stack, before the loops that cast each of its rows."""
    result: list[Operation] = []
    same: dict[int, int] = {}
    casts: dict[tuple[int, int], int] = {}
    for op in operations:
        if op.name in _SAME and op.reads:
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
            body = _hoisted([inner for inner in op.body if id(inner) not in gone], numbers)
            op = dataclasses.replace(op, body=body, rows=rows, reads=tuple(reads))
        result.append(op)
    return tuple(result)


def _summed_once(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """With one sum over devices for a sum of two such sums, as of the two parts of a tied table's gradient."""
    same = {n: op.reads[0] for op in operations if op.name in _SAME and op.reads for n in op.writes}

    def named(n: int) -> int:
        while n in same:
            n = same[n]
        return n

    maker = {n: i for i, op in enumerate(operations) for n in op.writes if op.name not in _SAME}
    uses = Counter(named(n) for op in operations if op.name not in _SAME for n in {*op.reads})
    replaced: dict[int, list[Operation]] = {}

    def unsummed(n: int) -> tuple[int, list[int]]:
        """What devices hold before the sums that end in an array, and these sums."""
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
