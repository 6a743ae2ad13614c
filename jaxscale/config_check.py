"""What is wrong with a config before anything is made of it: macros, parameters and types."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Mapping

from gin.config import ConfigurableReference

from jaxscale.config_registry import BY_NAME, MACRO, Key, configurable, macro_of, name_of, references, short, words
from jaxscale.config_types import fits, is_call, parameters, say, type_hints
from jaxscale.errors import ConfigError, near
from jaxscale.reading import clipped


class Binding(typing.NamedTuple):
    """A parsed value and the place it was written at (`demo.gin:3`)."""

    value: object
    where: str


def check(bindings: Mapping[Key, Binding]) -> None:
    """Every macro is defined, every bound parameter exists, every value fits its annotation.

    Raises:
        ConfigError: One is not, does not or does not; names the place and the nearest that would do.
    """
    macros = {scope: b.value for (scope, selector, _), b in bindings.items() if selector == MACRO}
    hints = functools.cache(type_hints)  # `train` alone has thirty bindings
    for value, where in bindings.values():
        for macro in filter(None, map(macro_of, references(value))):
            if macro not in macros:
                raise ConfigError(f"{where}: the macro '%{macro}' is not defined{near(macro, macros)}")
    for key, (value, whole) in bindings.items():
        where = clipped(whole)
        _, selector, name = key
        if selector == MACRO:
            continue
        obj = configurable(selector).wrapped
        accepted = parameters(obj)
        if name not in accepted and any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            made = hints(obj).get("return")  # `llama3_8b(**changes)` takes the fields of what it makes
            if isinstance(made, type) and dataclasses.is_dataclass(made):
                obj, accepted = made, parameters(made)
        if name in accepted and accepted[name].kind is not inspect.Parameter.VAR_POSITIONAL:
            expected = hints(obj).get(name, typing.Any)
            if value is None and accepted[name].default is None:
                continue  # `lr: float = None` means it may be None
            _check_not_called(value, expected, bindings, f"{where}: {name_of(key)}")
            if not fits(value, expected, macros):
                said = f"{name_of(key)} must be {say(expected)}, not {clipped(words(value))}{_hint(value, expected)}"
                raise ConfigError(f"{where}: {said}")
        elif not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            raise ConfigError(
                f"{where}: '{short(selector)}' has no parameter '{name}'{near(name, accepted, bindings=True)}"
            )


def _check_not_called(value: object, expected: object, bindings: Mapping[Key, Binding], what: str) -> None:
    """Raises where a function is wanted, and one is called in its place, without what it needs."""
    if not isinstance(value, ConfigurableReference) or not value.evaluate or not is_call(expected):
        return
    made, selector = value.configurable.wrapped, value.configurable.selector
    bound = {parameter for _, of, parameter in bindings if of == selector}
    needed = [p.name for p in parameters(made).values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    found = type_hints(made).get("return")  # an array, say; where nothing is said, it may be a function
    data = isinstance(found, type) and not any("__call__" in vars(kind) for kind in found.__mro__)
    if data and not isinstance(made, type) and not bound.issuperset(needed):
        name = words(value).removesuffix("()")
        raise ConfigError(f"{what} is a function, and {name}() calls it; write {name}, without brackets")


def _hint(value: object, expected: object) -> str:
    if isinstance(value, ConfigurableReference) and not value.evaluate:
        return f"; write {words(value)}() for an instance"
    if isinstance(value, str) and value.lower() in ("true", "false", "none"):
        return f"; write {value.capitalize()}"
    if typing.get_origin(expected) is typing.Literal and isinstance(value, str):
        return near(value, map(str, typing.get_args(expected)))
    if isinstance(value, str) and value in BY_NAME:
        entry = BY_NAME[value]
        whole = isinstance(entry.obj, type)  # a class is mostly meant to be made, a function to be passed
        found = (ConfigurableReference(entry.selector, evaluate) for evaluate in (whole, not whole))
        return next((f"; write {words(ref)}" for ref in found if fits(ref, expected, {})), "")
    return "; write it with round brackets" if isinstance(value, list) and typing.get_origin(expected) is tuple else ""
