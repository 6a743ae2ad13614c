"""Digests of files, so that damage and edits by hand are seen before anything is used.

  chunks   a fast digest of each (`DIGESTS`), listed in a file that has a SHA-256 of its own
  JSON     `sealed`: an envelope around the body; `seal_json`: the body itself, with its SHA-256 as its last key
  text     `seal_text`: a comment before it says that it is sealed, one behind it has its SHA-256
  lines    `seal_line`: every JSON line of a file that grows ends in its CRC-32

A file of an older version has none of these and is read as it is. A sealed one says so in two places, so that what
loses one of them is damaged, not old.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

from jaxscale import reading
from jaxscale.errors import DamagedFile

DIGESTS: dict[str, Callable[[Any], str]] = {"crc32": lambda data: f"{zlib.crc32(data):08x}"}
"""By name, the hex digest of a chunk's bytes (a uint8 array or anything else with a buffer)."""

try:
    import xxhash

    DIGESTS["xxh3_64"] = xxhash.xxh3_64_hexdigest
except ImportError:  # the standard library's is slower; what lists the digests says which was used
    pass

NEW = "xxh3_64" if "xxh3_64" in DIGESTS else "crc32"
"""Of chunks that are written now."""

_MARK, _SUM, _CRC = "sealed", "sha256", "crc32"
_HEAD = "# sealed: the last line is the SHA-256 of what is above it; jaxscale takes an edit with --accept-edits\n"
_TAIL = "# sha256 "


def sealed(body: dict[str, Any]) -> str:
    """A JSON text that holds `body` and its SHA-256."""
    return json.dumps({"sha256": _sha256(body), "body": body}, indent=1) + "\n"


def unsealed(text: str) -> dict[str, Any]:
    """What `sealed` took.

    Raises:
      ValueError: the text is not JSON, or not what was written.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("body"), dict):
        raise ValueError("it is not a sealed text")
    if found.get("sha256") != _sha256(found["body"]):
        raise ValueError("its SHA-256 is not that of its text")
    return found["body"]


def seal_json(body: dict[str, Any], indent: int | None = None) -> str:
    """`body` as a JSON object of the same keys, and with its SHA-256."""
    plain = json.loads(json.dumps({_MARK: _SUM, **body}))  # keys and sequences as a reader will have them
    return json.dumps({**plain, _SUM: _sha256(plain)}, indent=indent) + "\n"


def open_json(data: bytes) -> tuple[dict[str, Any], bool]:
    """The body that `seal_json` took, and whether it was sealed.

    Raises:
      DamagedFile: it is no JSON object, or not the one that was written.
    """
    try:
        found = reading.parse_json(data)
    except ValueError as e:
        raise DamagedFile(f"{e}") from None
    if not isinstance(found, dict):
        raise DamagedFile("it is no JSON object")
    digest, mark = found.pop(_SUM, None), _MARK in found
    if not mark and digest is None:
        return found, False
    if digest != _sha256(found):
        raise DamagedFile("its SHA-256 is not that of its content", found)
    found.pop(_MARK, None)
    return found, True


def seal_text(text: str) -> str:
    """A text whose comments begin with `#`, between two that seal it."""
    whole = _HEAD + text
    return f"{whole}{_TAIL}{hashlib.sha256(whole.encode()).hexdigest()}\n"


def open_text(data: bytes) -> tuple[str, bool]:
    """The text that `seal_text` took, and whether it was sealed.

    Raises:
      DamagedFile: it is not UTF-8, or not what was written.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise DamagedFile(f"byte {e.start} is no UTF-8") from None
    plain = unmarked(text)
    if plain == text:
        return text, False
    if seal_text(plain) != text:
        raise DamagedFile("its SHA-256 is not that of its text", plain)
    return plain, True


def unmarked(text: str) -> str:
    """A text without the lines that seal it, right or wrong; one that has none, as it is."""
    first, *others = text.split("\n")
    head = [] if any(words in first for words in (_HEAD[:22], _HEAD[-50:-1])) else [first]
    return "\n".join([*head, *(line for line in others if _TAIL.strip("# ") not in line[: len(_TAIL) - 1])])


def seal_line(row: dict[str, Any]) -> bytes:
    """One line of JSON, its end included, that ends in the CRC-32 of what is before it."""
    body = json.dumps(row)[:-1].encode()
    return b'%s%s"%s": "%08x"}\n' % (body, b", " if row else b"", _CRC.encode(), zlib.crc32(body))


class Lines:
    """Reads a file of `seal_line`s as it grows; each line once.

    A line that a kill has torn is no damage: it is the last, or one that an older version has added others to.
    """

    def __init__(self) -> None:
        self.sealed = False
        self._rest = b""
        self._number = 0
        self._old: bool | None = None  # whether the file begins with lines that have no digest
        self._damaged: dict[int, dict[str, Any] | None] = {}
        self._unreadable: list[int] = []

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Takes what was added to the file; those of its whole lines that are what was written."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        rows = [self._row(line) for line in whole]
        return [row for row in rows if row is not None]

    def end(self, rest: bytes | None = None) -> list[dict[str, Any]]:
        """The last line where only its end is missing or wrong; nothing where a kill has torn it.

        Args:
          rest: what stands behind the last whole line, where that was not fed.
        """
        rest = self._rest if rest is None else rest
        for line in (rest, rest[:-1]):
            row, good = _checked(line)
            if row is not None and (good or good is None and not self.sealed):
                return [row]
        return []

    @property
    def damaged(self) -> dict[int, dict[str, Any] | None]:
        """By number, from 1, the lines that are not what was written: their rows, `None` where one is not even JSON."""
        return self._damaged | ({} if self._old else dict.fromkeys(self._unreadable))

    def _row(self, line: bytes) -> dict[str, Any] | None:
        self._number += 1
        row, good = _checked(line)
        if row is None:
            if self.sealed:
                self._damaged[self._number] = None
            elif line.strip():
                self._unreadable.append(self._number)
            return None
        if good is False or good is None and self.sealed:
            self._damaged[self._number] = row
            return None
        self._old = good is None if self._old is None else self._old
        self.sealed |= good is True
        return row


def _checked(line: bytes) -> tuple[dict[str, Any] | None, bool | None]:
    """The row of a line, if it is one, and whether its digest agrees; `None` where it has none."""
    try:
        row = reading.parse_json(line)
    except ValueError:
        return None, None
    if not isinstance(row, dict):
        return None, None
    if _CRC not in row:
        return row, None
    digest = row.pop(_CRC)
    return row, digest == f"{zlib.crc32(json.dumps(row)[:-1].encode()):08x}"


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
