"""Reading untrusted files: pipes, devices and deeply nested JSON raise an error and never block or crash.

All functions raise OSError or ValueError with a message that completes the sentence "FILE cannot be read: ...".
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
"""Deepest nesting of lists and objects that is accepted; deeper ones could end in a RecursionError later."""

LARGEST = 2**53
"""Largest integer that is accepted; larger ones are inexact in floats or overflow in arrays."""

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
_BAD_NUMBER = re.compile(r"Exceeds the limit .* for integer string conversion.*")


def read_bytes(path: Path, size: int | None = None) -> bytes:
    """Read a regular file, or a symbolic link to one.

    Args:
        path: the file.
        size: the expected size in bytes, checked before anything is read.

    Raises:
        OSError: the file does not exist, is not a regular file, or has another size; `strerror` says which.
    """
    with open_file(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if size is not None and actual != size:
            raise OSError(errno.EINVAL, f"it has {actual} bytes and not {size}", str(path))
        return file.read()


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading, in binary mode.

    Raises:
        OSError: the file does not exist, or is not a regular file.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block otherwise
    except ValueError as e:  # a NUL or a lone surrogate in the name
        raise OSError(errno.EINVAL, f"its name is invalid: {e}", ascii(str(path))) from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind} and not a file", str(path))
    return os.fdopen(number, "rb")


def leads_out(path: Path) -> bool:
    """Whether a file is a symbolic link to a place outside its folder."""
    try:
        return path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError):  # a link to itself; opening it fails as well
        return False


def check_own(path: Path) -> None:
    """Check that a file is not a link out of its folder, by which a download could read any file of this machine.

    Raises:
        OSError: it is one.
    """
    if leads_out(path):
        raise OSError(errno.EINVAL, "it is a link out of its folder; copy the file into it", str(path))


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a regular file as UTF-8.

    Args:
        path: the file.
        errors: what to do with invalid bytes, as for `bytes.decode`.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not UTF-8, and `errors` is "strict".
    """
    return decoded(read_bytes(path), errors)


def decoded(data: bytes, errors: str = "strict") -> str:
    """Decode UTF-8; arguments and `ValueError` as of `read_text`."""
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is not UTF-8") from None


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON.

    Args:
        text: the JSON.
        unique: refuse objects with duplicate keys; by default the last one counts.

    Raises:
        ValueError: it is not JSON, or nested deeper than `DEPTH`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is not UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError as e:
        raise ValueError("it has a number of thousands of digits" if _BAD_NUMBER.match(str(e)) else str(e)) from None
    check_depth(value)
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not JSON, or not an object.
    """
    fields = parse_json(read_bytes(path))
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    return fields


def check_depth(value: Any) -> None:
    """Raise ValueError for lists, tuples and dicts nested deeper than `DEPTH`."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [x for v in level if isinstance(v, dict) for x in v.values()] + [
            x for v in level if isinstance(v, list | tuple) for x in v
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def clipped(text: str, most: int = 200) -> str:
    """Untrusted text for a message, shortened in the middle to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 20]} ... {text[-12:]}"


def is_whole(value: Any, least: int = 0) -> TypeGuard[int]:
    """Whether a value is an int (not a bool) from `least` to `LARGEST`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


_TOO_DEEP = f"it is nested more than {DEPTH} deep"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return fields
