"""Rewrites of a partitioned program that XLA makes before it allocates memory, for TPUs where nothing else is said.

Each was seen in compiled programs (`experiments/planner_accuracy/MEMORY.md`):

* reduce-scatters become all-reduces in the cases of `jaxscale.plan.stand_ins`;
* casts to a smaller dtype are moved out of loops; a cast of rows becomes a cast of the whole stack;
* two arrays that are both summed over devices are added first, such as the two gradients of a tied embedding;
* a sum that a loop accumulates in its carry is reduced over devices after the loop; the carry is not sharded;
* on some chips, stacks of weights that need no cast are copied to another tiling;
* on GPUs, stacks of weights that are sharded along an inner dimension are transposed before a loop; casts stay in it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from jaxscale.hardware import Topology
from jaxscale.plan.program import ALIAS, ELEMENTWISE, Operation, Program
from jaxscale.plan.stand_ins import is_whole_sum

ALIASES = frozenset(
    {ALIAS, "reshape", "squeeze", "expand_dims", "name", "copy", "optimization_barrier", "pvary", "stop_gradient"}
)
"""Primitives whose result aliases their operand."""

SUMS = frozenset("reshard psum psum2 psum_invariant reduce_scatter".split())
"""Primitives that may sum over devices."""

_LARGE = 2**20
"""Bytes; smaller sums over devices are not combined."""

_CARRIED = 2**24
"""Bytes; smaller arrays are summed over devices in every iteration."""


def rewritten(program: Program, hardware: Topology, *, copied_stacks: bool) -> tuple[Operation, ...]:
    """Return a program's operations after the compiler's rewrites.

    Args:
      program: the program of one device.
      hardware: the devices.
      copied_stacks: whether stacks of weights in the compute dtype are copied to another tiling.
    """
    numbers = itertools.count(-1, -1)
    operations = _with_sums_combined(program.operations, numbers)
    operations = _with_whole_sums(_with_sums_after_loops(operations, numbers), hardware, numbers)
    if hardware.chip.platform == "gpu":
        operations = _with_transposed_stacks(operations, numbers)
    else:
        operations = _with_hoisted_casts(operations, numbers, program.narrow if copied_stacks else frozenset())
    return _with_sums_combined(operations, numbers)


def is_sum(op: Operation) -> bool:
    """Whether an operation sums over devices."""
    return op.name in SUMS and any(c.kind in ("all-reduce", "reduce-scatter") for c in op.sent)


def with_fused_outputs(operations: Sequence[Operation], results: set[int]) -> list[Operation]:
    """Fuse elementwise operations into the product that only they read, so that both use one buffer.

    Args:
      operations: the operations in order, aliases resolved.
      results: numbers of the arrays that are live at the end.
    """
    users: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(operations):
        for n in op.reads:
            users[n].append(i)
    fused: list[Operation | None] = [*operations]
    for i, op in enumerate(operations):
        at, product = i, op
        while product.name == "dot_general" and len(product.writes) == 1:
            ((n, size),) = product.writes.items()
            user = fused[users[n][0]] if len(users[n]) == 1 and n not in results else None
            if user is None or user.name not in ELEMENTWISE or len(user.writes) != 1:
                break
            ((_, made),) = user.writes.items()
            if not size // 2 <= made <= size:
                break
            fused[at], at = None, users[n][0]
            reads = dict.fromkeys((*product.reads, *(m for m in user.reads if m != n)))
            product = dataclasses.replace(product, reads=tuple(reads), writes=user.writes)
            fused[at] = product
    return [op for op in fused if op is not None]


class _Names:
    """Maker and number of readers of each array, aliases resolved."""

    def __init__(self, operations: Sequence[Operation]):
        self._same = {n: op.reads[0] for op in operations if op.name in ALIASES and op.reads for n in op.writes}
        rest = [(i, op) for i, op in enumerate(operations) if op.name not in ALIASES]
        self.maker = {n: i for i, op in rest for n in op.writes}
        self.uses = Counter(self(n) for _, op in rest for n in {*op.reads})

    def __call__(self, n: int) -> int:
        while n in self._same:
            n = self._same[n]
        return n


def _with_whole_sums(
    operations: Sequence[Operation], hardware: Topology, numbers: Iterator[int], *, inside: bool = False
) -> tuple[Operation, ...]:
    """Replace reduce-scatters by all-reduces and slices of their results, where the compiler does.

    In compiled programs such a sum reused its operand's memory inside loops, and did not outside of them.
    """
    result: list[Operation] = []
    for op in operations:
        if op.body:
            op = dataclasses.replace(op, body=_with_whole_sums(op.body, hardware, numbers, inside=True))
        payload = max((c.payload for c in op.sent if is_whole_sum(c, hardware)), default=0)
        if payload and len(op.writes) == 1:
            ((made, size),) = op.writes.items()
            whole = next(numbers)
            name = "psum" if inside else op.name
            result.append(dataclasses.replace(op, name=name, writes={whole: max(size, payload)}))
            op = Operation("slice", (whole,), {made: size}, op.scope)
        result.append(op)
    return tuple(result)


def _with_hoisted_casts(
    operations: Sequence[Operation], numbers: Iterator[int], copied: Iterable[int]
) -> tuple[Operation, ...]:
    """Move casts to a smaller dtype out of loops: of rows (as a cast of the whole stack) and of loop invariants.

    Args:
      operations: operations of a program or a loop's body.
      numbers: numbers for new arrays.
      copied: arguments that are copied to another tiling if a loop multiplies their rows without a cast.
    """
    result: list[Operation] = []
    name = _Names(operations)
    casts: dict[tuple[int, int], int] = {}

    def cast(kind: str, stack: int, size: int, scope: str) -> int:
        key = name(stack), size
        if key not in casts:
            casts[key] = next(numbers)
            result.append(Operation(kind, (stack,), {casts[key]: size}, scope))
        return casts[key]

    for op in operations:
        if op.name == "loop":
            body = _with_hoisted_casts(op.body, numbers, {name(n) for n in op.reads} & {*copied})
            inside = _Names(body)
            users: dict[int, list[Operation]] = defaultdict(list)
            for inner in body:
                if inner.name not in ALIASES:
                    for n in {inside(n) for n in inner.reads}:
                        users[n].append(inner)
            rows, reads, gone = dict(op.rows), [*op.reads], set[int]()
            for row, (stack, size) in op.rows.items():
                of = users[inside(row)]
                narrow = [u for u in of if u.name == "convert_element_type" and sum(u.writes.values()) < size]
                if narrow and len(narrow) == len(of):
                    for u in narrow:
                        ((made, size),) = u.writes.items()
                        whole = cast(u.name, stack, size * op.length, "casts of weights")
                        rows[made] = whole, size
                        reads.append(whole)
                        gone.add(id(u))
                elif name(stack) in copied and size > _LARGE and not narrow:
                    reads.append(cast("gather", stack, size * op.length, "copies of weights"))
            constant = {*op.reads} - {before for before, _, _ in op.carried.values()} - {s for s, _ in op.rows.values()}
            for u in body:
                if u.name == "convert_element_type" and {*u.reads} <= constant and id(u) not in gone:
                    result.append(u)
                    gone.add(id(u))
                    reads += u.writes
            remaining = tuple(inner for inner in body if id(inner) not in gone)
            op = dataclasses.replace(op, body=remaining, rows=rows, reads=tuple(reads))
        result.append(op)
    return tuple(result)


def _with_transposed_stacks(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """Copy stacks of weights before loops that gather their rows along another dimension than the first.

    XLA for GPUs gathers along the dimension that is outermost in memory, so it transposes such stacks first. It casts
    rows in the loop.
    """
    result: list[Operation] = []
    name = _Names(operations)
    copies: dict[int, int] = {}
    for op in operations:
        if op.name == "loop":
            op = dataclasses.replace(op, body=_with_transposed_stacks(op.body, numbers))
            inside = _Names(op.body)
            same = {n: inside(u.reads[0]) for u in op.body if u.name == "convert_element_type" for n in u.writes}
            gathered = {inside(n) for u in op.body if u.inner for n in u.reads}
            gathered |= {same[n] for n in gathered if n in same}
            rows, reads = dict(op.rows), [*op.reads]
            for row, (stack, size) in op.rows.items():
                if inside(row) in gathered and size * op.length > _LARGE:
                    whole = name(stack)
                    if whole not in copies:
                        copies[whole] = next(numbers)
                        made = {copies[whole]: size * op.length}
                        result.append(Operation("gather", (stack,), made, "transposed copies of weights"))
                    rows[row] = copies[whole], size
                    reads.append(copies[whole])
            op = dataclasses.replace(op, rows=rows, reads=tuple(reads))
        result.append(op)
    return tuple(result)


def _with_sums_combined(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """Add two arrays before they are summed over devices, such as the two gradients of a tied embedding."""
    operations = [
        dataclasses.replace(op, body=_with_sums_combined(op.body, numbers)) if op.name == "loop" else op
        for op in operations
    ]
    name = _Names(operations)
    maker = name.maker
    replaced: dict[int, list[Operation]] = {}

    def unsummed(n: int) -> tuple[int, list[int]]:
        """Return the array before its sums over devices, and the indices of the operations that sum it."""
        sums: list[int] = []
        n = name(n)
        while n in maker and operations[maker[n]].name in SUMS and name.uses[n] == 1:
            if len(operations[maker[n]].reads) != 1:
                break
            sums.append(maker[n])
            n = name(operations[maker[n]].reads[0])
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
            sent = operations[first[-1]].sent
            replaced |= {j: [] for j in (*first, *second)}
            replaced[i] = [
                Operation(op.name, (a, b), {number: whole}, op.scope),
                Operation("reshard", (number,), op.writes, op.scope, sent),
            ]
    return tuple(o for i, op in enumerate(operations) for o in replaced.get(i, [op]))


def _with_sums_after_loops(operations: Sequence[Operation], numbers: Iterator[int]) -> tuple[Operation, ...]:
    """Move the reduce-scatter of a sum that a loop accumulates behind the loop, which then carries the whole array.

    If the partitioner scatters the gradient of one table, the program's own reduce-scatter of a table of the same size
    stays in compiled loops.
    """
    result: list[Operation] = []
    for op in operations:
        body = list(op.body)
        name = _Names(body)
        moved: dict[int, tuple[int, int, int]] = {}  # by carry: its sum, the reduce-scatter, the whole array
        for before, (_, end, _) in op.carried.items() if op.name == "loop" else ():
            add = name.maker.get(name(end))
            if add is None or body[add].name not in ("add", "add_any") or name.uses[before] != 1:
                continue
            others = [name(n) for n in body[add].reads if name(n) != before]
            scatter = name.maker.get(others[0]) if len(others) == 1 and name.uses[others[0]] == 1 else None
            if scatter is None or [c.kind for c in body[scatter].sent] != ["reduce-scatter"]:
                continue
            whole = name(body[scatter].reads[0])
            made = body[name.maker[whole]] if whole in name.maker else None
            if made is not None and made.name not in SUMS and made.writes[whole] >= _CARRIED:
                moved[before] = add, scatter, whole
        sizes = {whole: body[name.maker[whole]].writes[whole] for _, _, whole in moved.values()}
        scattered = {sizes[whole] for _, scatter, whole in moved.values() if body[scatter].name == "reshard"}
        moved = {n: m for n, m in moved.items() if body[m[1]].name == "reshard" or sizes[m[2]] not in scattered}
        carried, writes, after = dict(op.carried), dict(op.writes), list[Operation]()
        for before, (add, scatter, whole) in moved.items():
            initial, end, small = carried[before]
            carried[before] = initial, end, sizes[whole]
            body[add] = dataclasses.replace(body[add], reads=(before, whole), writes={end: sizes[whole]})
            del writes[end]
            total = next(numbers)
            writes[total] = sizes[whole]
            after.append(dataclasses.replace(body[scatter], reads=(total,), writes={end: small}))
        if moved:
            gone = {scatter for _, scatter, _ in moved.values()}
            body = [inner for i, inner in enumerate(body) if i not in gone]
            op = dataclasses.replace(op, body=tuple(body), carried=carried, writes=writes)
        result += [op, *after]
    return tuple(result)
