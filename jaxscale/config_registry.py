"""What configs may name: the registry of library objects, and gin's references to them in words of ours.

gin's registry is told as well, under a selector of our own, so that its parser knows the names. `jaxscale.config`
loads and evaluates; this says what a name is.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gin
from gin.config import ConfigurableReference, ParserDelegate

from jaxscale.config_text import literal
from jaxscale.config_types import type_hints
from jaxscale.errors import ConfigError, near

MACRO = "gin.macro"

_OF_GIN = ("constant", "macro")
"""What gin makes of `%name`; nobody writes a reference to it, and `@constant()` is a slip of `@Constant()`."""

T = typing.TypeVar("T", bound=Callable[..., Any])
Key = tuple[str, str, str]  # scope, full selector, parameter


class Entry(typing.NamedTuple):
    """A registered object, the name configs call it by, and gin's full selector."""

    name: str
    obj: Callable[..., Any]
    selector: str


BY_NAME: dict[str, Entry] = {}
BY_ID: dict[int, Entry] = {}  # entries keep their object alive, so an id stays its own
_BY_SELECTOR: dict[str, Entry] = {}


@typing.overload
def register(obj: T, *, name: str | None = None) -> T: ...
@typing.overload
def register(obj: None = None, *, name: str | None = None) -> Callable[[T], T]: ...
def register(obj: typing.Any = None, *, name: str | None = None) -> typing.Any:
    """Makes a class or function known to configs as `@name`, in place; plain calls from Python stay untouched.

    Args:
        obj: The class or function; left out when used as `@register(name=...)`.
        name: What configs call it; by default its `__name__`.

    Returns:
        The very object (so classes keep their identity and pickle), or a decorator.

    Raises:
        ConfigError: The name belongs to another object.
    """
    if obj is None:
        return functools.partial(register, name=name)
    name = name or obj.__name__
    known = BY_NAME.get(name)
    again = known is not None and _origin(known.obj) == _origin(obj)  # a module or a notebook cell run a second time
    if known is not None and known.obj is not obj and not again:
        raise ConfigError(
            f"two objects want the config name '{name}': {'.'.join(_origin(known.obj))} and {'.'.join(_origin(obj))}"
        )
    # A full selector of our own keeps `constant` or `macro` apart from gin's objects of that name.
    selector = f"jaxscale_registry.{name}"
    with gin.config.interactive_mode(), gin.unlock_config():
        gin.register(selector)(obj)
    if known is not None:
        BY_ID.pop(id(known.obj), None)
    entry = Entry(name, obj, selector)
    BY_NAME[name] = _BY_SELECTOR[selector] = BY_ID[id(obj)] = entry
    return obj


def registered() -> dict[str, Callable[..., Any]]:
    """Name -> object of everything registered, sorted by name."""
    return {name: BY_NAME[name].obj for name in sorted(BY_NAME)}


def own_modules(text: str) -> list[str]:
    """The modules outside of this package that registered what a config text names, sorted; `--import` takes them.

    What a script or a notebook registered by itself has no module to import.
    """
    names = {name for name in re.findall(r"@(?:\w+/)*(\w+)", text) if name in BY_NAME}
    modules = {_origin(BY_NAME[name].obj)[0] for name in names}
    return sorted(
        m for m in modules if m != "__main__" and m.partition(".")[0] not in ("", "jaxscale", "pallas_kernels")
    )


def meant(value: object, methods: Iterable[str] = ()) -> str:
    """Ends an error message where an instance belongs and a class, or its name, was given: `; write @AdamW()`.

    Nothing is said where what it makes lacks one of the methods that are wanted.
    """
    entry = BY_NAME.get(value) if isinstance(value, str) else behind_gin(value) or BY_ID.get(id(value))
    if entry is None:
        return ""
    made = entry.obj if isinstance(entry.obj, type) else type_hints(entry.obj).get("return", entry.obj)
    return f"; write @{entry.name}()" if all(hasattr(made, method) for method in methods) else ""


# --- names ------------------------------------------------------------------------------------------------------------


def find(selector: str) -> str | None:
    """gin's full selector of a name: ours first, else whatever gin alone knows; None when nobody does."""
    if selector in BY_NAME:
        return BY_NAME[selector].selector
    try:
        return configurable(selector).selector
    except (KeyError, ValueError):  # none of that name, or several and none of them ours
        return None


def configurable(selector: str) -> gin.config.Configurable:
    """gin's own entry of a name.

    Raises:
        KeyError, ValueError: None has it, or several have.
    """
    return ConfigurableReference(selector, False).configurable


def known(selector: str, where: str) -> str:
    """As `find`, for a name that was written at a place.

    Raises:
        ConfigError: Nobody knows it.
    """
    found = find(selector)
    if found is None:
        raise ConfigError(f"{where}: nothing is registered as '{selector}'{near(selector, BY_NAME, bindings=True)}")
    return found


def behind_gin(value: object) -> Entry | None:
    """The entry whose gin wrapper `value` is."""
    if isinstance(value, type):
        entry = BY_ID.get(id(value.__bases__[0])) if value.__bases__ else None
    else:
        entry = BY_ID.get(id(getattr(value, "__wrapped__", None)))
    if entry is None or configurable(entry.selector).wrapper is not value:
        return None
    return entry


def _origin(obj: Callable[..., Any]) -> tuple[str, str]:
    return getattr(obj, "__module__", None) or "", getattr(obj, "__qualname__", repr(obj))


def short(selector: str) -> str:
    """What configs call a full selector."""
    return _BY_SELECTOR[selector].name if selector in _BY_SELECTOR else selector


def name_of(key: Key) -> str:
    """A binding as it is written: `scope/Rotary.theta`, or a macro's name."""
    scope, selector, parameter = key
    return scope if selector == MACRO else f"{scope}/{short(selector)}.{parameter}".lstrip("/")


# --- references -------------------------------------------------------------------------------------------------------


class References(ParserDelegate):
    """Makes gin's references, from our names first. gin passes SyntaxErrors on as they are, hence their use here."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> ConfigurableReference:
        *scopes, last = scoped_selector.split("/")
        selector = None if last in _OF_GIN and last not in BY_NAME else find(last)
        if selector is None:
            raise SyntaxError(f"nothing is registered as '@{last}'{near(last, BY_NAME)}")
        return ConfigurableReference("/".join([*scopes, selector]), evaluate)


def macro_of(value: object) -> str | None:
    """The name of the macro that a reference reads, or None."""
    if isinstance(value, ConfigurableReference) and value.configurable.selector == MACRO:
        return "/".join(value.scopes)
    return None


def references(value: object) -> Iterator[ConfigurableReference]:
    """Every reference in a parsed value, however deep in containers."""
    if isinstance(value, ConfigurableReference):
        yield value
    elif isinstance(value, dict):
        yield from references([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from references(element)


def words(value: object) -> str:
    """A parsed value as gin text, with our short names in its references."""

    def reference(ref: object, path: tuple[str, ...]) -> str:
        if not isinstance(ref, ConfigurableReference):
            return repr(ref)
        if ref.configurable.selector in (MACRO, "gin.constant"):
            return "%" + "/".join(ref.scopes)
        return "@" + "/".join((*ref.scopes, short(ref.configurable.selector))) + "()" * ref.evaluate

    return literal(value, reference, ())
