"""Registered objects that a setting accepts, as its annotation tells."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator

from jaxscale.config_registry import registered
from jaxscale.config_types import type_hints

Entries = tuple[tuple[str, Callable[..., object]], ...]

MOST = 60
"""Settings with more choices list none."""


def choices(obj: Callable[..., object]) -> dict[str, tuple[str, ...]]:
    """Names of the registered objects that each setting accepts.

    Only for settings annotated with a class or protocol, and only if there are from 2 to `MOST` choices. The object
    itself is left out: an optimizer that wraps another one does not wrap itself.

    Args:
        obj: A registered class or function.

    Returns:
        Setting -> names, sorted.
    """
    by_setting = {}
    entries = tuple(registered().items())
    for setting, hint in type_hints(obj).items():
        families = _families(hint) if setting != "return" else ()
        accepted = {name for family in families for name in _accepted(family, entries)}
        names = sorted(name for name, other in entries if name in accepted and other is not obj)
        if 2 <= len(names) <= MOST:
            by_setting[setting] = tuple(names)
    return by_setting


@functools.lru_cache(maxsize=256)
def _accepted(family: type, entries: Entries) -> tuple[str, ...]:
    """Names of the registered objects that a setting of this family accepts."""
    larger = _larger(family, entries)
    return tuple(name for name, obj in entries if _accepts(family, obj, larger))


def _families(hint: object) -> Iterator[type]:
    """Yield the classes of an annotation that are not Python's own."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if isinstance(option, type) and option.__module__ not in ("builtins", "typing", "collections.abc"):
            yield option


def _accepts(family: type, obj: Callable[..., object], larger: list[type]) -> bool:
    """Whether a family has a registered class, what a registered function returns, or the function itself.

    Args:
        family: What a setting is annotated with.
        obj: The registered class or function.
        larger: Families whose objects are not of this one, see `_larger`.
    """
    if not isinstance(obj, type):
        if set(_members(family)) == {"__call__"} and _same_call(family.__call__, obj, 1, 0):
            return True
        returned = type_hints(obj).get("return")
        return isinstance(returned, type) and _accepts(family, returned, larger)
    if family in obj.__mro__:
        return True
    return _satisfies(obj, family) and not any(_satisfies(obj, other) for other in larger)


def _members(family: type) -> dict[str, object]:
    """Public attributes and methods of a protocol, and `__call__`; none for another class."""
    members: dict[str, object] = {}
    for cls in family.__mro__:
        if getattr(cls, "_is_protocol", False) and cls.__module__ != "typing":
            for name in (*vars(cls), *vars(cls).get("__annotations__", {})):
                if name == "__call__" or not name.startswith("_"):
                    members.setdefault(name, vars(cls).get(name))
    return members


def _larger(family: type, entries: Entries) -> list[type]:
    """Other settings' protocols that also have every member of this one: their objects belong to them.

    A `Search` has the method of a `Stopper`, for example.
    """
    own = _members(family).keys()
    return [f for f in _every_family(entries) if _members(f).keys() > own and family not in f.__mro__]


@functools.lru_cache(maxsize=4)  # reading annotations takes most of the time of a list of settings
def _every_family(entries: Entries) -> frozenset[type]:
    return frozenset(f for _, obj in entries for hint in type_hints(obj).values() for f in _families(hint))


def _satisfies(cls: type, family: type) -> bool:
    """Whether a class has every member of a protocol, its methods with the same required parameters."""
    members = _members(family)
    for name, member in members.items():
        if not any(name in vars(c) or name in vars(c).get("__annotations__", {}) for c in cls.__mro__):
            return False
        if inspect.isfunction(member) and not _same_call(member, getattr(cls, name), 1, 1):
            return False
    return bool(members)


def _same_call(method: Callable[..., object], other: object, skip: int, skip_other: int) -> bool:
    """Whether two callables have the same required positional parameters, without the first `skip` of each."""

    def required(call: Callable[..., object], skip: int) -> list[str]:
        parameters = list(inspect.signature(call).parameters.values())[skip:]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]

    try:
        return callable(other) and required(method, skip) == required(other, skip_other)
    except ValueError:  # a builtin without a signature
        return False
