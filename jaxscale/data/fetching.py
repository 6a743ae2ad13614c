"""Token files in a bucket: a local copy with holes, which are filled chunk by chunk as training reads them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from jaxscale.buckets import Bucket, BucketError, is_url
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
        raise DataError(f"{e.strerror}") from None
    except OSError as e:
        raise DataError(
            f"cannot write {copy}, the working copy of {bucket}: {e.strerror}; set JAXSCALE_CACHE"
        ) from None
    return copy, bucket


def with_holes(path: Path, dtype: np.dtype, count: int) -> Integer[np.ndarray, " t"]:
    """Return a memory-mapped file that may be changed, made with holes if there is none of its size.

    Args:
      path: the file.
      dtype: dtype of its values.
      count: number of values.
    """
    with path.open("ab") as file:  # another process may have filled some holes already
        if file.tell() != count * dtype.itemsize:
            file.truncate(count * dtype.itemsize)
    return np.memmap(path, dtype, "r+").view(np.ndarray)


def filler(bucket: Bucket, file: str, values: Integer[np.ndarray, " t"]) -> Callable[[Sequence[int]], None]:
    """Return a function that fetches chunks of a file, several at a time, and writes them into `values`.

    Args:
      bucket: the token file.
      file: name of the file in it.
      values: the local copy, from `with_holes`.
    """
    raw = values.view(np.uint8)

    def fetch(chunk: int) -> None:
        start = chunk * CHUNK
        stop = min(start + CHUNK, len(raw))
        try:
            data = bucket.read(file, start, stop)
        except FileNotFoundError:
            raise DataError(f"{bucket}/{file} does not exist; copy the whole folder again") from None
        except BucketError as e:
            raise DataError(f"{e.strerror}") from None
        raw[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def fill(chunks: Sequence[int]) -> None:
        for _ in bucket.each(fetch, chunks):
            pass

    return fill
