"""Working copies: local folders through which a folder of a bucket is read and written.

The small files of a run in a bucket (config, metrics, pictures, event files) are written to a local folder as those of
any run, and uploaded behind it, since a bucket cannot append and third-party writers need a disk. Checkpoints are not
part of it: they are written into the bucket itself. The bucket's content is what counts: a working copy is brought up
to date when the run is opened, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxscale.buckets import Bucket, BucketError, failure, is_url, normalized, server
from jaxscale.errors import RunError
from jaxscale.large_objects import download
from jaxscale.large_objects import upload as upload_object

log = logging.getLogger("jaxscale")

RECORD = ".bucket.json"
"""File of a working copy: for each file, its size, time and generation when it last was the same as in the bucket."""

WRITER = ".writer"
"""Object with the id of the process that uploads."""

PERIOD = 10.0
"""Seconds between uploads of changed files; longer if one takes more than a hundredth of that."""

DELETED = ("import.jsonl", "report.html", "curves.png", "parallel.png")
"""Files that are deleted in the bucket when they are deleted here; others stay there, whoever removes them here."""

SMALL = 8 * 2**20
"""Bytes up to which a file is read before others are uploaded, so that it agrees with `digests.json`."""

_FRESH = 5.0
"""Seconds for which a working copy is not compared with the bucket again."""

PROFILE = "profile"
"""Folder of a run with files that may be large, and that few commands read: they are fetched for those alone."""

_fetched: dict[tuple[Path, bool], float] = {}


def cache_root() -> Path:
    """Return the folder of working copies, `buckets/` in $JAXSCALE_CACHE or ~/.cache/jaxscale."""
    return Path(os.environ.get("JAXSCALE_CACHE") or "~/.cache/jaxscale").expanduser().resolve() / "buckets"


def copy_of(url: str | Path) -> Path:
    """Return the path of the working copy of a folder in a bucket, which need not exist.

    Args:
      url: the folder's URL; a server that the environment names is part of the path.
    """
    scheme, _, rest = normalized(url).partition("://")
    where = server(scheme)
    return cache_root() / (f"{scheme}@{where}" if where else scheme) / rest


def url_of(path: str | Path) -> str | None:
    """Return the URL of which a path is the working copy, or lies in one; `None` if it is an ordinary path.

    Args:
      path: a path of this machine.

    Raises:
      RunError: it is the working copy of a bucket on another server than the environment names.
    """
    path = Path(path).resolve()
    if cache_root() not in path.parents:
        return None
    first, *rest = path.relative_to(cache_root()).parts
    scheme, _, where = first.partition("@")
    if not rest:
        return None
    if where != server(scheme):
        raise RunError(
            f"{path} is a working copy of {scheme}://{'/'.join(rest)} on {where or 'its provider'}, and the "
            f"environment names {server(scheme) or 'no other server'}; name the URL, and set AWS_ENDPOINT_URL or "
            "STORAGE_EMULATOR_HOST as before"
        )
    return f"{scheme}://{'/'.join(rest)}"


def as_named(path: str | Path) -> str:
    """Return a path as a user knows it: the URL of a working copy, else the path.

    Args:
      path: a path of this machine.
    """
    try:
        return url_of(path) or str(path)
    except RunError:
        return str(path)


def inside(path: str | Path, name: str) -> str | Path:
    """Return the path or URL of a folder in a run folder; of a working copy, that in the bucket.

    Args:
      path: the run folder.
      name: the folder in it, such as "checkpoints".
    """
    url = url_of(path)
    return Path(path) / name if url is None else f"{url}/{name}"


def file_to_write(path: str | Path) -> Path:
    """Return where to write a new file: a path as it is, or for a URL its working copy.

    `upload_files(file.parent, [file.name])` uploads it afterwards, and does nothing for an ordinary path.

    Args:
      path: a path or a URL.

    Raises:
      RunError: it exists already, or the bucket cannot be read.
    """
    if not is_url(path):
        file = Path(path)
        exists = file.exists()
    else:
        file = copy_of(path)
        folder, _, name = normalized(path).rpartition("/")
        try:
            exists = Bucket(folder).exists(name)
        except BucketError as e:
            raise failure(RunError, e) from None
        if not exists:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # what an upload that failed left behind
    if exists:
        raise RunError(f"{as_named(file)} already exists; name another file")
    return file


def local(path: str | Path, *, update: bool = True, profile: bool = False) -> Path:
    """Return a path unchanged, or for a URL its working copy, brought up to date.

    Args:
      path: a path or a URL.
      update: whether to download what has changed; only one of several processes needs it.
      profile: whether to download profiles, too.

    Raises:
      RunError: the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path)
    copy = copy_of(path)
    if update and time.monotonic() - _fetched.get((copy, profile), -_FRESH) > _FRESH:
        if not _in_use(copy):
            _update(Bucket(path), copy, profile)
        _fetched[copy, profile] = time.monotonic()
    return copy


def _update(bucket: Bucket, copy: Path, profile: bool = False) -> None:
    """Bring a working copy up to date; raises `RunError`."""
    try:
        _fetch(bucket, copy, profile)
    except BucketError as e:
        raise failure(RunError, e) from None
    except OSError as e:
        raise RunError(f"cannot write the working copy {copy} of {bucket}: {e.strerror}; set JAXSCALE_CACHE") from None


def _fetch(bucket: Bucket, copy: Path, profile: bool) -> None:
    """Download changed files, and delete files that were deleted."""
    keys = [key for key in bucket.list() if _is_small(key)]
    folders = {"/".join(key.split("/")[:n]) for key in keys for n in range(1, key.count("/") + 1)}
    for key in folders.intersection(keys):
        log.warning("%s/%s is left out, since it is also a folder", bucket, key)
    keys = [key for key in keys if key not in folders]
    record = _read_record(copy)
    for key in set(record) - set(keys):  # deleted in the bucket; what was never uploaded stays
        (copy / key).unlink(missing_ok=True)
        del record[key]
    keys = [key for key in keys if profile or key in record or PROFILE not in key.split("/")[:-1]]
    if not keys:
        if copy.is_dir():
            _write_record(copy, record)
        return
    copy.mkdir(parents=True, exist_ok=True)

    def fetch(key: str) -> list[Any] | None:
        file, entry = copy / key, record.get(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        generation = download(bucket, key, entry[2] if entry and file.exists() else None, partial)
        if generation is None:  # what is here is as new, or newer and not uploaded yet
            return entry
        partial.replace(file)
        return [*_stat(file), generation]

    entries = bucket.each(fetch, keys)
    _write_record(copy, {key: entry for key, entry in zip(keys, entries, strict=True) if entry is not None})


def _in_use(copy: Path) -> bool:
    """Whether a process of this machine writes to a working copy, as a run, a sweep, or a run in it."""
    for lock in (copy / ".lock", *copy.glob(".sweep.lock"), *copy.glob("*/.lock")):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False


def _is_small(key: str) -> bool:
    """Whether a file belongs to a working copy."""
    *folders, name = key.split("/")
    if "\0" in key or any(part in ("", ".", "..") for part in (*folders, name)):  # would lie elsewhere on a disk
        return False
    return "checkpoints" not in folders and not name.startswith(".") and not name.endswith(".partial")


def _stat(file: Path) -> list[int]:
    about = file.stat()
    return [about.st_size, about.st_mtime_ns]


def _read_record(copy: Path) -> dict[str, list[Any]]:
    try:
        record = json.loads((copy / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return {key: entry for key, entry in record.items() if _is_small(key)} if isinstance(record, dict) else {}


def _write_record(copy: Path, record: dict[str, list[Any]]) -> None:
    partial = copy / f"{RECORD}.{os.getpid()}.partial"
    partial.write_text(json.dumps(record))
    partial.replace(copy / RECORD)


class Mirror:
    """Uploads the changed files of a folder every few seconds, on a thread of its own.

    Args:
      folder: the working copy.
      url: where it is uploaded to.

    Attributes:
      left_out: files that are not uploaded, since they are too large.
      behind: whether, when this process became the writer, the folder had files that were not uploaded.
    """

    behind = False

    def __init__(self, folder: Path, url: str):
        self.folder, self.bucket = folder, Bucket(url)
        self._record = _read_record(folder)
        self._failure: BucketError | None = None
        self.left_out: set[str] = set()
        self._over, self._uploading = threading.Event(), threading.Lock()
        self._id = os.urandom(8).hex()
        self._thread = threading.Thread(target=self._run, name=f"upload to {url}", daemon=True)

    def start(self, update: bool = False) -> None:
        """Become the folder's writer and start uploading.

        Args:
          update: whether to bring the folder up to date once more, since the writer before this one may have uploaded
            files until now.

        Raises:
          RunError: the bucket cannot be written.
        """
        try:
            self.become_writer()
        except BucketError as e:
            raise failure(RunError, e) from None
        if update:
            _update(self.bucket, self.folder)
            self._record = _read_record(self.folder)
        self.behind = any(key not in DELETED for key, _ in self._changed())
        self._thread.start()

    def become_writer(self) -> None:
        """Make this the only process that uploads; raises `BucketError`."""
        self.bucket.write(WRITER, self._id.encode())

    def check(self) -> None:
        """Raise the error of an upload that failed, if any.

        Raises:
          RunError: an upload failed, or another process has begun to write to the same folder.
        """
        if self._failure is not None:
            raise failure(RunError, self._failure, running=True)

    def flush(self) -> None:
        """Upload everything that has changed, now.

        Raises:
          BucketError: an upload failed.
        """
        with self._uploading:
            self._upload()

    def close(self) -> None:
        """Upload everything that has changed, and stop.

        Raises:
          RunError: an upload failed.
        """
        self._over.set()
        self._thread.join()
        self.check()
        try:
            self.flush()
        except OSError as e:
            e = e if isinstance(e, BucketError) else BucketError(e.errno, f"cannot upload: {e.strerror or e}")
            message = f"{e.strerror}; {self.folder} has the files, which a resumed run uploads"
            raise failure(RunError, e, message, running=True) from None

    def _run(self) -> None:
        pause = 1.0  # a new run is seen soon
        while not self._over.wait(pause):
            began = time.monotonic()
            try:
                self.flush()
            except BucketError as e:
                self._failure = e
                return
            except OSError as e:
                self._failure = BucketError(e.errno, f"cannot upload {self.folder}: {e.strerror or e}")
                return
            pause = max(PERIOD, 100 * (time.monotonic() - began))

    def _check_writer(self) -> None:
        try:
            writer = self.bucket.read(WRITER).decode(errors="replace")
        except FileNotFoundError:
            writer = ""  # deleted with the whole run
        if writer != self._id:
            why = f"another run has begun to write into {self.bucket}; this one stops, so that neither overwrites the "
            raise BucketError(errno.EEXIST, f"{why}other: use a folder of its own for each")

    def _upload(self) -> None:
        self._check_writer()
        stats = dict(self._changed())
        small: dict[str, bytes] = {}
        for key, (size, _) in stats.items():
            with contextlib.suppress(FileNotFoundError):
                if size <= SMALL and key != "digests.json":
                    small[key] = (self.folder / key).read_bytes()
        # digests.json is written before the files that it lists: read after them, it lists what was read
        with contextlib.suppress(FileNotFoundError):
            digests = (self.folder / "digests.json").read_bytes()
            if "digests.json" in stats:
                self._send("digests.json", digests, stats)
        for key in sorted(stats.keys() - {"digests.json"}, key=lambda key: stats[key]):  # the smallest first
            with contextlib.suppress(FileNotFoundError):
                self._send(key, small.pop(key, None), stats)
        for key in [key for key in self._record if key in DELETED and not (self.folder / key).exists()]:
            self.bucket.delete(key)
            del self._record[key]
        if stats:  # another writer brings its copy up to date after it wrote its mark: it has seen all of this
            self._check_writer()

    def _send(self, key: str, data: bytes | None, stats: dict[str, list[int]]) -> None:
        if data is None:  # a large file, before which others may have taken long
            self._check_writer()
            try:
                generation = upload_object(self.bucket, key, self.folder / key)
            except BucketError as e:
                if e.errno != errno.EFBIG:
                    raise
                if key not in self.left_out:
                    log.warning("%s; it is not uploaded, and stays in %s", e.strerror, self.folder)
                self.left_out.add(key)
                return
        else:
            generation = self.bucket.write(key, data)
        self._record[key] = [*stats[key], generation]
        with contextlib.suppress(OSError):  # a full disk is reported by what writes there
            _write_record(self.folder, self._record)

    def _changed(self) -> Iterator[tuple[str, list[int]]]:
        for root, folders, names in os.walk(self.folder):
            folders[:] = [f for f in folders if f != "checkpoints"]
            for name in names:
                file = Path(root) / name
                key = file.relative_to(self.folder).as_posix()
                if _is_small(key):
                    with contextlib.suppress(FileNotFoundError):
                        stat = _stat(file)
                        if self._record.get(key, [0])[:2] not in (stat, stat[:1]):  # an empty file is not uploaded
                            yield key, stat


def upload_files(folder: Path, names: Iterable[str]) -> None:
    """Upload single files of a working copy, which a run may be writing to; does nothing for another folder.

    Args:
      folder: the folder.
      names: the files; those that do not exist are deleted in the bucket.

    Raises:
      RunError: the upload failed.
    """
    url = url_of(folder)
    if url is None:
        return
    bucket = Bucket(url)
    try:
        for name in names:
            file = folder / name
            upload_object(bucket, name, file) if file.exists() else bucket.delete(name)
    except BucketError as e:
        raise failure(RunError, e, f"{e.strerror}; {folder} has the files", running=True) from None


def upload(folder: Path) -> None:
    """Upload what has changed in a working copy, as its only writer; does nothing for another folder.

    Args:
      folder: the folder.

    Raises:
      RunError: the upload failed.
    """
    url = url_of(folder)
    if url is None:
        return
    mirror = Mirror(folder, url)
    try:
        mirror.become_writer()
        mirror.flush()
        if mirror.left_out:
            why = f"{', '.join(sorted(mirror.left_out))} cannot be written to {url}: pip install 'jaxscale[s3]'"
            raise BucketError(errno.EFBIG, why)
    except BucketError as e:
        raise failure(RunError, e, f"{e.strerror}; {folder} has the files", running=True) from None


class NoMirror:
    """Stands for a `Mirror` where nothing is uploaded."""

    behind = False

    def check(self) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def mirrored(folder: Path, active: bool = True, *, update: bool = False) -> Iterator[Mirror | NoMirror]:
    """Upload a working copy while the context is active, and at its end, however it ends.

    Args:
      folder: the folder; nothing is done if it is not a working copy.
      active: whether this process writes the small files.
      update: whether to bring it up to date first; its caller has locked it, and has no file in it open.

    Raises:
      RunError: an upload failed, unless the context ends with another error.
    """
    url = url_of(folder)
    if url is None or not active:
        yield NoMirror()
        return
    mirror = Mirror(folder, url)
    mirror.start(update)
    try:
        yield mirror
    except BaseException:
        with contextlib.suppress(RunError):  # keep the first error
            mirror.close()
        raise
    mirror.close()
