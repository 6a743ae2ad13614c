"""Checks of a config before any object is created: macros, parameter names and types."""

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
    """A parsed value, and where in the config it stands (`demo.gin:3`)."""

    value: object
    place: str


def check(bindings: Mapping[Key, Binding], *, partial: bool = False) -> None:
    """Check that macros are defined, scopes and parameters exist, and values have the annotated types.

    Args:
        bindings: The bindings.
        partial: Whether scopes may have no bindings, in text that lacks values from Python.

    Raises:
        ConfigError: One of these is wrong; the message has the place in the config and the nearest valid choice.
    """
    macros = {scope: b.value for (scope, selector, _), b in bindings.items() if selector == MACRO}
    hints = functools.cache(type_hints)  # `train` alone has thirty bindings
    for value, place in bindings.values():
        for macro in filter(None, map(macro_of, references(value))):
            if macro not in macros:
                raise ConfigError(f"{place}: the macro '%{macro}' is not defined{near(macro, macros)}")
    for key, (value, place) in bindings.items():
        place = clipped(place)
        _, selector, name = key
        if selector == MACRO:
            continue
        obj = configurable(selector).wrapped
        accepted = parameters(obj)
        if name not in accepted and any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            result = hints(obj).get("return")  # `llama3_8b(**changes)` takes the fields of the dataclass it returns
            if isinstance(result, type) and dataclasses.is_dataclass(result):
                obj, accepted = result, parameters(result)
        if name in accepted and accepted[name].kind is not inspect.Parameter.VAR_POSITIONAL:
            expected = hints(obj).get(name, typing.Any)
            if value is None and accepted[name].default is None:
                continue  # `lr: float = None` means it may be None
            _check_not_called(value, expected, bindings, f"{place}: {name_of(key)}")
            if not fits(value, expected, macros):
                wrong = f"{name_of(key)} must be {say(expected)}, not {clipped(words(value))}{_hint(value, expected)}"
                raise ConfigError(f"{place}: {wrong}")
        elif not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            raise ConfigError(
                f"{place}: '{short(selector)}' has no parameter '{name}'{near(name, accepted, bindings=True)}"
            )
    if not partial:
        _check_scopes(bindings)


def _check_scopes(bindings: Mapping[Key, Binding]) -> None:
    """Check that a binding has the scope of each reference."""
    scopes = _scopes(bindings)
    for value, place in bindings.values():
        for reference in references(value):
            scope = "" if reference.selector.startswith("gin.") else "/".join(reference.scopes)  # gin.REQUIRED
            if scope and not any(f"{each}/".startswith(f"{scope}/") for each in scopes):
                outer = scope
                while outer and outer not in scopes:  # bindings of outer scopes hold in inner ones
                    outer = outer.rpartition("/")[0]
                same = words(reference).replace(f"{scope}/", f"{outer}/" if outer else "", 1)
                raise ConfigError(
                    f"{clipped(place)}: no binding has the scope '{scope}', so {words(reference)} would be {same}"
                    f"{near(scope, scopes)}"
                )


def _scopes(bindings: Mapping[Key, Binding]) -> set[str]:
    """The scopes of all bindings, also of those that the axes of a sweep make."""
    axes = (name for binding in bindings.values() if isinstance(binding.value, dict) for name in binding.value)
    names = (part.strip() for axis in axes if isinstance(axis, str) for part in axis.split(","))
    own = (scope for scope, selector, _ in bindings if selector != MACRO)  # a macro has its name in place of a scope
    return {scope for scope in (*own, *(n.rpartition("/")[0] for n in names)) if scope}


def _check_not_called(value: object, expected: object, bindings: Mapping[Key, Binding], what: str) -> None:
    """Raise `ConfigError` if a setting that takes a function is bound to a call of it (`@f()` in place of `@f`)."""
    if not isinstance(value, ConfigurableReference) or not value.evaluate or not is_call(expected):
        return
    called, selector = value.configurable.wrapped, value.configurable.selector
    bound = {parameter for _, of, parameter in bindings if of == selector}
    needed = [p.name for p in parameters(called).values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    result = type_hints(called).get("return")  # without an annotation the result may be a function, which is valid
    data = isinstance(result, type) and not any("__call__" in vars(kind) for kind in result.__mro__)
    if data and not isinstance(called, type) and not bound.issuperset(needed):
        name = words(value).removesuffix("()")
        raise ConfigError(f"{what} is a function, and {name}() calls it; write {name}, without brackets")


def _hint(value: object, expected: object) -> str:
    if isinstance(value, float) and value.is_integer() and fits(int(value), expected, {}):
        return f"; write {int(value)}"  # 1e3
    if isinstance(value, ConfigurableReference) and not value.evaluate:
        return f"; write {words(value)}() for an instance"
    literals = {"true": True, "false": False, "none": None}
    if isinstance(value, str) and value.lower() in literals:
        return f"; write {value.capitalize()}" if fits(literals[value.lower()], expected, {}) else ""
    if typing.get_origin(expected) is typing.Literal and isinstance(value, str):
        return near(value, map(str, typing.get_args(expected)))
    if isinstance(value, str) and value in BY_NAME:
        entry = BY_NAME[value]
        is_class = isinstance(entry.obj, type)  # most settings take instances of classes, and functions uncalled
        result = None if is_class else type_hints(entry.obj).get("return")
        if isinstance(result, type) and isinstance(expected, type) and not issubclass(result, expected):
            return ""  # a function whose result is known to be of another kind
        choices = (ConfigurableReference(entry.selector, evaluate) for evaluate in (is_class, not is_class))
        return next((f"; write {words(ref)}" for ref in choices if fits(ref, expected, {})), "")

    return "; write it with round brackets" if isinstance(value, list) and typing.get_origin(expected) is tuple else ""
