"""The registry of objects that configs can name, and gin's references to them.

Each object is also registered with gin, under a selector of our own, so that gin's parser accepts the name.
`jaxscale.config` loads and evaluates configs; this module looks up names.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import gin
from gin.config import ConfigurableReference, ParserDelegate

from jaxscale.config_text import literal
from jaxscale.config_types import type_hints
from jaxscale.errors import ConfigError, near, nearest
from jaxscale.renamed import METHODS

MACRO = "gin.macro"

_OF_GIN = ("constant", "macro")
"""gin's objects for `%name`. They cannot be referenced, so that `@constant()` gets the hint `@Constant()`."""

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
    """Register a class or function, so that configs can refer to it as `@name`. Usable as a decorator.

    Args:
        obj: The class or function; omitted in `@register(name=...)`.
        name: Its name in configs; by default its `__name__`.

    Returns:
        The same object, unwrapped (it still pickles), or a decorator.

    Raises:
        ConfigError: The name belongs to another object, or the class defines a method by its old name.
    """
    if obj is None:
        return functools.partial(register, name=name)
    name = name or obj.__name__
    for method, new in METHODS.items():
        if method in getattr(obj, "__dict__", {}):
            raise ConfigError(f"{obj.__name__} defines '{method}', which is now called '{new}'; rename it")
    old = BY_NAME.get(name)
    reloaded = old is not None and _origin(old.obj) == _origin(obj)  # a module or a notebook cell run a second time
    if old is not None and old.obj is not obj and not reloaded:
        raise ConfigError(
            f"two objects are registered as '{name}': {'.'.join(_origin(old.obj))} and {'.'.join(_origin(obj))}; "
            "give one another name with register(name=...)"
        )
    # A full selector of our own keeps `constant` or `macro` apart from gin's objects of that name.
    selector = f"jaxscale_registry.{name}"
    with gin.config.interactive_mode(), gin.unlock_config():
        gin.register(selector)(obj)
    if old is not None:
        BY_ID.pop(id(old.obj), None)
    entry = Entry(name, obj, selector)
    BY_NAME[name] = _BY_SELECTOR[selector] = BY_ID[id(obj)] = entry
    return obj


def registered() -> dict[str, Callable[..., Any]]:
    """All registered objects by name, sorted by name."""
    return {name: BY_NAME[name].obj for name in sorted(BY_NAME)}


def own_modules(text: str) -> list[str]:
    """Modules outside jaxscale that registered names which a config uses, sorted; `--import` takes them.

    Args:
        text: gin text.

    Returns:
        Module names. Names registered by a script or a notebook (`__main__`) have no module to import.
    """
    names = {name for name in re.findall(r"@(?:\w+/)*(\w+)", text) if name in BY_NAME}
    modules = {_origin(BY_NAME[name].obj)[0] for name in names}
    return sorted(
        m for m in modules if m != "__main__" and m.partition(".")[0] not in ("", "jaxscale", "pallas_kernels")
    )


def meant(value: object, methods: Iterable[str] = (), takes: Mapping[str, Iterable[str]] = MappingProxyType({})) -> str:
    """The end of an error message about a class, or a name, where an instance is needed: `; write AdamW() (...)`.

    Args:
        value: The wrong value: a class, a function, its name, or with `methods` a word that nearly is one, as "adamw".
        methods: Methods that the instance needs; without all of them the hint is empty.
        takes: Parameters that one of these methods has: an optimizer and a schedule differ in those of `make`.
    """

    def fits(entry: Entry) -> bool:
        made = entry.obj if isinstance(entry.obj, type) else type_hints(entry.obj).get("return", entry.obj)
        return all(hasattr(made, method) for method in methods) and all(
            inspect.signature(getattr(made, method)).parameters.keys() >= set(names) for method, names in takes.items()
        )

    entry = BY_NAME.get(value) if isinstance(value, str) else behind_gin(value) or BY_ID.get(id(value))
    if entry is None and isinstance(value, str) and methods:
        words = nearest(value, [name for name, each in BY_NAME.items() if fits(each)])
        entry = BY_NAME[words[0]] if words else None
    if entry is None or not fits(entry):
        return ""
    name = entry.obj.__name__  # in Python that of a module or of a model's class may be the shorter one of configs
    return f"; write {name if name == f'{entry.name}Config' else entry.name}() (@{entry.name}() in gin)"


# --- names ------------------------------------------------------------------------------------------------------------


def find(selector: str) -> str | None:
    """Gin's full selector of a registered name, ours before gin's own; None if the name is not registered."""
    if selector in BY_NAME:
        return BY_NAME[selector].selector
    try:
        return configurable(selector).selector
    except (KeyError, ValueError):  # no object of that name, or several
        return None


def configurable(selector: str) -> gin.config.Configurable:
    """Gin's registry entry of a selector.

    Raises:
        KeyError, ValueError: No object has this name, or several have.
    """
    return ConfigurableReference(selector, False).configurable


def selector_of(name: str, place: str) -> str:
    """Gin's full selector of a name that stands at `place` in a config (`demo.gin:3`).

    Raises:
        ConfigError: The name is not registered.
    """
    selector = find(name)
    if selector is None:
        raise ConfigError(f"{place}: nothing is registered as '{name}'{near(name, BY_NAME, bindings=True)}")
    return selector


def behind_gin(value: object) -> Entry | None:
    """The registry entry whose gin wrapper `value` is, or None."""
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
    """The name in configs of a full selector."""
    return _BY_SELECTOR[selector].name if selector in _BY_SELECTOR else selector


def name_of(key: Key) -> str:
    """A binding in gin's notation: `scope/Rotary.theta`, or a macro's name."""
    scope, selector, parameter = key
    return scope if selector == MACRO else f"{scope}/{short(selector)}.{parameter}".lstrip("/")


# --- references -------------------------------------------------------------------------------------------------------


class References(ParserDelegate):
    """Creates gin's references while gin parses. It raises SyntaxError, which gin does not wrap."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> ConfigurableReference:
        """Create the reference `@scoped_selector`, or `@scoped_selector()` if `evaluate`."""
        *scopes, last = scoped_selector.split("/")
        selector = None if last in _OF_GIN and last not in BY_NAME else find(last)
        if selector is None:
            raise SyntaxError(f"nothing is registered as '@{last}'{near(last, BY_NAME)}")
        return ConfigurableReference("/".join([*scopes, selector]), evaluate)


def macro_of(value: object) -> str | None:
    """The name of the macro that a reference stands for, or None."""
    if isinstance(value, ConfigurableReference) and value.configurable.selector == MACRO:
        return "/".join(value.scopes)
    return None


def references(value: object) -> Iterator[ConfigurableReference]:
    """Every reference in a parsed value, nested containers included."""
    if isinstance(value, ConfigurableReference):
        yield value
    elif isinstance(value, dict):
        yield from references([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from references(element)


def words(value: object) -> str:
    """A parsed value in gin's notation, with short names in its references."""

    def reference(ref: object, path: tuple[str, ...]) -> str:
        if not isinstance(ref, ConfigurableReference):
            return repr(ref)
        if ref.configurable.selector in (MACRO, "gin.constant"):
            return "%" + "/".join(ref.scopes)
        return "@" + "/".join((*ref.scopes, short(ref.configurable.selector))) + "()" * ref.evaluate

    return literal(value, reference, ())
