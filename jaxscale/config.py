"""Configuration by gin: library objects are registered, gin files are parsed and checked, entry points are called.

gin's own parser and registry are used; its evaluation is not. gin wraps every referenced function and class, adds
"In call to configurable ..." to whatever is raised inside, and reads bindings again at each call, so that values
change under a trace and a wrapped function no longer equals, hashes or pickles like the original. Here references
are resolved once, when `call` runs: a function is itself, or a `Bound` where the config binds some of its arguments.

    from jaxscale import config
    snapshot = config.load(["experiments/demo.gin"], ["train.steps = 200"])
    run = config.call("train")
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gin
from gin.config import ConfigurableReference
from gin.config_parser import BindingStatement, BlockDeclaration, ImportStatement

from jaxscale import reading
from jaxscale.config_check import Binding, check
from jaxscale.config_parse import Statement, read_file, read_text, split_overrides
from jaxscale.config_registry import (
    BY_ID,
    BY_NAME,
    MACRO,
    Key,
    References,
    behind_gin,
    configurable,
    find,
    macro_of,
    meant,
    name_of,
    own_modules,
    register,
    registered,
    selector_of,
    short,
    words,
)
from jaxscale.config_text import LOST, Inexpressible, Parts, Text, Writer, literal
from jaxscale.config_types import parameters
from jaxscale.errors import ConfigError, JaxscaleError, near

__all__ = ["REQUIRED", "Bound", "Text", "call", "clear", "dumps", "isolated", "load", "lost", "meant", "parse"]
__all__ += ["own_modules", "raw", "register", "registered", "resolve", "split_overrides", "text", "unused", "unwrap"]

REQUIRED = gin.REQUIRED

_BINDINGS: dict[Key, Binding] = {}
_READ: set[Key] = set()


class Bound(functools.partial[Any]):
    """A registered function with arguments bound by a config: a `functools.partial` that compares by value."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, functools.partial):
            return NotImplemented
        return (self.func, self.args, self.keywords) == (other.func, other.args, other.keywords)

    def __hash__(self) -> int:
        return hash((self.func, self.args, tuple(sorted(self.keywords))))


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    files: Iterable[str | Path] = (),
    bindings: Iterable[str] = (),
    *,
    allow_imports: bool = True,
    partial: bool = False,
) -> str:
    """Replace the current config by files and then bindings, and check names and types.

    Args:
        files: gin files; an `include` is looked up beside the including file, then in the working directory.
        bindings: Lines such as `train.lr = 3e-4`, or whole gin texts; they override files.
        allow_imports: Whether `import my_module` lines are executed and `include` lines followed. Pass False for
            untrusted text, such as the `config.gin` of another person's run.
        partial: Whether scopes may have no bindings, in text that lacks values from Python (see `lost`).

    Returns:
        A snapshot: gin text that restores this config in another process, by `load(bindings=[snapshot])`.

    Raises:
        ConfigError: A file is missing, a line cannot be parsed, a name is unknown or a value has the wrong type.
    """
    clear()
    imports: dict[str, None] = {}
    try:
        read = [read_file(Path(file), References(), allow_imports=allow_imports) for file in files]
        read += [read_text(text, References(), allow_imports=allow_imports) for text in bindings]
        for statement, place in itertools.chain.from_iterable(read):
            if isinstance(statement, ImportStatement):
                imports[statement.format()] = None
            _bind(statement, place)
        try:
            check(_BINDINGS, partial=partial)
        except RecursionError:
            raise ConfigError("a macro of the config refers to itself without end") from None
        for key, binding in _BINDINGS.items():
            gin.bind_parameter(key, binding.value)  # so that gin.query_parameter sees the same config
    except BaseException:
        clear()
        raise
    return "".join([f"{line}\n" for line in imports] + sorted(map(_line, _BINDINGS), key=_macros_first))


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Context manager that restores the current config at its end, whatever is loaded inside."""
    bindings, read = dict(_BINDINGS), set(_READ)
    try:
        yield
    finally:
        clear()
        _BINDINGS.update(bindings)
        _READ.update(read)
        for key, binding in bindings.items():
            gin.bind_parameter(key, binding.value)


def clear() -> None:
    """Remove every binding; registered objects stay registered."""
    gin.clear_config()
    _BINDINGS.clear()
    _READ.clear()


def call(name: str, /, **kwargs: object) -> object:
    """Call a registered object with the arguments that the config binds.

    Args:
        name: `train`, or `scope/train` to use the bindings of a scope.
        **kwargs: Arguments that override bindings.

    Returns:
        What the object returns. Its exceptions are not wrapped.

    Raises:
        ConfigError: The name is unknown, or an argument without a default is neither bound nor passed.
    """
    *scopes, last = name.split("/")
    selector = find(last)
    if selector is None:
        raise ConfigError(f"nothing is registered as '{last}'{near(last, BY_NAME)}")
    try:
        values = _arguments(selector, tuple(scopes), kwargs)
    except RecursionError:
        raise ConfigError(f"the config of '{name}' refers to itself without end") from None
    return _build(configurable(selector).wrapped, selector, tuple(scopes), {**values, **kwargs})


def unused() -> list[str]:
    """Names of bindings that no `call` has read since the config was loaded (`model/Rotary.theta`), macros included."""
    return sorted(name_of(key) for key in _BINDINGS if key not in _READ)


def _bind(statement: Statement, place: str) -> None:
    """Store a parsed statement in the bindings; a later one replaces an earlier one of the same name."""
    if isinstance(statement, BlockDeclaration):
        selector_of(statement.selector, place)
    elif isinstance(statement, BindingStatement):
        scope, selector, parameter, value, _ = statement
        if parameter:
            key = (scope, selector_of(selector, place), parameter)
        else:
            key = ("/".join(filter(None, (scope, selector))), MACRO, "value")
        _BINDINGS[key] = Binding(value, place)


def _line(key: Key) -> str:
    return f"{name_of(key)} = {words(_BINDINGS[key].value)}\n"


def _macros_first(line: str) -> tuple[bool, str]:
    return "." in line.split(" = ")[0], line


def unwrap(value: typing.Any) -> typing.Any:
    """Return the function or class inside gin's wrapper.

    Args:
        value: Anything.

    Returns:
        The registered object if `value` is gin's wrapper of it and nothing is bound for it; else `value`.
    """
    entry = behind_gin(value)
    if entry is None or any(selector == entry.selector for _, selector, _ in _BINDINGS):
        return value
    return entry.obj


# --- unresolved values ------------------------------------------------------------------------------------------------


def raw(name: str) -> object:
    """Return the value that the loaded config binds, with references as `Text` and macros replaced by their values.

    Args:
        name: A binding, such as `sweep.axes`, or a macro.

    Raises:
        ConfigError: The config does not bind it.
    """
    scope, _, last = name.rpartition("/")
    selector, dot, parameter = last.rpartition(".")
    key = (scope, find(selector) or selector, parameter) if dot else (name, MACRO, "value")
    if key not in _BINDINGS:
        raise ConfigError(f"nothing binds '{name}'{near(name, map(name_of, _BINDINGS))}")
    _READ.add(key)
    return _unresolved(_BINDINGS[key].value)


def parse(text: str) -> object:
    """Return the value of a gin literal, with references as `Text`; the inverse of `text`.

    Args:
        text: gin's notation of one value, such as `(1, @AdamW())`.

    Raises:
        ConfigError: It cannot be parsed, or refers to an unregistered name.
    """
    return _unresolved(_value(text))


def text(value: object) -> str:
    """Return a value in gin's notation.

    Args:
        value: A number, string, bool, `None` or `Text`, or containers of these.

    Raises:
        ConfigError: It contains something else.
    """
    try:
        return literal(value, _no_words, ())
    except Inexpressible:
        raise ConfigError(f"{value!r} is no gin literal; write it as a reference, such as Text('@Lion()')") from None


def resolve(text: str) -> object:
    """Evaluate a value in gin's notation under the loaded config.

    Args:
        text: One value: `@Lion()` is an instance, `@Lion` the class.
    """
    return _resolve(_value(text), ())


def _value(text: str) -> object:
    [(statement, _)] = read_text(f"_ = {text}", References(), allow_imports=False)
    return statement.value


def _no_words(value: object, path: tuple[str, ...]) -> str:
    raise Inexpressible


def _unresolved(value: object) -> typing.Any:
    if type(value) is list:
        return [_unresolved(v) for v in value]
    if type(value) is tuple:
        return tuple(_unresolved(v) for v in value)
    if type(value) is dict:
        return {_unresolved(k): _unresolved(v) for k, v in value.items()}
    macro = macro_of(value)
    if macro is not None and (macro, MACRO, "value") in _BINDINGS:
        _READ.add((macro, MACRO, "value"))
        return _unresolved(_BINDINGS[macro, MACRO, "value"].value)
    return Text(words(value)) if isinstance(value, ConfigurableReference) else value


# --- writing ----------------------------------------------------------------------------------------------------------


def dumps(name: str, values: dict[str, object]) -> str:
    """Return gin text that binds arguments of the registered object `name`, with every field written out.

    Literals are written as such (a dtype and a path as strings), instances of registered dataclasses as scoped
    references, registered functions and classes as references, partials of them as scoped references. Anything else
    becomes a comment, which `lost` lists.

    Args:
        name: The registered object, such as `train`.
        values: Its keyword arguments.

    Returns:
        Sorted text; after `load(bindings=[text])`, `call(name)` passes equal values.
    """
    return Writer(name, values, _parts).text()


def lost(text: str) -> list[str]:
    """Names of the arguments that `dumps` could not write, such as `train.model.attention`.

    Args:
        text: What `dumps` returned.
    """
    return re.findall(rf"^# (\S+) = .*: {LOST}$", text, re.MULTILINE)


def _parts(value: object) -> Parts:
    """Registered name, arguments, and whether the reference is called, of a value made from a registered object."""
    if hasattr(type(value), "specification"):  # a placed layout; a config cannot hold devices
        value = value.specification  # type: ignore[attr-defined]
    if isinstance(value, functools.partial) and not value.args:
        name, values, evaluate = _parts(value.func)
        if not evaluate:
            return name, {**values, **value.keywords}, False
    elif entry := BY_ID.get(id(value)):
        return entry.name, {}, False
    elif entry := behind_gin(value):
        return entry.name, _arguments(entry.selector, (), ()), False
    elif (entry := BY_ID.get(id(type(value)))) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields")):
        names = [n for n, p in parameters(entry.obj).items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if all(hasattr(value, n) for n in names):
            return entry.name, {n: getattr(value, n) for n in names}, True
    raise Inexpressible


# --- evaluating -------------------------------------------------------------------------------------------------------


def _build(obj: Callable[..., Any], selector: str, scopes: tuple[str, ...], values: dict[str, object]) -> object:
    """Call `obj`, or raise `ConfigError` where an argument without a default is missing."""
    name = "/".join((*scopes, short(selector)))
    if missing := ", ".join(sorted(getattr(obj, "__abstractmethods__", ()))):
        raise ConfigError(f"'{name}' cannot be made: its class has to define {missing}")
    for parameter in parameters(obj).values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = values.get(parameter.name, parameter.default)
        if default is inspect.Parameter.empty or default is REQUIRED:
            raise ConfigError(
                f"'{name}' needs '{parameter.name}', which nothing binds; add a line '{name}.{parameter.name} = ...'"
                f" or the option --gin.{name}.{parameter.name}=..."
            )
    try:
        if selector.startswith("gin."):  # gin's singleton is told its name by the active scope
            with gin.config_scope(list(scopes)):
                return obj(**values)
        return obj(**values)
    except JaxscaleError as error:
        error.args = tuple(_without_long(arg, values.values()) for arg in error.args)
        raise


def _without_long(message: object, values: Iterable[object]) -> object:
    """An error message with long strings of the config shortened."""
    for value in values:
        if isinstance(message, str) and isinstance(value, str) and len(value) > 200:
            message = message.replace(value, reading.clipped(value))
    return message


def _arguments(selector: str, scopes: tuple[str, ...], overridden: Iterable[str]) -> dict[str, object]:
    """Arguments that the config binds for an object in some scopes, references resolved; inner scopes win.

    `overridden` arguments are left out, and their bindings do not count as read.
    """
    winners: dict[str, Key] = {}
    for depth in range(len(scopes) + 1):
        scope = "/".join(scopes[:depth])
        winners |= {key[2]: key for key in _BINDINGS if key[:2] == (scope, selector)}
    for parameter in overridden:
        winners.pop(parameter, None)
    _READ.update(winners.values())
    return {parameter: _resolve(_BINDINGS[key].value, scopes) for parameter, key in winners.items()}


def _resolve(value: object, scopes: tuple[str, ...]) -> object:
    """A parsed value with all references in it evaluated."""
    if type(value) is list:
        return [_resolve(v, scopes) for v in value]
    if type(value) is tuple:
        return tuple(_resolve(v, scopes) for v in value)
    if type(value) is dict:
        return {_resolve(k, scopes): _resolve(v, scopes) for k, v in value.items()}
    if not isinstance(value, ConfigurableReference):
        return value
    if macro := macro_of(value):
        _READ.add((macro, MACRO, "value"))
        return _resolve(_BINDINGS[macro, MACRO, "value"].value, scopes)
    if value.configurable.selector == "gin.constant":
        return value.scoped_configurable_fn()
    # As in gin, a scope written at a reference replaces the current one; without, the current one is inherited.
    inner = tuple(value.scopes) or scopes
    obj, selector = value.configurable.wrapped, value.configurable.selector
    if value.evaluate:
        return _build(obj, selector, inner, _arguments(selector, inner, ()))
    values = _arguments(selector, inner, ())
    return Bound(obj, **values) if values else obj
