"""Writing values in gin's notation: literals as they are, objects as references with a scope of their own."""

from __future__ import annotations

import enum
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

LOST = "not expressible in gin; pass it again from Python"

# Registered name, arguments, and whether the reference is called.
Parts = tuple[str, dict[str, object], bool]


class Text(str):
    """A reference in gin's notation, such as `@Lion()`; it is written without quotes."""

    __slots__ = ()


class Inexpressible(Exception):
    """Raised for a value that gin cannot express."""


class Writer:
    """Writes the bindings of one registered object, then those of the objects they refer to, each in its own scope.

    Args:
        name: The registered object.
        values: Its arguments.
        parts: Returns the `Parts` of a value made from a registered object; raises `Inexpressible` for any other.
    """

    def __init__(self, name: str, values: dict[str, object], parts: Callable[[object], Parts]):
        self.parts = parts
        self.lines: list[str] = []
        self.scopes: set[str] = set()
        # Objects to write: (prefix of the binding, path of the attribute, arguments).
        self.todo: list[tuple[str, tuple[str, ...], dict[str, object]]] = [(name, (name,), values)]

    def text(self) -> str:
        """Return the whole text; call it once."""
        while self.todo:
            prefix, path, values = self.todo.pop(0)
            for field in sorted(values):
                before = len(self.todo), set(self.scopes)
                try:
                    line = f"{prefix}.{field} = {literal(values[field], self._reference, (*path, field))}"
                except Inexpressible:
                    del self.todo[before[0] :]  # expressible elements of the same tuple
                    self.scopes = before[1]
                    shortened = " ".join(repr(values[field]).split())[:100]
                    line = f"# {'.'.join((*path, field))} = {shortened}: {LOST}"
                self.lines.append(line)
        return "\n".join(self.lines) + "\n" if self.lines else ""

    def _reference(self, value: object, path: tuple[str, ...]) -> str:
        name, values, evaluate = self.parts(value)
        if not values:
            return f"@{name}" + "()" * evaluate
        scope = stem = re.sub(r"\W", "_", "_".join(path[1:]))
        count = 1
        while scope in self.scopes:
            count += 1
            scope = f"{stem}_{count}"
        self.scopes.add(scope)
        self.todo.append((f"{scope}/{name}", path, values))
        return f"@{scope}/{name}" + "()" * evaluate


def literal(value: object, other: Callable[[object, tuple[str, ...]], str], path: tuple[str, ...]) -> str:
    """Return a value in gin's notation.

    Args:
        value: Anything.
        other: Called with a value that is not a literal and its path; returns its notation.
        path: Names and indices that lead to the value.

    Raises:
        Inexpressible: gin has no notation for it.
    """

    def items(values: Iterable[Any]) -> list[str]:
        return [literal(v, other, (*path, str(i))) for i, v in enumerate(values)]

    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, enum.Enum):
        raise Inexpressible
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, str):
        return repr(str(value))
    if type(value) is bytes:
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real) and value == value:
        return repr(float(value)).replace("inf", "1e999")  # a literal that overflows is gin's only infinity
    if type(value) is tuple:
        return f"({', '.join(items(value))}{',' if len(value) == 1 else ''})"
    if type(value) is list:
        return f"[{', '.join(items(value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {v}" for k, v in zip(items(value), items(value.values()), strict=True)) + "}"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    try:
        return other(value, path)
    except Inexpressible:
        dtype = _dtype_name(value)
        if dtype is None:
            raise
        return repr(dtype)


def _dtype_name(value: object) -> str | None:
    """`bfloat16` for a dtype, a NumPy scalar type or a jax.numpy one; None for the rest."""
    numpy = sys.modules.get("numpy")  # this module imports no array library; if NumPy is not loaded, nothing is a dtype
    if numpy is None:
        return None
    if isinstance(value, type):
        if issubclass(value, numpy.generic):
            return numpy.dtype(value).name
        value = getattr(value, "dtype", None)  # jnp.bfloat16

    return value.name if isinstance(value, numpy.dtype) else None
