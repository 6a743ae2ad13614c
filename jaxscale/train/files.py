"""The small files of a run or sweep folder: written atomically with a digest, and checked when read."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxscale import digests, reading
from jaxscale.errors import AlteredFile, DamagedFile, RunError
from jaxscale.seals import Lines, open_json, open_text, seal_json, seal_line, seal_text
from jaxscale.working_copy import as_named, local, upload_files, url_of

INFO, CONFIG, TRACKERS = "run.json", "config.gin", "trackers.json"
FILES = (
    CONFIG, INFO, "metrics.jsonl", "samples.jsonl", "skipped.jsonl", "outcome.json", "sweep.gin", "trials.jsonl",
    "experts.jsonl", TRACKERS, digests.FILE,
)  # fmt: skip
"""Files of a run or sweep folder, in the order in which they are checked."""

ACCEPT = "--accept-edits"


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically.

    Args:
      path: the file.
      text: its new content.

    Raises:
      RunError: it cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file atomically; raises as `write_text`."""
    try:
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    except OSError as e:
        raise RunError(f"cannot write {path}: {e.strerror}") from e


def write_json(path: Path, body: dict[str, Any], indent: int | None = 2) -> None:
    """Write a JSON object with its digest, atomically; raises as `write_text`."""
    write_text(path, seal_json(body, indent))


def write_gin(path: Path, text: str) -> None:
    """Write gin text with its digest, atomically; raises as `write_text`."""
    write_text(path, seal_text(text))


def write_listed(folder: Path, name: str, text: str) -> None:
    """Write a file atomically, and its digest to `digests.json`; raises as `write_text`.

    `digests.json` lists the digests of both the old and the new content, so that the file is valid whenever this is
    interrupted.
    """
    try:
        known = digests.listed(folder)
    except AlteredFile:
        known = {}
    before = [old for old in _digests(folder, [name]).get(name, []) if old in known.get(name, [])]
    new = digests.digest(text.encode())
    if before == [new]:
        return
    write_json(folder / digests.FILE, digests.body_of({**known, name: [*before, new]}))
    write_text(folder / name, text)


def list_files(folder: Path, names: Iterable[str]) -> None:
    """Write the digests of files as they are now to `digests.json`; raises as `write_text`."""
    write_json(folder / digests.FILE, digests.body_of(_digests(folder, names)))


def _digests(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    return {name: [digests.digest(reading.read_bytes(folder / name))] for name in names if (folder / name).is_file()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_json`, or one that an earlier version wrote without a digest.

    Args:
      path: the file.

    Raises:
      OSError: it cannot be read, or has no digest and is a link out of its folder.
      AlteredFile: it is not what was written.
    """
    data = reading.read_bytes(path)
    try:
        body, sealed = open_json(data)
    except DamagedFile as e:
        raise altered(path, e) from None
    if not sealed:
        reading.check_own(path)
    return body


def read_gin(path: Path) -> str:
    """Read a file of `write_gin`, or one that an earlier version wrote without a digest.

    Args:
      path: the file.

    Raises:
      OSError: it cannot be read, or has no digest and is a link out of its folder.
      AlteredFile: it is not what was written.
    """
    data = reading.read_bytes(path)
    try:
        text, sealed = open_text(data)
        if not sealed and _is_sealed(path.parent / INFO):
            raise DamagedFile("its seal is gone", text)
    except DamagedFile as e:
        raise altered(path, e) from None
    if not sealed:
        reading.check_own(path)
    return text


def altered(path: Path, why: DamagedFile) -> AlteredFile:
    """Make the error for a file that is not what was written, with what to do about it."""
    place = as_named(path)
    if why.content is not None:
        return AlteredFile(
            f"{place} is not what was written: {why}; if you edited it, accept the edit with {_accepting(path)}; if "
            "you did not, the file is damaged: restore it from a copy"
        )
    remedy = {INFO: ", or remove it: the run continues without it"}
    remedy["outcome.json"] = ", or remove it: the trial continues from its checkpoint"
    return AlteredFile(f"{place} is damaged: {why}; restore it from a copy{remedy.get(path.name, '')}")


def _is_sealed(path: Path) -> bool:
    """Whether a file has a digest, so that the files beside it must have one; damage is reported elsewhere."""
    try:
        return open_json(reading.read_bytes(path))[1]
    except (OSError, DamagedFile):
        return False


# --- whole folders ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State:
    """Result of checking one file.

    Args:
      path: the file.
      sealed: whether it has a digest; files of earlier versions have none.
      fault: what is wrong if it is not what was written, else `None`.
      accepted: the bytes to write in order to accept the file as it is; `None` if that is not possible.
      place: the file to write `accepted` to, if the digest is in another file than `path`.
    """

    path: Path
    sealed: bool
    fault: str | None = None
    accepted: bytes | None = None
    place: Path | None = None


def states(folder: Path) -> Iterator[State]:
    """Check the files of a run folder, or of a sweep folder and its runs; yields one `State` per file.

    A folder or a pipe in the place of a file counts as a fault.
    """
    jobs = sorted(p for p in (folder / "jobs").glob("*.json"))
    for path in [*(folder / name for name in FILES), *jobs]:
        if os.path.lexists(path):
            try:
                yield _state(path)
            except OSError as e:
                yield State(path, True, f"{as_named(path)} cannot be read: {e.strerror}; restore it from a copy")
    yield from _listed(folder)
    if any((folder / name).is_file() for name in ("sweep.gin", "trials.jsonl")):
        for run in sorted(p for p in folder.iterdir() if p.is_dir() and p.name.isdecimal()):
            yield from states(run)


def accept_edits(folder: str | Path) -> list[Path]:
    """Accept files of a run or sweep folder that are not what was written: compute their digests again.

    Lines of a `.jsonl` file that are not JSON are removed.

    Args:
      folder: the run or sweep folder, or its URL in a bucket.

    Returns:
      the files that were accepted.

    Raises:
      AlteredFile: a file is damaged and cannot be read.
      RunError: a process is at work in the folder, or it cannot be written to.
    """
    done: list[Path] = []
    folder = local(folder)
    faulty = [state for state in states(folder) if state.fault is not None]
    with contextlib.ExitStack() as stack:
        for parent in dict.fromkeys((state.place or state.path).parent for state in faulty):
            for lock in (".lock", ".sweep.lock"):
                stack.enter_context(_alone(parent / lock))
        for state in faulty:
            if state.accepted is None:
                raise AlteredFile(str(state.fault))
            write_bytes(state.place or state.path, state.accepted)
            done.append(state.path)
        if url_of(folder) is not None:
            upload_files(folder, [(s.place or s.path).relative_to(folder).as_posix() for s in faulty])
    return done


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    if not lock.exists():
        yield
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"a process is at work in {lock.parent}; wait for it before you accept edits") from None
        yield


def _listed(folder: Path) -> Iterator[State]:
    """Check the files whose digests are in `digests.json`."""
    try:
        known, wrong = digests.listed(folder), digests.faults(folder)
    except AlteredFile:  # reported as a fault of digests.json itself
        return
    for name in known:
        accepted = seal_json(digests.body_of(_digests(folder, known)), 2).encode() if name in wrong else None
        yield State(folder / name, True, wrong.get(name), accepted, folder / digests.FILE)


def _state(path: Path) -> State:
    data = reading.read_bytes(path)
    if path.suffix == ".jsonl":
        return _state_of_lines(path, data)
    try:
        if path.suffix == ".json":
            sealed = open_json(data)[1]
        else:
            text, sealed = open_text(data)
            if not sealed and _is_sealed(path.parent / INFO):
                raise DamagedFile("its seal is gone", text)
        if not sealed:
            reading.check_own(path)
        return State(path, sealed)
    except DamagedFile as e:
        whole = None
        if e.content is not None:
            whole = (seal_json(e.content, 2) if path.suffix == ".json" else seal_text(e.content)).encode()
        return State(path, True, str(altered(path, e)), whole)


def _state_of_lines(path: Path, data: bytes) -> State:
    lines = Lines()
    lines.feed(data)
    if not lines.sealed:
        reading.check_own(path)
    if not lines.damaged:
        return State(path, lines.sealed)
    accepted = []
    for number, line in enumerate(data.split(b"\n"), 1):
        row = lines.damaged.get(number)
        if number not in lines.damaged:
            accepted.append(line)
        elif row is not None:
            accepted.append(seal_line(row)[:-1])
    return State(path, lines.sealed, str(altered_lines(path, lines)), b"\n".join(accepted))


def altered_lines(path: Path, lines: Lines) -> AlteredFile:
    """Make the error for a file with damaged lines, which it names."""
    one, *more = numbers = sorted(lines.damaged)
    what = f"line {one}" if not more else f"lines {', '.join(map(str, numbers[:8]))}" + (" ..." if more[8:] else "")
    return AlteredFile(
        f"{as_named(path)}, {what}: not what was written; if you edited it, accept the edit with {_accepting(path)} "
        "(lines that are not JSON are removed); if you did not, the file is damaged: restore it from a copy"
    )


def _accepting(path: Path) -> str:
    """The option that accepts edits, with a full command."""
    folder = path.parent.parent if path.parent.name == "jobs" else path.parent
    return f"{ACCEPT}, as in jaxscale checkpoint verify {as_named(folder)} {ACCEPT}"
