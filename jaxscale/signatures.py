"""Checks that a function or class chosen in a config accepts the arguments that its family is called with.

They run when the config is made, so that the error is not a TypeError inside a traced function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.config_registry import BY_NAME
from jaxscale.config_types import holds, in_words, is_call, parameters, type_hints
from jaxscale.errors import ConfigError
from jaxscale.reading import clipped


def check_call(setting: str, part: Callable[..., Any], positional: Sequence[str], named: Sequence[str]) -> None:
    """Check that a part accepts the arguments of its family.

    Args:
        setting: its setting, for the message: "Transformer.attention".
        part: a function, a class that is called, or an instance with `__call__`.
        positional: names of the positional arguments, for the message.
        named: names of the keyword arguments.

    Raises:
        ConfigError: it lacks parameters or requires others; the message has both signatures.
    """
    if part is not None and not callable(part):
        named_so = BY_NAME.get(part) if isinstance(part, str) else None
        hint = ""
        if named_so is not None:
            made = "()" if _instances_bind(named_so.obj, positional, named) else ""
            hint = f"; write @{part}{made} in gin, and the object itself in Python"
        raise ConfigError(f"{setting} = {part!r}: must be a function, a class or an object that is called{hint}")
    try:
        signature = _signature(part)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    if _binds(signature, positional, named):
        return
    takes = ", ".join([*positional, *(["*"] if named else []), *named])
    name = getattr(part, "__name__", None) or repr(part)
    wrong = _wrong(signature, positional, named)
    hint = f"; write {name}() for an instance" if _instances_bind(part, positional, named) else ""
    raise ConfigError(f"{setting} = {name}{_plain(signature)} {wrong}; it is called as ({takes}){hint}")


def check_fields(name: str, part: Any) -> None:
    """Check that the fields of a dataclass have the types of their annotations.

    Fields whose annotation cannot be decided (see `jaxscale.config_types.holds`) pass, and so do functions other than
    `None`, which `check_call` checks.

    Args:
        name: its name in gin, for the message: "Transformer".
        part: an instance.

    Raises:
        ConfigError: one has not.
    """
    kind: Any = type(part)
    for field, expected in _fields_of(kind).items():
        value = getattr(part, field)
        if not holds(value, expected) and (value is None or not is_call(expected)):
            text = getattr(value, "__name__", None) or clipped(repr(value))
            raise ConfigError(f"{name}.{field} = {text}: must be {in_words(expected)}{_hint(value, expected)}")


@functools.cache
def _fields_of(kind: Any) -> dict[str, object]:
    hints = type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.name in hints}


def _hint(value: Any, expected: object) -> str:
    """What to write in place of a scalar of NumPy, a registered name, or a class where an instance is needed."""
    scalar = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if scalar is not value and holds(scalar, expected):
        return f"; write {scalar!r}"
    dtype = value.name if isinstance(value, np.dtype) else getattr(value, "__name__", None)
    if expected is str and dtype in ("float32", "bfloat16"):
        return f"; write '{dtype}'"
    obj = BY_NAME[value].obj if isinstance(value, str) and value in BY_NAME else value
    if obj is not value and holds(obj, expected):
        return f"; write {value} without quotes (@{value} in gin)"
    options = {expected, *typing.get_args(expected)}
    return f"; write {obj.__name__}()" if isinstance(obj, type) and options.intersection(obj.__mro__[:-1]) else ""


def check_method(setting: str, part: Any, method: str, positional: Sequence[str], named: Sequence[str]) -> None:
    """As `check_call`, for a method of a part. A missing method is not an error here."""
    bound = getattr(part, method, None)
    if callable(bound):
        check_call(f"{setting}.{method}", bound, positional, named)


def _signature(part: Callable[..., Any]) -> inspect.Signature:
    """The signature of a part; of a class whose metaclass has its own `__call__` (Flax), that of the constructor."""
    try:
        hash(part)
    except TypeError:  # a field, such as a list, is not hashable
        return _signature_of.__wrapped__(part)
    return _signature_of(part)


@functools.lru_cache(1024)
def _signature_of(part: Callable[..., Any]) -> inspect.Signature:
    if isinstance(part, type) and type(part).__call__ is not type.__call__:
        return inspect.Signature(list(parameters(part).values()))
    return inspect.signature(part)


def _instances_bind(part: Callable[..., Any], positional: Sequence[str], named: Sequence[str]) -> bool:
    """Whether a part is a class whose instances accept the arguments."""
    if not isinstance(part, type) or not any("__call__" in vars(cls) for cls in part.__mro__):
        return False
    return _binds(inspect.signature(part.__call__), ["self", *positional], named)


def _binds(signature: inspect.Signature, positional: Sequence[str], named: Sequence[str]) -> bool:
    try:
        signature.bind(*positional, **dict.fromkeys(named))
        return True
    except TypeError:
        return False


def _wrong(signature: inspect.Signature, positional: Sequence[str], named: Sequence[str]) -> str:
    """What is wrong with a signature, for a message."""
    own: Mapping[str, inspect.Parameter] = signature.parameters
    kinds = [p.kind for p in own.values()]
    by_place = [n for n, p in own.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(by_place) < len(positional):
        return f"takes {len(by_place)} positional arguments and needs {len(positional)} ({', '.join(positional)})"
    passed = {*by_place[: len(positional)]}
    by_name = {n for n, p in own.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} - passed
    lacks = [] if inspect.Parameter.VAR_KEYWORD in kinds else [n for n in named if n not in by_name]
    if lacks:
        return f"has no parameter {' or '.join(map(repr, lacks))}"
    others = {*by_name, *by_place} - passed - {*named}
    required = [repr(n) for n, p in own.items() if n in others and p.default is p.empty]
    return f"also requires {' and '.join(required)}, which is not passed"


def _plain(signature: inspect.Signature) -> str:
    """A signature without annotations."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
