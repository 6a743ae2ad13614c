"""gin text as statements with their places, files included, and the `--gin.` options of a command line.

Only gin's parser is used here: its reader of files looks for an `include` in the working directory alone and reports
an error as a stack of excerpts, and it imports whatever a file names.
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
from jaxscale.errors import ConfigError, near

Statement: TypeAlias = BindingStatement | BlockDeclaration | ImportStatement

# What gin's parser raises at a malformed text; a ValueError or TypeError comes from an impossible dict or constant.
_MALFORMED = (SyntaxError, tokenize.TokenError, StopIteration, TypeError, ValueError, RecursionError)

_INCLUDES = 30
"""Files may include one another so deep; a file may have many names, such as `a/../a.gin`."""

_BARE = re.compile(r"(?<==)\s*([A-Za-z_]\w*)(\(\))?\s*(#.*)?$")
"""A word without quotes or an `@`, at the end of a line."""


def read_file(
    path: Path, delegate: ParserDelegate, *, allow_imports: bool, parents: tuple[Path, ...] = ()
) -> Iterator[tuple[Statement, str]]:
    """The statements of a file and of what it includes, each with its place (`demo.gin:3`).

    Args:
        path: The file; an included one is looked up beside its parent, then in the working directory.
        delegate: Makes references; asked for a statement only after the one before was handled.
        allow_imports: Whether `import` lines are executed and `include` lines followed.
        parents: The files that led here.

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
        raise ConfigError(f"{origin}there is no config file '{path}'{near(str(path), others)}")
    try:
        text = reading.read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}config file '{path}' cannot be read: {error}") from None
    yield from _read(text, str(path), delegate, allow_imports, (*parents, path))


def read_text(text: str, delegate: ParserDelegate, *, allow_imports: bool) -> Iterator[tuple[Statement, str]]:
    """As `read_file`, of a text; the place of a single line is the line itself."""
    name = f"binding '{text.strip()}'" if "\n" not in text.strip() else "bindings"
    yield from _read(text, name, delegate, allow_imports, ())


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes the `--gin.NAME=VALUE` (or `--gin.NAME VALUE`) options out of a command line.

    A value that is no gin literal but starts like a word is taken as a string, so `--gin.Layout.mesh=data=2,tensor=4`
    needs no quotes inside quotes.

    Args:
        argv: The command line's words.

    Returns:
        `(bindings, rest)`: lines for `load`, and the other words in their order.

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
            key, given, value = word.removeprefix("--gin.").partition("=")
            if not given:
                value = next(words, "--")
            if not given and value.startswith("--"):
                raise ConfigError(f"{word} needs a value, as in {word}=...")
            bindings.append(f"{key} = {_as_literal(key, value.strip())}")
    return bindings, rest


def _read(
    text: str, name: str, delegate: ParserDelegate, allow_imports: bool, parents: tuple[Path, ...]
) -> Iterator[tuple[Statement, str]]:
    for statement in _parsed(text, name, delegate):
        where = name if name.startswith("binding '") else f"{name}:{statement.location.line_num}"
        if isinstance(statement, IncludeStatement):
            if not allow_imports:
                raise ConfigError(
                    f"{where}: include {reading.clipped(repr(statement.filename))} is refused; this config may not "
                    "read other files; write the lines of that one here"
                )
            yield from read_file(Path(statement.filename), delegate, allow_imports=allow_imports, parents=parents)
            continue
        if isinstance(statement, ImportStatement):
            _import(statement, where, allow_imports)
        yield statement, where


def _import(statement: ImportStatement, where: str, allowed: bool) -> None:
    # gin's "dynamic registration" would make objects configurable that we have neither types nor names of.
    if not allowed or statement.module.startswith("__gin__"):
        why = "register objects in Python instead" if allowed else "this config may not import code"
        raise ConfigError(f"{where}: '{statement.format()}' is refused; {why}")
    try:
        importlib.import_module(statement.module)
    except ImportError as error:
        module = statement.module.partition(".")[0]
        hint = "" if error.name != module else f"; for a module of the current folder add --import {statement.module}"
        raise ConfigError(f"{where}: cannot import '{statement.module}': {error}{hint}") from None


def _parsed(text: str, name: str, delegate: ParserDelegate) -> Iterator[Any]:
    """gin's statements of a text, each parsed only after the one before it has been handled."""
    try:
        parser = ConfigParser(io.StringIO(text if text.endswith("\n") else text + "\n"), delegate)
    except _MALFORMED as error:
        raise _syntax_error(error, name) from None
    while True:
        try:
            # Not `next(parser)`: a text that ends too early raises StopIteration, which would look like its end.
            statement = parser.parse_statement()
            reading.check_depth(getattr(statement, "value", None))
        except _MALFORMED as error:
            raise _syntax_error(error, name) from None
        if statement is None:
            return
        yield statement


class _NoReferences(ParserDelegate):
    """Accepts any reference: for asking whether a text is well formed before anything is registered."""

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
            message = f"'{bare[1]}' is no value; write @{bare[1]}() for what is registered, or '{bare[1]}' for a text"
        elif error.text and error.text.strip():
            message += f" in '{error.text.strip()}'"
    elif isinstance(error, RecursionError):
        message = f"a value is nested more than {reading.DEPTH} deep"
    elif isinstance(error, tokenize.TokenError):
        message, (line, _) = error.args
    elif not isinstance(error, StopIteration):
        message = str(error).split("\n")[0]
    where = name if line is None or name.startswith("binding '") else f"{name}:{line}"
    return ConfigError(f"{reading.clipped(where)}: {reading.clipped(message, 300)}")


def _as_literal(key: str, value: str) -> str:
    """A command line value as gin text: itself when gin can read it, quoted when it is a bare word."""
    for part, text in (("name", f"{key} = 0"), ("value", f"_ = {value}")):
        try:
            parser = ConfigParser(text + "\n", _NoReferences())
            parser.parse_statement()
            well_formed = parser.parse_statement() is None
        except _MALFORMED:
            well_formed = False
        if not well_formed and (part == "name" or value[:1] in tuple("@%([{'\"")):
            raise ConfigError(f"the {part} of --gin.{key}={value} cannot be parsed")
    return value if well_formed else repr(value)
