"""Reading files that others wrote: a pipe, a device or an endless nesting is an error and never a wait or a crash.

Everything here raises OSError or ValueError with a message that completes the sentence "FILE cannot be read: ...".
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import IO, Any, TypeGuard

DEPTH = 100
"""Lists and objects in a text may be nested so deep; deeper ones end in a RecursionError at some place or other."""

LARGEST = 2**53
"""Whole numbers up to this are numbers; larger ones overflow in floats and arrays."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
_BAD_NUMBER = re.compile(r"Exceeds the limit .* for integer string conversion.*")


def read_bytes(path: Path, size: int | None = None) -> bytes:
    """The content of a regular file (a symbolic link to one is one).

    Args:
        path: the file.
        size: the size it has to have, checked before anything is read.

    Raises:
        OSError: there is none, it is something else (`strerror` says what), or of another size.
    """
    with open_file(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if size is not None and actual != size:
            raise OSError(errno.EINVAL, f"it has {actual} bytes and not {size}", str(path))
        return file.read()


def open_file(path: Path) -> IO[bytes]:
    """A regular file, open to be read.

    Raises:
        OSError: there is none, or it is something else.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe, opening alone would wait
    except ValueError as e:  # a NUL in its name, or half a character
        raise OSError(errno.EINVAL, f"its name cannot be one: {e}", ascii(str(path))) from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind} and no file", str(path))
    return os.fdopen(number, "rb")


def leads_out(path: Path) -> bool:
    """Whether a file is a link to a place outside of its folder."""
    try:
        return path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError):  # a link to itself, which cannot be opened either
        return False


def check_own(path: Path) -> None:
    """That a file of a folder is not a link to something else on this machine, such as somebody's passwords.

    Raises:
        OSError: it is.
    """
    if leads_out(path):
        raise OSError(errno.EINVAL, "it is a link out of its folder; copy the file into it", str(path))


def read_text(path: Path, errors: str = "strict") -> str:
    """The same, as UTF-8.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is no UTF-8, and `errors` is "strict".
    """
    try:
        return read_bytes(path).decode("utf-8", errors)
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is no UTF-8") from None


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: of JSON.
        unique: refuse an object that has a key twice; otherwise the last one counts.

    Raises:
        ValueError: it is none, or nested deeper than `DEPTH`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is no UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError as e:
        raise ValueError("it has a number of thousands of digits" if _BAD_NUMBER.match(str(e)) else str(e)) from None
    check_depth(value)
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it holds no JSON, or no object.
    """
    fields = parse_json(read_bytes(path))
    if not isinstance(fields, dict):
        raise ValueError("it holds no object")
    return fields


def check_depth(value: Any) -> None:
    """Raises ValueError for lists, tuples and dicts nested deeper than `DEPTH`."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [x for v in level if isinstance(v, dict) for x in v.values()] + [
            x for v in level if isinstance(v, list | tuple) for x in v
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def clipped(text: str, most: int = 200) -> str:
    """A text of somebody else's for a message, its middle left out where it is long."""
    return text if len(text) <= most else f"{text[: most - 20]} ... {text[-12:]}"


def is_whole(value: Any, least: int = 0) -> TypeGuard[int]:
    """Whether a value is a whole number from `least` on that arrays and floats can hold, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


_TOO_DEEP = f"it is nested more than {DEPTH} deep"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return fields
