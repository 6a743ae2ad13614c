"""Find a compiled program's branches, what their predicates depend on, and the collectives inside them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
_OWN = ("partition-id", "replica-id")
Differs = Any
"""Whether a value may differ between devices: a bool, or a list of those for a tuple."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """A conditional.

    Args:
      name: name of the instruction.
      divergent: whether its predicate may differ between devices, since it depends on a device's number or on the
        program's arguments.
      collectives: the kinds of collectives inside it, at any depth.
    """

    name: str
    divergent: bool
    collectives: frozenset[str]


def branches(text: str) -> list[Branch]:
    """Return every conditional of a compiled program (`Compiled.as_text()`)."""
    program = _Program(text)
    program.run(program.entry, [True] * 10_000)
    return [
        Branch(name, differs, frozenset(c for callee in calls for c in program.collectives(callee)))
        for name, (differs, calls) in program.seen.items()
    ]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    op: str
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    number: int
    root: bool


class _Program:
    """The computations of a program, and what their values depend on."""

    def __init__(self, text: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = ""
        self.seen: dict[str, tuple[bool, tuple[str, ...]]] = {}
        current: list[_Instruction] = []
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif " = " in line and line.startswith(" "):
                current.append(_instruction(line))

    def run(self, computation: str, arguments: list[Differs]) -> Differs:
        """Return whether a computation's result differs between devices, from whether its arguments do."""
        values: dict[str, Differs] = {}
        root: Differs = False
        for i in self.computations[computation]:
            values[i.name] = value = self._value(i, [values[o] for o in i.operands], arguments)
            root = value if i.root else root
        return root

    def _value(self, i: _Instruction, operands: list[Differs], arguments: list[Differs]) -> Differs:
        if i.op == "parameter":
            return arguments[i.number]
        if i.op == "tuple":
            return operands
        if i.op == "get-tuple-element":
            return operands[0][i.number] if isinstance(operands[0], list) else operands[0]
        if i.op in ("fusion", "call"):
            return self.run(i.calls[0], operands)
        if i.op == "while":
            state = operands[0]
            while (after := _join(state, self.run(i.calls[0], [state]))) != state:
                state = after
            return state
        if i.op == "conditional":
            differs = _any(operands[0]) or self.seen.get(i.name, (False, ()))[0]
            self.seen[i.name] = differs, i.calls
            out = self.run(i.calls[0], operands[1:2])
            for callee, operand in zip(i.calls[1:], operands[2:], strict=True):
                out = _join(out, self.run(callee, [operand]))
            return _join(out, True) if differs else out
        return i.op in _OWN or any(map(_any, operands))

    def collectives(self, computation: str) -> set[str]:
        """Return the kinds of collectives in a computation and those that it calls."""
        kinds = set()
        for i in self.computations[computation]:
            kinds |= {c for c in COLLECTIVES if i.op.startswith(c)}
            for callee in i.calls:
                kinds |= self.collectives(callee)
        return kinds


def _instruction(line: str) -> _Instruction:
    left, right = line.strip().split(" = ", 1)
    rest = right[_closing(right) + 1 :].strip() if right.startswith("(") else right.split(" ", 1)[1].strip()
    op, inside = rest.split("(", 1)
    end = _closing("(" + inside) - 1
    operands, attributes = inside[:end], inside[end:]
    calls: tuple[str, ...] = ()
    for key in ("branch_computations=\\{(.*?)\\}", "true_computation=(\\S+?),.*false_computation=(\\S+?)[,\\s]",
                "body=(%?[\\w.\\-]+)", "calls=(%?[\\w.\\-]+)", "to_apply=(%?[\\w.\\-]+)"):  # fmt: skip
        match = re.search(key, attributes + " ")
        if match:
            calls = tuple(c.strip().lstrip("%") for group in match.groups() for c in group.split(","))
            break
    number = re.search(r"index=(\d+)", attributes) if op == "get-tuple-element" else re.match(r"(\d+)", operands)
    names = () if op in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", operands))
    name = left.removeprefix("ROOT ").lstrip("%")
    return _Instruction(name, op, names, calls, int(number[1]) if number else 0, left.startswith("ROOT "))


def _closing(text: str) -> int:
    """Return the position that closes the parenthesis at the beginning of a text."""
    depth = 0
    for at, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return at
    raise ValueError(text)


def _any(value: Differs) -> bool:
    return any(map(_any, value)) if isinstance(value, list) else value


def _join(a: Differs, b: Differs) -> Differs:
    if isinstance(a, list) and isinstance(b, list):
        return [_join(x, y) for x, y in zip(a, b, strict=True)]
    if isinstance(a, list):
        return [_join(x, b) for x in a]
    return [_join(a, y) for y in b] if isinstance(b, list) else a or b
