"""Token files in a bucket: a local copy with holes, which are filled chunk by chunk as training reads them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from jaxscale.buckets import Bucket, BucketError, failure, is_url
from jaxscale.data.checked import CHUNK
from jaxscale.errors import DataError
from jaxscale.working_copy import copy_of

META, DIGESTS = "meta.json", "digests.bin"


def opened(folder: str | Path) -> tuple[Path, Bucket | None]:
    """Return a token file's folder on this machine, and where its chunks are fetched from.

    For a URL that is its working copy, with the bucket's `meta.json` and `digests.bin`; if those have changed, all that
    was fetched before is removed.

    Args:
      folder: a folder of a disk, or a URL.

    Raises:
      DataError: the bucket cannot be read, or the working copy not be written.
    """
    if not is_url(folder):
        return Path(folder).expanduser(), None
    bucket, copy = Bucket(folder), copy_of(folder)
    try:
        meta = bucket.read(META)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.with_name(f".{copy.name}.lock").open("w") as lock:  # all processes of a machine share the copy
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (copy / META).exists() or (copy / META).read_bytes() != meta:
                shutil.rmtree(copy, ignore_errors=True)
                copy.mkdir()
                (copy / DIGESTS).write_bytes(bucket.read(DIGESTS))
                (copy / META).write_bytes(meta)
    except FileNotFoundError:
        raise DataError(f"{bucket} is not a complete token file (it has no meta.json); copy the whole folder") from None
    except BucketError as e:
        raise failure(DataError, e) from None
    except OSError as e:
        raise DataError(
            f"cannot write {copy}, the working copy of {bucket}: {e.strerror}; set JAXSCALE_CACHE"
        ) from None
    return copy, bucket


def with_holes(path: Path, dtype: np.dtype, count: int) -> Integer[np.ndarray, " t"]:
    """Return a memory-mapped file, made with holes if there is none of its size.

    Args:
      path: the file.
      dtype: dtype of its values.
      count: number of values.

    Raises:
      DataError: the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:  # another process may have filled some holes already
            if file.tell() != count * dtype.itemsize:
                file.truncate(count * dtype.itemsize)
    except OSError as e:
        raise DataError(f"cannot write {path}: {e.strerror}; set JAXSCALE_CACHE") from None
    return np.memmap(path, dtype, "r").view(np.ndarray)


def part_of(key: str, start: int, part: int | None) -> str:
    """Return the object that has a byte of a file.

    Args:
      key: the file.
      start: the byte.
      part: bytes of each object; `None` if one object is the file.
    """
    return key if part is None else f"{key}.{start // part:06d}"


def filler(
    bucket: Bucket,
    key: str,
    path: Path,
    offset: int = 0,
    generation: str | None = None,
    part: int | None = None,
) -> Callable[[Sequence[int]], None]:
    """Return a function that fetches chunks of an array in a bucket, several at a time, into the local copy.

    Args:
      bucket: the folder.
      key: the object in it.
      path: the local copy, from `with_holes`.
      offset: bytes of the object before the array.
      generation: the object's generation; `None` is any.
      part: bytes of each object, if there are several, whose keys have numbers behind `key`.
    """
    size = path.stat().st_size

    def fetch(chunk: int) -> None:
        start = chunk * CHUNK
        stop, name, first = min(start + CHUNK, size), part_of(key, start, part), offset
        if part is not None:
            first -= start // part * part
        try:
            data = bucket.read(name, first + start, first + stop, generation=generation)
            with path.open("r+b") as file:  # not through the memory map, in which a full disk would kill the process
                file.seek(start)
                file.write(data)
        except FileNotFoundError:
            raise DataError(f"{bucket}/{name} does not exist; copy the whole folder again") from None
        except BucketError as e:
            raise failure(DataError, e, running=True) from None
        except OSError as e:
            raise DataError(f"cannot write {path}: {e.strerror}; set JAXSCALE_CACHE") from None

    def fill(chunks: Sequence[int]) -> None:
        for _ in bucket.each(fetch, chunks):
            pass

    return fill
