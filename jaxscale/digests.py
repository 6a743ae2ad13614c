"""`digests.json`: SHA-256 digests of files that cannot hold their own, such as a CSV or a tokenizer's JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from jaxscale import reading
from jaxscale.errors import AlteredFile, DamagedFile
from jaxscale.seals import open_json
from jaxscale.working_copy import as_named

FILE = "digests.json"
_BODY = "files"


def body_of(digests: dict[str, list[str]]) -> dict[str, dict[str, list[str]]]:
    """The content of `digests.json`.

    Args:
      digests: the valid digests of each file, by its path in the folder.
    """
    return {_BODY: digests}


def digest(data: bytes) -> str:
    """The hex SHA-256 of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def listed(folder: Path) -> dict[str, list[str]]:
    """The valid digests of each file in a folder's `digests.json`; empty for folders of older versions, without one.

    Raises:
      AlteredFile: `digests.json` itself was edited or is damaged.
    """
    path = folder / FILE
    try:
        files = open_json(reading.read_bytes(path))[0].get(_BODY)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise AlteredFile(f"{as_named(path)} cannot be read: {e.strerror}; restore it from a copy") from None
    except DamagedFile as e:
        raise AlteredFile(f"{as_named(path)} is not what was written: {e}; {_remedy(folder)}") from None
    if not isinstance(files, dict) or not all(isinstance(valid, list) for valid in files.values()):
        raise AlteredFile(f"{as_named(path)} has no object of lists called {_BODY}; restore it from a copy")
    return files


def faults(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """A message for each listed file whose digest does not match, by the file's name.

    Args:
      folder: the folder with `digests.json`.
      names: files to check; all listed ones by default.

    Raises:
      AlteredFile: see `listed`.
    """
    valid, messages = listed(folder), {}
    for name in valid if names is None else names:
        try:
            data = reading.read_bytes(folder / name)
        except OSError as e:
            if name in valid:
                messages[name] = f"{as_named(folder / name)} cannot be read: {e.strerror}; {_remedy(folder)}"
            continue
        if name in valid and digest(data) not in valid[name]:
            why = f"its SHA-256 is not that in {FILE}"
            messages[name] = f"{as_named(folder / name)} is not what was written: {why}; {_remedy(folder)}"
    return messages


def check(folder: Path, names: Iterable[str] | None = None) -> None:
    """Check the digests of listed files; arguments as of `faults`.

    Raises:
      AlteredFile: a digest does not match.
    """
    for fault in faults(folder, names).values():
        raise AlteredFile(fault)


def _remedy(folder: Path) -> str:
    return (
        f"if you edited it, accept the edit with --accept-edits, as in jaxscale checkpoint verify {as_named(folder)} "
        "--accept-edits; if not, the file is damaged: restore it from a copy"
    )
