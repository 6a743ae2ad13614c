"""Parsing of gin files and of `--gin.` options: statements with their places (`demo.gin:3`).

Only gin's parser is used. gin's file reader is not: it looks for an `include` in the working directory alone, reports
an error as a stack of excerpts, and imports whatever a file names.
"""

from __future__ import annotations

import importlib
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gin.config import ParserDelegate
from gin.config_parser import BindingStatement, BlockDeclaration, ConfigParser, ImportStatement, IncludeStatement

from jaxscale import reading
from jaxscale.config_registry import BY_NAME
from jaxscale.errors import ConfigError, near

Statement: TypeAlias = BindingStatement | BlockDeclaration | ImportStatement

# What gin's parser raises for malformed text; ValueError and TypeError come from invalid dicts and constants.
_MALFORMED = (SyntaxError, tokenize.TokenError, StopIteration, TypeError, ValueError, RecursionError)

_INCLUDES = 30
"""Deepest nesting of includes; it ends cycles through files with several names (`a/../a.gin`)."""

_BARE = re.compile(r"(?<==)\s*([A-Za-z_]\w*)(\(\))?\s*(#.*)?$")
"""A word without quotes and without `@`, at the end of a line."""


def read_file(
    path: Path, delegate: ParserDelegate, *, allow_imports: bool, parents: tuple[Path, ...] = ()
) -> Iterator[tuple[Statement, str]]:
    """Yield the statements of a file and of the files it includes, each with its place (`demo.gin:3`).

    Args:
        path: The file; an included one is looked up beside its parent, then in the working directory.
        delegate: Creates references; a statement is parsed only after the one before was handled.
        allow_imports: Whether `import` lines are executed and `include` lines followed.
        parents: The files that included this one, the outermost first.

    Raises:
        ConfigError: A file is missing or includes itself, or a line cannot be parsed or imported.
    """
    if parents and not path.is_absolute() and (parents[-1].parent / path).is_file():
        path = parents[-1].parent / path
    origin = f"{parents[-1]}: " if parents else ""
    if path in parents or len(parents) > _INCLUDES:
        raise ConfigError(f"{origin}'{path}' includes itself")
    if not path.is_file():
        others = [str(p) for folder in {path.parent, Path("experiments")} for p in folder.glob("*.gin")]
        others += [str(p.parent) for p in path.parent.glob("*/config.gin")]  # runs, which many commands take as well
        hint = near(str(path), others)
        if str(path) in BY_NAME:  # the name of a model's shape, for example
            hint = f"; it is the name of a setting's value: write a file with a line such as train.model = @{path}()"
        raise ConfigError(f"{origin}there is no config file '{path}'{hint}")
    try:
        text = reading.read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}config file '{path}' cannot be read: {error}") from None
    yield from _read(text, str(path), delegate, allow_imports, (*parents, path))


def read_text(text: str, delegate: ParserDelegate, *, allow_imports: bool) -> Iterator[tuple[Statement, str]]:
    """As `read_file`, for a string; the place of a single line is the line itself."""
    name = f"binding '{text.strip()}'" if "\n" not in text.strip() else "bindings"
    yield from _read(text, name, delegate, allow_imports, ())


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the options `--gin.NAME=VALUE` (or `--gin.NAME VALUE`) from the rest of a command line.

    A value that starts like a word and is not a gin literal is taken as a string, so that
    `--gin.Layout.mesh=data=2,tensor=4` needs no quotes.

    Args:
        argv: Arguments of the command line.

    Returns:
        `(bindings, rest)`: lines for `load`, and the other arguments in order.

    Raises:
        ConfigError: An option has no value, a malformed name or a malformed value.
    """
    bindings, rest, words = [], [], iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif not word.startswith("--gin."):
            rest.append(word)
        else:
            key, equals, value = word.removeprefix("--gin.").partition("=")
            if not equals:
                value = next(words, "--")
            if not equals and value.startswith("--"):
                raise ConfigError(f"{word} needs a value, as in {word}=...")
            bindings.append(f"{key} = {_as_literal(key, value.strip())}")
    return bindings, rest


def _read(
    text: str, name: str, delegate: ParserDelegate, allow_imports: bool, parents: tuple[Path, ...]
) -> Iterator[tuple[Statement, str]]:
    for statement in _parsed(text, name, delegate):
        place = name if name.startswith("binding '") else f"{name}:{statement.location.line_num}"
        if isinstance(statement, IncludeStatement):
            if not allow_imports:
                raise ConfigError(
                    f"{place}: include {reading.clipped(repr(statement.filename))} is refused, since this config may "
                    "not read other files; copy the lines of that file into it"
                )
            yield from read_file(Path(statement.filename), delegate, allow_imports=allow_imports, parents=parents)
            continue
        if isinstance(statement, ImportStatement):
            _import(statement, place, allow_imports)
        yield statement, place


def _import(statement: ImportStatement, place: str, allowed: bool) -> None:
    # `__gin__` modules turn on gin's "dynamic registration", which accepts names that our checks do not know.
    if not allowed or statement.module.startswith("__gin__"):
        why = "register objects in Python instead" if allowed else "this config may not import code"
        raise ConfigError(f"{place}: '{statement.format()}' is refused; {why}")
    try:
        importlib.import_module(statement.module)
    except ImportError as error:
        module = statement.module.partition(".")[0]
        hint = "" if error.name != module else f"; for a module of the current folder add --import {statement.module}"
        raise ConfigError(f"{place}: cannot import '{statement.module}': {error}{hint}") from None


def _parsed(text: str, name: str, delegate: ParserDelegate) -> Iterator[Any]:
    """Yield gin's statements; each is parsed only after the one before it was handled."""
    try:
        parser = ConfigParser(io.StringIO(text if text.endswith("\n") else text + "\n"), delegate)
    except _MALFORMED as error:
        raise _syntax_error(error, name) from None
    while True:
        try:
            # Not `next(parser)`: truncated text raises StopIteration, which would look like a complete one.
            statement = parser.parse_statement()
            reading.check_depth(getattr(statement, "value", None))
        except _MALFORMED as error:
            raise _syntax_error(error, name) from None
        if statement is None:
            return
        yield statement


class _NoReferences(ParserDelegate):
    """Accepts any reference, to test whether text is well formed before anything is registered."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> None:
        return None

    def macro(self, name: str) -> None:
        return None


def _syntax_error(error: Exception, name: str) -> ConfigError:
    message, line = "the text ends too early", None
    if isinstance(error, SyntaxError):
        message, line = (error.msg or "cannot be parsed").split("\n")[0].rstrip(". "), error.lineno
        bare = _BARE.search(error.text or "") if message.startswith("malformed node") else None
        if bare:
            message = f"'{bare[1]}' is not a value; write @{bare[1]}() for a registered object or '{bare[1]}' quoted"
        elif error.text and error.text.strip():
            message += f" in '{error.text.strip()}'"
    elif isinstance(error, RecursionError):
        message = f"a value is nested more than {reading.DEPTH} deep"
    elif isinstance(error, tokenize.TokenError):
        message, (line, _) = error.args
    elif not isinstance(error, StopIteration):
        message = str(error).split("\n")[0]
    place = name if line is None or name.startswith("binding '") else f"{name}:{line}"
    return ConfigError(f"{reading.clipped(place)}: {reading.clipped(message, 300)}")


def _as_literal(key: str, value: str) -> str:
    """A command-line value in gin's notation: unchanged if gin can parse it, quoted if it is a plain word."""
    for part, text in (("name", f"{key} = 0"), ("value", f"_ = {value}")):
        try:
            parser = ConfigParser(text + "\n", _NoReferences())
            parser.parse_statement()
            well_formed = parser.parse_statement() is None
        except _MALFORMED:
            well_formed = False
        if not well_formed and (part == "name" or value[:1] in tuple("@%([{'\"")):
            call = re.search(r"@[\w./]*?([\w.]+)\((\w+)=", value)
            hint = f"; set arguments apart: @{call[1]}() and --gin.{call[1]}.{call[2]}=..." if call else ""
            raise ConfigError(f"the {part} of --gin.{key}={value} cannot be parsed{hint}")
    return value if well_formed else repr(value)
