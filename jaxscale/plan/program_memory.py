"""Buffers of a compiled program at peak memory, read from its scheduled HLO text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import jax

from jaxscale.layout import Layout, as_used
from jaxscale.layout.rules import Kind
from jaxscale.layout.tensors import Tree
from jaxscale.plan.collectives import Program, type_of
from jaxscale.plan.scopes import scopes_of, stage_of
from jaxscale.plan.traffic import module_of, short_source

GROUPS = ("parameters", "optimizer", "other arguments", "gradients", "activations", "weight copies", "temporaries")
"""Groups of buffers; `temporaries` are cotangents, recomputed activations and everything else."""


@dataclasses.dataclass(frozen=True)
class ProgramBuffer:
    """An array in device memory.

    Args:
      group: one of `GROUPS`.
      name: an argument's path, or the module and operation that make the array.
      shape: dtype and shape in HLO's notation, "bf16[2,64,128]".
      bytes: bytes per device, with the padding of its layout.
      source: "file:line" of the operation; "" for arguments, or if the compiler does not record it.
    """

    group: str
    name: str
    shape: str
    bytes: int
    source: str = ""


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Peak memory of a compiled program, per device.

    Args:
      buffers: the buffers at the peak, largest first.
      moment: JAX's name of the operation at which memory peaks.
      total: bytes that the compiler allocates: arguments, outputs not aliased to them, temporaries.
      host: bytes of arguments, outputs and temporaries in host memory.
    """

    buffers: tuple[ProgramBuffer, ...]
    moment: str
    total: int
    host: int = 0

    @property
    def groups(self) -> dict[str, int]:
        """Bytes by group; "between buffers" is the rest of `total`: gaps, and buffers that the walk does not find."""
        sizes = dict.fromkeys(GROUPS, 0)
        for b in self.buffers:
            sizes[b.group] += b.bytes
        return {**{g: n for g, n in sizes.items() if n}, "between buffers": self.total - sum(sizes.values())}


def program_memory(compiled: Any, weights: Mapping[tuple[int, ...], str] | None = None) -> ProgramMemory:
    """Find the buffers of a compiled program at peak memory.

    The instructions are walked in schedule order. Each array lives from the instruction that makes it to the last one
    that reads it. In-place updates, carried values of loops and donated arguments take no memory of their own. The
    result is a reconstruction, not the compiler's buffer assignment; `ProgramMemory.total` is the compiler's.

    Args:
      compiled: a `jax.stages.Compiled`.
      weights: `weight_shapes` of the parameters, which distinguish their gradients and casts from activations.
    """
    m = compiled.memory_analysis()
    walk = _Walk(Program(compiled.as_text(), {}), weights or {})
    buffers, moment = walk.entry()
    total = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes + m.host_output_size_in_bytes
    largest = tuple(sorted(buffers, key=lambda b: -b.bytes))
    return ProgramMemory(largest, moment, total, host - m.host_alias_size_in_bytes)


def dims_key(shape: Iterable[int]) -> tuple[int, ...]:
    """Return a shape's sizes in sorted order without 1s, because compilers transpose arrays and add dimensions."""
    return tuple(sorted(n for n in shape if n != 1))


@dataclasses.dataclass(eq=False)
class _Array:
    """An allocation, its origin, and whether its bytes are counted elsewhere."""

    type: str
    bytes: int
    name: str
    source: str
    group: str = ""
    placed: bool = False  # in the memory of another array


_Value = Any
"""An `_Array`, `None` for a value outside device memory, or a list of values."""

_ALIASES = ("bitcast", "optimization-barrier", "get-tuple-element", "tuple", "while", "copy-done", "async-done",
            "async-update", "all-gather-done", "all-reduce-done", "collective-permute-done", "dynamic-update-slice",
            "send-done", "add-dependency")  # fmt: skip
_MOVING = ("bitcast", "reshape", "copy", "transpose", "convert")
_IN_PLACE = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "select", "negate", "exponential", "tanh")


class _Walk:
    """Walks computations in schedule order."""

    def __init__(self, program: Program, weights: Mapping[tuple[int, ...], str]):
        self.program, self.weights = program, weights

    def entry(self) -> tuple[list[ProgramBuffer], str]:
        """Return the buffers and the operation at the program's peak memory, arguments included."""
        entry = self.program.entry
        inputs: dict[int, _Value] = {}
        for name in self.program.order[entry]:
            text = self.program.made[name]
            if number := re.search(r" parameter\((\d+)\)", text):
                inputs[int(number[1])] = self._new(text, argument=True)
        aliased = {int(o): inputs[int(p)] for o, p in _IO_ALIAS.findall(self.program.header)}
        arguments = [a for v in inputs.values() for a in _leaves(v)]
        root = _leaves_or_none(self._type(self.program.made[self.program.roots[entry]]))
        target = [aliased.get(i) for i in range(root)]
        live, moment = self._computation(entry, inputs, target)
        return [self._buffer(a) for a in (*arguments, *live) if a.bytes], moment

    def _computation(self, name: str, inputs: Mapping[int, _Value], target: list[_Value]) -> tuple[list[_Array], str]:
        """Return a computation's own allocations at its peak memory, and the operation at the peak.

        Args:
          name: the computation.
          inputs: values of its parameters, by their numbers.
          target: buffers that its outputs are written to.
        """
        order, values = self.program.order.get(name, []), dict[str, _Value]()
        made: dict[int, int] = {}  # by array, the index of the instruction that makes it
        last: dict[int, int] = {}
        arrays: list[_Array] = []
        reads: list[list[_Array]] = []
        for i, op in enumerate(order):
            text = self.program.made[op]
            opcode, operands = _opcode(text), [values.get(o) for o in _operands(text)]
            value, fresh = self._value(text, opcode, operands, inputs)
            values[op] = value
            for a in fresh:
                made[id(a)] = i
                arrays.append(a)
            used = [] if opcode in ("tuple", "get-tuple-element", "bitcast") else list(_leaves(operands))
            reads.append(used)
            for a in used:
                last[id(a)] = i
        root = values.get(self.program.roots.get(name, ""))
        flat = root if isinstance(root, list) else [root]
        for a in _leaves(root):
            last[id(a)] = len(order)
        for mine, place in zip(flat, target or [None] * len(flat), strict=False):
            if isinstance(mine, _Array) and isinstance(place, _Array) and id(mine) in made and mine is not place:
                mine.placed = True
                _label(place, mine)
        return self._fullest(order, values, arrays, made, last, reads)

    def _fullest(
        self,
        order: list[str],
        values: dict[str, _Value],
        arrays: list[_Array],
        made: dict[int, int],
        last: dict[int, int],
        reads: list[list[_Array]],
    ) -> tuple[list[_Array], str]:
        begins: dict[int, list[_Array]] = {}
        for a in arrays:
            begins.setdefault(made[id(a)], []).append(a)
        live: dict[int, _Array] = {}
        best: tuple[int, list[_Array], str] = (-1, [], "")
        for i, op in enumerate(order):
            text = self.program.made[op]
            live.update({id(a): a for a in begins.get(i, ())})
            within, moment = self._within(text, values)
            here = [a for a in live.values() if not a.placed]
            if _opcode(text) in _IN_PLACE or "kind=kLoop" in text:  # may reuse an operand's buffer for the result
                new = sum(a.bytes for a in begins.get(i, ()))
                dying = [a for a in reads[i] if last.get(id(a)) == i and id(a) in live and a.bytes == new]
                here = [a for a in here if a is not (dying[0] if dying else None)]
            total = sum(a.bytes for a in (*here, *within))
            if total > best[0]:
                best = total, [*here, *within], moment or _name(text)
            for a in [a for a in live.values() if last.get(id(a), made[id(a)]) <= i]:
                del live[id(a)]
        return best[1], best[2]

    def _within(self, text: str, values: dict[str, _Value]) -> tuple[list[_Array], str]:
        """Return the allocations of the computations that an instruction calls, and the operation, at their peak."""
        operands = [values.get(o) for o in _operands(text)]
        if loop := re.search(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)", text):
            carried = operands[0]
            return self._computation(loop[2], {0: carried}, carried if isinstance(carried, list) else [carried])
        best: tuple[list[_Array], str] = ([], "")
        for n, callee in enumerate(self._callees(text)):
            inputs = {0: operands[1 + n]} if " conditional(" in text else dict(enumerate(operands))
            target: list[_Value] = []
            callee_peak = self._computation(callee, inputs, target)
            best = max(best, callee_peak, key=lambda f: sum(a.bytes for a in f[0]))
        return best

    def _callees(self, text: str) -> list[str]:
        if " conditional(" in text:
            named = re.search(r"branch_computations=\{([^}]*)\}", text)
            pair = re.search(r"true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)", text)
            return re.findall(r"[\w.-]+", named[1]) if named else list(pair.groups()) if pair else []
        called = re.search(r" (?:call|async-start)\(.*(?:to_apply|calls|called_computation)=\{?%?([\w.-]+)", text)
        return [called[1]] if called else []

    def _value(
        self, text: str, opcode: str, operands: list[_Value], inputs: Mapping[int, _Value]
    ) -> tuple[_Value, list[_Array]]:
        """Return an instruction's value, and the arrays of it that are new."""
        first = operands[0] if operands else None
        if opcode == "parameter":
            number = int(re.search(r"parameter\((\d+)\)", text)[1])  # type: ignore[index]
            return inputs.get(number), []
        if opcode == "tuple":
            return operands, []
        if opcode == "get-tuple-element":
            at = int(re.search(r"index=(\d+)", text)[1])  # type: ignore[index]
            return first[at] if isinstance(first, list) and at < len(first) else None, []
        if opcode == "copy-done" or opcode.endswith("-done"):
            return (first[1] if "all-" in opcode or "permute" in opcode else first[0]) if isinstance(
                first, list
            ) else first, []
        if opcode in _ALIASES:
            return first, []
        if opcode in ("constant", "iota", "partition-id", "after-all"):
            return None, []
        value = self._new(text)
        for out, operand in self._in_place(text, opcode, operands):
            if isinstance(value, list) and out < len(value):
                value[out] = operand
            elif not isinstance(value, list):
                value = operand
        old = {id(a) for a in _leaves(operands)}
        return value, [a for a in _leaves(value) if id(a) not in old]

    def _in_place(self, text: str, opcode: str, operands: list[_Value]) -> Iterator[tuple[int, _Value]]:
        """Yield the outputs, by number, that alias operands; label each buffer with its last writer."""
        if opcode == "copy-start" and operands:
            yield 1, operands[0]
        elif opcode.endswith("-start") and operands and text.startswith("("):
            yield 0, operands[0] if len(operands) == 1 else operands
        for out, operand in re.findall(r"\{(\d*)\}: \((\d+), \{\}", text.partition("output_to_operand_aliasing=")[2]):
            yield int(out or 0), operands[int(operand)]
        if called := re.search(r" fusion\(.*calls=%?([\w.-]+)", text):
            for out, parameter, update in self._updated(called[1]):
                if parameter < len(operands) and isinstance(operands[parameter], _Array):
                    writer = self._written(update, _operands(text))
                    _label(operands[parameter], _Array("", 0, _name(writer), self._source(writer)))
                    yield out, operands[parameter]

    def _updated(self, fused: str) -> Iterator[tuple[int, int, str]]:
        """Yield outputs of a fused computation that update a parameter in place: output, parameter, instruction."""
        made, root = self.program.made, self.program.roots.get(fused, "")
        ends = _operands(made[root]) if _opcode(made.get(root, "")) == "tuple" else [root]
        for out, end in enumerate(ends):
            end = self._through(end)
            if _opcode(made.get(end, "")) == "dynamic-update-slice":
                start = self._through(_operands(made[end])[0])
                if number := re.search(r" parameter\((\d+)\)", made.get(start, "")):
                    yield out, int(number[1]), end

    def _written(self, update: str, operands: list[str]) -> str:
        """Return the instruction that makes the value of an in-place update, in the fused computation or before it."""
        text = self.program.made[update]
        makers = [text, *self._chain(_operands(text)[1])]
        if number := re.search(r" parameter\((\d+)\)", makers[-1]):
            makers += self._chain(operands[int(number[1])])
        return max(makers, key=lambda t: len(scopes_of(_name(t))))

    def _chain(self, op: str) -> list[str]:
        """Return an instruction and, if it only moves data, the instructions that it moves the data of."""
        texts = [self.program.made.get(op, "")]
        while _opcode(texts[-1]) in _MOVING and len(texts) < 16:
            texts.append(self.program.made.get(_operands(texts[-1])[0], ""))
        return texts

    def _through(self, op: str) -> str:
        for _ in range(16):
            if _opcode(self.program.made.get(op, "")) not in _MOVING:
                break
            op = _operands(self.program.made[op])[0]
        return op

    def _new(self, text: str, argument: bool = False) -> _Value:
        def build(kind: str) -> _Value:
            if kind.startswith("("):
                return [build(k) for k in _children(kind)]
            size = device_bytes(kind)
            return _Array(kind, size, _name(text), "" if argument else self._source(text), "argument" * argument)

        return build(self._type(text))

    def _type(self, text: str) -> str:
        return re.sub(r"/\*.*?\*/", "", type_of(text))

    def _source(self, text: str) -> str:
        return self.program.source(text)

    def _buffer(self, a: _Array) -> ProgramBuffer:
        without_layout = re.match(r"\w+\[[\d,]*\]", a.type)
        shape = without_layout[0] if without_layout else a.type
        if a.group == "argument":
            path = _path(a.name)
            group = _GROUPS.get(path.partition("/")[0], "other arguments")
            return ProgramBuffer(group, path, shape, a.bytes)
        where = module_of(a.name)
        dims = dims_key(int(n) for n in re.findall(r"\d+", shape.partition("[")[2]))
        weight = self.weights.get(dims, "")
        stage, update = stage_of(a.name), re.search(r"\b(gradient_norm|optimizer)\b", a.name)
        if weight and (stage == "backward" or update):
            group, label = "gradients", weight
        elif weight and re.search(r"(convert_element_type|sharding_constraint|copy|all_gather|^$)[^/]*$", a.name):
            group, label = "weight copies", weight
        elif stage == "forward":
            group, label = "activations", where
        else:
            group, label = "temporaries", where
        return ProgramBuffer(group, label or a.name or "unnamed", shape, a.bytes, short_source(a.source))


def device_bytes(kind: str) -> int:
    """Bytes of an array from its HLO type, padded to its layout's tiles; 0 if it is in another memory space."""
    match = re.match(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?", kind)
    if match is None or match[1] in ("token", "opaque"):
        return 0
    layout = match[4] or ""
    if re.search(r"S\([1-9]\d*\)", layout):
        return 0
    shape = [int(n) for n in match[2].split(",") if n]
    order = [int(n) for n in (match[3] or "").split(",") if n] or list(reversed(range(len(shape))))
    sizes = [shape[d] for d in reversed(order)]  # major to minor
    if tile := re.search(r"T\(([\d,]+)\)", layout):
        tiles = [int(n) for n in tile[1].split(",")]
        sizes = [1] * (len(tiles) - len(sizes)) + sizes
        for i, t in enumerate(reversed(tiles), 1):
            sizes[-i] = -(-sizes[-i] // t) * t
    bits = {"pred": 8, "bf16": 16}.get(match[1]) or int(re.search(r"\d+", match[1])[0])  # type: ignore[index]
    return math.prod(sizes) * bits // 8


_IO_ALIAS = re.compile(r"\{(\d+)\}: \((\d+), \{\}")


def _label(place: _Array, mine: _Array) -> None:
    """Label a buffer with the instruction that writes it, if another one allocated it."""
    if place.group != "argument" and mine.name:
        place.name, place.source = mine.name, mine.source or place.source


def _leaves(value: _Value) -> Iterator[_Array]:
    if isinstance(value, _Array):
        yield value
    elif isinstance(value, list):
        for v in value:
            yield from _leaves(v)


def _leaves_or_none(kind: str) -> int:
    return len(_children(kind)) if kind.startswith("(") else 1


def _children(kind: str) -> list[str]:
    """Return the element types of a tuple type."""
    depth, at, children = 0, 1, []
    for i, c in enumerate(kind):
        depth += (c in "([{") - (c in ")]}")
        if (c == "," and depth == 1) or depth == 0:
            children.append(kind[at:i].strip())
            at = i + 1
        if depth == 0:
            break
    return [k for k in children if k]


def _opcode(text: str) -> str:
    match = re.match(r" ?([\w-]+)\(", text[len(type_of(text)) :])
    return match[1] if match else ""


def _operands(text: str) -> list[str]:
    rest = text[len(type_of(text)) :]
    inside = rest[rest.find("(") + 1 :]
    depth = 1
    for i, c in enumerate(inside):
        depth += (c == "(") - (c == ")")
        if not depth:
            return re.findall(r"%([\w.-]+)", inside[:i])
    return []


_GROUPS = {"params": "parameters", "frozen": "parameters", "opt_state": "optimizer"}
"""Groups of arguments, by field of the training state."""


def _name(text: str) -> str:
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', text)
    return match[1].replace("\\'", "'") if match else ""


def _path(argument: str) -> str:
    """Convert `state.params['runs'][0]` to `params/runs/0`."""
    parts = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\w+)\]", "." + argument)
    names = [next(p for p in part if p) for part in parts]
    return "/".join(names[1:] if names[:1] == ["state"] else names)


def weight_shapes(infos: Tree, layout: Layout | None) -> dict[tuple[int, ...], str]:
    """Return the per-device shapes of parameters, their gradients and casts, with the paths of the parameters.

    A shape that several parameters have is labelled with the first path "and others".

    Args:
      infos: tree of `TensorInfo`.
      layout: the layout; `None` for one device.
    """
    owners: dict[tuple[int, ...], str] = {}
    for i in jax.tree.leaves(infos):
        for kind in get_args(Kind):
            specs: list[Any] = [[None] * len(i.shape)] if layout is None else [layout.spec(i.axes, kind=kind)]
            if layout is not None:  # indivisible vocabularies and key heads are used in another sharding
                whole = as_used(i, layout) if kind == "activations" else i
                specs.append(layout.spec(i.axes, whole.shape, kind=kind, name=i.path))
            for spec in specs:
                pieces = [math.prod(layout.sizes[m] for m in _names(part)) if layout else 1 for part in spec]
                shape = [-(-n // p) for n, p in zip(i.shape, pieces, strict=True)]
                for dims in {dims_key(shape), dims_key(shape[1:]) if i.axes[0] == "layers" else dims_key(shape)}:
                    if len(dims) > 1 and owners.setdefault(dims, i.path) != i.path and "others" not in owners[dims]:
                        owners[dims] += " and others"
    return owners


def _names(part: str | Iterable[str] | None) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())
