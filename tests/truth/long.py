"""Which values of a grid `make test` has, and which of the longer ones a run of CI has."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def short(count: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Marks all values `long` but `count`, which are spread evenly and have the first among them.

    A tuple is the values of several arguments; where one argument is a tuple, it stands in a `pytest.param`.
    """
    sets = [value if isinstance(value, ParameterSet) else _of(value) for value in values]
    quick = [made for made in sets if not _is_long(made)]
    count = min(count, len(quick))
    stay = [quick[k * len(quick) // count] for k in range(count)]
    return [made if _is_long(made) or any(made is one for one in stay) else _long(made) for made in sets]


def share(text: str) -> Callable[[str], bool]:
    """Return whether a test is in share `text` ("2/3"): by its name, so that it stays there when other tests come."""
    number, _, shares = text.partition("/")
    if not (number.isdigit() and shares.isdigit() and 1 <= int(number) <= int(shares)):
        raise pytest.UsageError(f"--share: {text!r} is not K/N with 1 <= K <= N, such as 2/3")
    return lambda name: zlib.crc32(name.encode()) % int(shares) == int(number) - 1


def _of(value: Any) -> ParameterSet:
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def _is_long(made: ParameterSet) -> bool:
    return any(getattr(mark, "name", "") == "long" for mark in made.marks)


def _long(made: ParameterSet) -> ParameterSet:
    return pytest.param(*made.values, marks=[*made.marks, pytest.mark.long], id=made.id)
