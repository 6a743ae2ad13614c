"""Parameters and annotations of registered objects, and whether a parsed value has the annotated type."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from gin.config import ConfigurableReference


def parameters(obj: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a function or of a class's constructor, by name."""
    skip = 0
    if isinstance(obj, type):
        # Not the signature of the class: a metaclass with a __call__ of its own (Flax) would hide the constructor's.
        obj, skip = _constructor(obj), 1
        if obj is object.__init__:
            return {}
    return dict(list(inspect.signature(obj).parameters.items())[skip:])


def type_hints(obj: Callable[..., Any]) -> dict[str, object]:
    """Annotations by parameter name, strings resolved; those imported for type checkers only are left out."""
    # Annotations of a dataclass belong to the classes that declare the fields, each with the names of its own module.
    target = _constructor(obj) if isinstance(obj, type) and not dataclasses.is_dataclass(obj) else obj
    try:
        return typing.get_type_hints(target)
    except Exception:  # annotations are arbitrary expressions and may raise anything
        pass
    hints: dict[str, object] = {}
    for layer in reversed(target.__mro__) if isinstance(target, type) else [inspect.unwrap(target)]:
        namespace = getattr(layer, "__globals__", None) or vars(sys.modules.get(layer.__module__, types))
        for name, annotation in getattr(layer, "__annotations__", {}).items():
            try:
                holder = types.SimpleNamespace(__annotations__={name: annotation})
                hints |= typing.get_type_hints(holder, globalns=dict(namespace))
            except Exception:
                hints.pop(name, None)
    return hints


def _constructor(cls: type) -> Callable[..., Any]:
    """`__init__`, or `__new__` where only that is defined (named tuples)."""
    init, new = inspect.getattr_static(cls, "__init__"), getattr(cls, "__new__")  # noqa: B009  (untyped)
    return new if init is object.__init__ and new is not object.__new__ else init


def fits(value: object, expected: object, macros: Mapping[str, object]) -> bool:
    """Whether a parsed value matches an annotation; True where that cannot be decided.

    Args:
        value: A literal, a gin reference, or containers of them.
        expected: A resolved annotation.
        macros: The value of every macro, by name.
    """
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if isinstance(value, ConfigurableReference) and value.configurable.selector == "gin.macro":
        return fits(macros.get("/".join(value.scopes)), expected, macros)
    if expected is typing.Any or isinstance(expected, (typing.TypeVar, str)):
        return True
    if getattr(expected, "_is_protocol", False):
        return True
    if origin is typing.Annotated:
        return fits(value, args[0], macros)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option, macros) for option in args)
    if isinstance(value, ConfigurableReference):
        return _reference_fits(value, origin or expected)
    if origin is typing.Literal:
        return any(value == option and type(value) is type(option) for option in args)
    if expected is None or expected is type(None):
        return value is None
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(fits(v, args[0], macros) for v in value)
        return len(value) == len(args) and all(fits(v, a, macros) for v, a in zip(value, args, strict=True))
    if origin is dict or origin in (collections.abc.Mapping, collections.abc.MutableMapping):
        return isinstance(value, dict) and all(
            fits(k, args[0], macros) and fits(v, args[1], macros) for k, v in value.items()
        )
    if origin in (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection):
        kinds = (list,) if origin is list else (list, tuple)
        return isinstance(value, kinds) and all(fits(v, args[0], macros) for v in value)
    if origin in (collections.abc.Callable, type) or expected in (collections.abc.Callable, type):
        return False  # only a reference can be a function or a class
    if not isinstance(expected, type) or origin is not None:
        return True
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if issubclass(expected, os.PathLike) or expected.__name__ == "dtype":
        return isinstance(value, str)
    try:
        return isinstance(value, expected)
    except TypeError:  # isinstance does not work with a TypedDict
        return True


def holds(value: object, expected: object) -> bool:
    """Whether a Python object matches an annotation; True where that cannot be decided.

    Args:
        value: An object, where `fits` has a parsed value.
        expected: A resolved annotation.
    """
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(holds(value, option) for option in args)
    if is_call(expected):
        return callable(value)
    if getattr(expected, "_is_protocol", False):
        return value is not None and not isinstance(value, (int, float, str, tuple, list, dict, type))
    if origin is type and isinstance(args[0], type):
        return isinstance(value, type) and issubclass(value, args[0])
    return fits(value, expected, {})


def is_call(expected: object) -> bool:
    """Whether an annotation is of a function: `Callable[...]`, or a protocol that has nothing but `__call__`."""
    if expected is collections.abc.Callable or typing.get_origin(expected) is collections.abc.Callable:
        return True
    own = {name for name in vars(expected) if not name.startswith("_")} if isinstance(expected, type) else {"?"}
    return getattr(expected, "_is_protocol", False) and "__call__" in vars(expected) and not own


def say(expected: object) -> str:
    """An annotation for a message: `int`, `float | None`."""
    if isinstance(expected, type) and not typing.get_args(expected):
        return expected.__name__
    return str(expected).replace("typing.", "")


_WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def in_words(expected: object) -> str:
    """An annotation for a message about Python: `a number or None`, `Rotary(...) or None`."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, args))
    if expected in _WORDS:
        return _WORDS[expected]
    if expected is type(None):
        return "None"
    if origin is tuple:
        return f"a tuple of {in_words(args[0])}" if args else "a tuple"
    if origin is type:
        return f"the class {say(args[0])} or one derived from it"
    if is_call(expected):
        return "a function or a class"
    return f"{say(expected)}(...)"


def _reference_fits(value: ConfigurableReference, target: object) -> bool:
    """Whether `@name` or `@name()` matches a type; a function's result is unknown and always matches."""
    referenced = value.configurable.wrapped
    if target is None or target is typing.Literal:
        return False
    if not isinstance(target, type) or target is object or value.configurable.selector.startswith("gin."):
        return True
    if not value.evaluate:
        return isinstance(referenced, target)
    return not isinstance(referenced, type) or issubclass(referenced, target)
