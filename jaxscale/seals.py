"""Digests of files ("seals"), so that damage and edits by hand are noticed before a file is used.

  chunks   a fast digest of each (`DIGESTS`), listed in a file with its own SHA-256
  JSON     `sealed`: an envelope around the body; `seal_json`: the body itself, with its SHA-256 as the last key
  text     `seal_text`: a comment at the top marks it as sealed, one at the end has its SHA-256
  lines    `seal_line`: every JSON line of a growing file ends with its CRC-32

Files of older versions have none of these and are accepted. A sealed file is marked in two places, so that one that
lost either mark counts as damaged and not as old.
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
"""Functions by name, from a chunk's bytes (a uint8 array, or any object with the buffer protocol) to a hex digest."""

try:
    import xxhash

    DIGESTS["xxh3_64"] = xxhash.xxh3_64_hexdigest
except ImportError:  # zlib's CRC is slower; the list of digests names the function that was used
    pass

NEW = "xxh3_64" if "xxh3_64" in DIGESTS else "crc32"
"""The digest of chunks that are written now."""

_MARK, _SUM, _CRC = "sealed", "sha256", "crc32"
_HEAD = "# sealed: the last line is the SHA-256 of what is above it; jaxscale takes an edit with --accept-edits\n"
_TAIL = "# sha256 "


def sealed(body: dict[str, Any]) -> str:
    """JSON text with `body` and its SHA-256."""
    return json.dumps({"sha256": _sha256(body), "body": body}, indent=1) + "\n"


def unsealed(text: str) -> dict[str, Any]:
    """The body of a text that `sealed` returned.

    Raises:
      ValueError: the text is not JSON, or its digest does not match.
    """
    envelope = json.loads(text)
    if not isinstance(envelope, dict) or not isinstance(envelope.get("body"), dict):
        raise ValueError("it is not a sealed text")
    if envelope.get("sha256") != _sha256(envelope["body"]):
        raise ValueError("its SHA-256 is not that of its text")
    return envelope["body"]


def seal_json(body: dict[str, Any], indent: int | None = None) -> str:
    """`body` as JSON text, with its SHA-256 as the last key."""
    plain = json.loads(json.dumps({_MARK: _SUM, **body}))  # keys become strings, tuples lists: as a reader has them
    return json.dumps({**plain, _SUM: _sha256(plain)}, indent=indent) + "\n"


def open_json(data: bytes) -> tuple[dict[str, Any], bool]:
    """The body of a file that `seal_json` wrote, and whether it was sealed.

    Raises:
      DamagedFile: it is not a JSON object, or its digest does not match.
    """
    try:
        body = reading.parse_json(data)
    except ValueError as e:
        raise DamagedFile(f"{e}") from None
    if not isinstance(body, dict):
        raise DamagedFile("it is not a JSON object")
    digest, mark = body.pop(_SUM, None), _MARK in body
    if not mark and digest is None:
        return body, False
    if digest != _sha256(body):
        raise DamagedFile("its SHA-256 is not that of its content", body)
    body.pop(_MARK, None)
    return body, True


def seal_text(text: str) -> str:
    """A text with a comment before and after it that seal it; comments begin with `#`."""
    whole = _HEAD + text
    return f"{whole}{_TAIL}{hashlib.sha256(whole.encode()).hexdigest()}\n"


def open_text(data: bytes) -> tuple[str, bool]:
    """The text of a file that `seal_text` wrote, and whether it was sealed.

    Raises:
      DamagedFile: it is not UTF-8, or its digest does not match.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise DamagedFile(f"byte {e.start} is not UTF-8") from None
    plain = unmarked(text)
    if plain == text:
        return text, False
    if seal_text(plain) != text:
        raise DamagedFile("its SHA-256 is not that of its text", plain)
    return plain, True


def unmarked(text: str) -> str:
    """A text without the comments of `seal_text`, whether or not the digest matches; unchanged if it has none."""
    first, *others = text.split("\n")
    head = [] if any(words in first for words in (_HEAD[:22], _HEAD[-50:-1])) else [first]
    return "\n".join([*head, *(line for line in others if _TAIL.strip("# ") not in line[: len(_TAIL) - 1])])


def seal_line(row: dict[str, Any]) -> bytes:
    """One JSON line, newline included, that ends with the CRC-32 of the rest."""
    body = json.dumps(row)[:-1].encode()
    return b'%s%s"%s": "%08x"}\n' % (body, b", " if row else b"", _CRC.encode(), zlib.crc32(body))


class Lines:
    """Reads a growing file of `seal_line`s, each line once.

    A truncated line is not damage where a killed process explains it: the last line, or one in a file of an older
    version.
    """

    def __init__(self) -> None:
        self.sealed = False
        self._rest = b""
        self._number = 0
        self._old: bool | None = None  # whether the file begins with lines without a digest
        self._damaged: dict[int, dict[str, Any] | None] = {}
        self._unreadable: list[int] = []

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes that were appended to the file, and return the rows of its complete, intact lines."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        rows = [self._row(line) for line in whole]
        return [row for row in rows if row is not None]

    def end(self, rest: bytes | None = None) -> list[dict[str, Any]]:
        """The last row if only its newline is missing or wrong; nothing if the line is truncated.

        Args:
          rest: bytes after the last complete line, if these were not fed.
        """
        rest = self._rest if rest is None else rest
        for line in (rest, rest[:-1]):
            row, good = _checked(line)
            if row is not None and (good or good is None and not self.sealed):
                return [row]
        return []

    @property
    def damaged(self) -> dict[int, dict[str, Any] | None]:
        """Rows of the damaged lines by line number, from 1; `None` for lines that are not JSON."""
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
    """The row of a line, or None, and whether its digest matches; None if it has no digest."""
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
