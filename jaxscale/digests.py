"""`digests.json`: the SHA-256 of files whose form leaves no place for a seal, such as a CSV or a tokenizer's JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from jaxscale import reading
from jaxscale.errors import AlteredFile, DamagedFile
from jaxscale.seals import open_json

FILE = "digests.json"
_BODY = "files"


def body_of(digests: dict[str, list[str]]) -> dict[str, dict[str, list[str]]]:
    """What is written to `digests.json`: by a file's path in the folder, the digests that it may have."""
    return {_BODY: digests}


def digest(data: bytes) -> str:
    """The hex SHA-256 of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def listed(folder: Path) -> dict[str, list[str]]:
    """The digests in a folder's `digests.json`; of one of an earlier version, which has none, nothing.

    Raises:
      AlteredFile: they are not what was written.
    """
    path = folder / FILE
    try:
        files = open_json(reading.read_bytes(path))[0].get(_BODY)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise AlteredFile(f"{path} cannot be read: {e.strerror}; bring back a copy") from None
    except DamagedFile as e:
        raise AlteredFile(f"{path} is not what was written: {e}; {_remedy(folder)}") from None
    if not isinstance(files, dict) or not all(isinstance(known, list) for known in files.values()):
        raise AlteredFile(f"{path} has no object of lists called {_BODY}; bring back a copy")
    return files


def faults(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Those of the listed files that are not what was written, each with a sentence.

    Args:
      folder: that has the `digests.json`.
      names: of files that are looked at; all that are listed by default.

    Raises:
      AlteredFile: see `listed`.
    """
    known, found = listed(folder), {}
    for name in known if names is None else names:
        try:
            data = reading.read_bytes(folder / name)
        except OSError as e:
            if name in known:
                found[name] = f"{folder / name} cannot be read: {e.strerror}; {_remedy(folder)}"
            continue
        if name in known and digest(data) not in known[name]:
            why = f"its SHA-256 is not that in {FILE}"
            found[name] = f"{folder / name} is not what was written: {why}; {_remedy(folder)}"
    return found


def check(folder: Path, names: Iterable[str] | None = None) -> None:
    """That listed files are what was written; arguments as of `faults`.

    Raises:
      AlteredFile: one is not.
    """
    for fault in faults(folder, names).values():
        raise AlteredFile(fault)


def _remedy(folder: Path) -> str:
    return (
        f"an edit of yours is taken as it is with --accept-edits, as in jaxscale checkpoint verify {folder} "
        "--accept-edits; if it is none, the file is damaged: bring back a copy"
    )
