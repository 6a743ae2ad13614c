"""Folders of buckets, `s3://` and `gs://`: objects are read, written, listed and deleted through TensorStore.

Credentials are found as TensorStore finds them: for S3 the variables AWS_ACCESS_KEY_ID and so on, the files in
`~/.aws`, or the machine's role; for Google Cloud Storage application default credentials. AWS_ENDPOINT_URL names
another server that speaks S3's protocol, STORAGE_EMULATOR_HOST an emulator of Google's. None is written anywhere.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jaxscale.errors import LOST, ConfigError, JaxscaleError

SCHEMES = ("s3", "gs")
THREADS = 16
"""Requests at a time of one call that reads or writes many objects."""

RETRIES = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "16s"}
"""How often TensorStore repeats a request that failed for a reason that may pass; after about a minute it gives up."""

PATIENCE = 900.0
"""Seconds after which a request, its repetitions included, counts as failed."""

_URL = re.compile(r"^(s3|gs):/{1,2}([^/]+)/?(.*)$")  # pathlib makes one slash of two
_OTHER_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")
_ABSENT = b"\x02"
"""TensorStore's generation of an object that does not exist."""

_DENIED = re.compile(
    r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired|"
    r"PERMISSION_DENIED|UNAUTHENTICATED|http_response_code='40[13]'|SIGNING_NO_CREDENTIALS|no credentials|"
    "Unable to locate credentials"
)
_MISSING_BUCKET = re.compile(r"NoSuchBucket|NOT_FOUND|http_response_code='404'")
_CODE = re.compile(r"<Code>(\w+)</Code>")

_OUT_OF_RANGE = ("OUT_OF_RANGE", "FAILED_PRECONDITION: Unexpected Content-Range")  # the second from Google's emulator
_SIZE = re.compile(r"total size (\d+)|<ActualObjectSize>(\d+)<|bytes [\d*-]+/(\d+)")
LARGEST = 2**46
"""Bytes that no object has; Amazon's limit is 50 TB."""

T = TypeVar("T")


def is_url(path: str | Path) -> bool:
    """Whether a path is the URL of a folder or object in a bucket.

    Raises:
      ConfigError: it is a URL of another kind, which would otherwise become a local folder of that name.
    """
    other = _OTHER_URL.match(str(path))
    if other is not None and other[1] not in SCHEMES:
        raise ConfigError(f"{path}: buckets are s3:// and gs://, not {other[1]}://; or name a folder of a disk")
    return _URL.match(str(path)) is not None


def normalized(path: str | Path) -> str:
    """Return a URL with two slashes after its scheme and none at its end.

    Args:
      path: a URL, or one that `pathlib` has changed to `s3:/bucket/...`.

    Raises:
      ConfigError: it has a part `..`, which would lead out of the bucket's working copies.
    """
    match = _URL.match(str(path))
    assert match is not None, path
    scheme, bucket, key = match.groups()
    parts = [bucket, *(part for part in key.split("/") if part not in ("", "."))]
    if ".." in parts or any("\0" in part for part in parts):
        raise ConfigError(f"{scheme}://{bucket}/{key} has a part '..' or a NUL; write the folder's own URL")
    return f"{scheme}://{'/'.join(parts)}"


class BucketError(OSError):
    """A request to a bucket failed; `strerror` is a sentence that says why."""


class OutOfRange(BucketError):
    """A read beyond the end of an object, of `size` bytes where the server's answer says so, else `None`."""

    size: int | None = None


class Bucket:
    """A folder of a bucket. Keys are relative to it.

    Args:
      url: such as "s3://bucket/runs/demo"; the folder need not exist.

    Raises:
      BucketError: the URL is not valid.
    """

    def __init__(self, url: str | Path):
        self.url = normalized(url)
        self._prefix = "".join(part + "/" for part in self.url.split("/")[3:])

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.url,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bucket) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def folder(self, name: str) -> Bucket:
        """Return a folder in this one.

        Args:
          name: its path, relative to this folder.
        """
        return Bucket(f"{self.url}/{name}")

    def read(
        self, key: str, start: int | None = None, stop: int | None = None, *, generation: str | None = None
    ) -> bytes:
        """Return an object's bytes, or those from `start` to `stop`.

        Args:
          key: the object.
          start: first byte; `None` is 0.
          stop: byte after the last; `None` is the end.
          generation: the generation that it must have, from `generation`; `None` is any.

        Raises:
          FileNotFoundError: there is no such object.
          OutOfRange: the object ends before `stop`.
          BucketError: the request failed, or the object has another generation.
        """
        span = None if start is None and stop is None else slice(start, stop)
        result = self._wait(lambda kv: kv.read(self._prefix + key, byte_range=span), f"reading {key}")
        if result.state != "value":
            raise FileNotFoundError(errno.ENOENT, "it does not exist", f"{self.url}/{key}")
        actual = result.stamp.generation
        if generation is not None and actual.strip(b"\0") and actual.hex() != generation:  # emulators have only zeros
            raise BucketError(errno.ESTALE, f"{self.url}/{key} has changed while it was read; start again", self.url)
        return bytes(result.value)

    def size(self, key: str) -> int:
        """Return an object's bytes; raises as `read`.

        TensorStore does not return them, so they are taken from the answer to a read beyond the end. Google's answer
        does not have them: then the last byte is looked for, by reading several single bytes at a time.

        Args:
          key: the object.
        """
        low, high = 0, LARGEST

        def reaches(size: int) -> bool:
            try:
                return len(self.read(key, size - 1, size)) == 1
            except OutOfRange as e:
                if e.size is not None:
                    raise
                return False

        try:
            reaches(high)
            while low < high:
                sizes = sorted({low + -(-(high - low) * i // THREADS) for i in range(1, THREADS + 1)})
                enough = list(self.each(reaches, sizes))
                low, high = (
                    max([low, *(n for n, yes in zip(sizes, enough, strict=True) if yes)]),
                    min([high, *(n - 1 for n, yes in zip(sizes, enough, strict=True) if not yes)]),
                )
        except OutOfRange as e:
            assert e.size is not None
            return e.size
        return low

    def generation(self, key: str) -> str:
        """Return an object's generation, which changes when it is written; raises as `read`."""
        nothing = slice(0, 0)
        result = self._wait(lambda kv: kv.read(self._prefix + key, byte_range=nothing), f"reading {key}")
        if result.state != "value":
            raise FileNotFoundError(errno.ENOENT, "it does not exist", f"{self.url}/{key}")
        return result.stamp.generation.hex()

    def changed(
        self, key: str, generation: str | None, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, str] | None:
        """Return an object's bytes and generation, or `None` if it still has `generation` or does not exist.

        Args:
          key: the object.
          generation: the generation that is known already, from an earlier call.
          start: first byte; `None` is 0.
          stop: byte after the last; `None` is the end.

        Raises:
          OutOfRange: it has changed, and ends before `stop`.
          BucketError: the request failed.
        """
        span = None if start is None and stop is None else slice(start, stop)
        known = bytes.fromhex(generation) if generation and generation.strip("0") else None  # emulators have only zeros
        result = self._wait(
            lambda kv: kv.read(self._prefix + key, if_not_equal=known, byte_range=span), f"reading {key}"
        )
        return (bytes(result.value), result.stamp.generation.hex()) if result.state == "value" else None

    def exists(self, key: str) -> bool:
        """Whether there is an object; raises as `read`."""
        try:
            self.generation(key)
        except FileNotFoundError:
            return False
        return True

    def write(self, key: str, data: bytes | bytearray | memoryview, *, new: bool = False) -> str:
        """Write an object; returns its generation once it is stored. An object is never seen half written.

        Args:
          key: the object.
          data: its bytes.
          new: whether to fail if it exists already.

        Raises:
          FileExistsError: `new`, and it exists.
          BucketError: the request failed.
        """
        content = bytes(data)
        condition = _ABSENT if new else None
        stamp = self._wait(lambda kv: kv.write(self._prefix + key, content, if_equal=condition), f"writing {key}")
        if new and not stamp.generation:  # it exists, perhaps since an earlier try of this request was carried out
            try:
                mine = self.read(key) == content
            except FileNotFoundError:
                mine = False
            if not mine:
                raise FileExistsError(errno.EEXIST, "it exists already, written by another process", f"{self}/{key}")
        return stamp.generation.hex()

    def delete(self, key: str) -> None:
        """Delete an object, if it exists; raises as `read`."""
        self._wait(lambda kv: kv.write(self._prefix + key, None), f"deleting {key}")

    def delete_folder(self, name: str) -> None:
        """Delete all objects whose key begins with `name` and a slash; raises as `read`."""
        for _ in self.each(self.delete, self.list(f"{name}/")):
            pass

    def list(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted.

        Args:
          prefix: beginning of the keys.

        Raises:
          BucketError: the request failed, for instance since there is no such bucket.
        """
        import tensorstore as ts

        first = self._prefix + prefix
        last = first[:-1] + chr(ord(first[-1]) + 1) if first else ""
        keys = self._wait(lambda kv: kv.list(ts.KvStore.KeyRange(first, last)), "listing it")
        within = [key for key in map(bytes.decode, keys) if key.startswith(first)]  # emulators return others, too
        return sorted(key[len(self._prefix) :] for key in within)

    def each(self, call: Callable[..., T], *items: Iterable[Any]) -> Iterable[T]:
        """Call a function for many objects, several at a time, and return the results in order.

        Args:
          call: the function.
          *items: its arguments, as for `map`.
        """
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(call, *items)

    def check(self) -> None:
        """Check that the bucket exists and can be read.

        Raises:
          BucketError: it does not, or cannot.
        """
        self.list("\x7f-none")

    def _wait(self, request: Callable[[Any], Any], doing: str) -> Any:
        try:
            scheme, _, bucket = self.url.split("/")[:3]
            return request(_open(scheme, bucket, *_server(scheme))).result(timeout=PATIENCE)
        except (ValueError, RuntimeError, NotImplementedError, TimeoutError, KeyError) as e:
            raise self.error(e, doing) from None

    def server(self) -> tuple[str | None, str | None]:
        """Return the server and the region in the environment; `None` is the provider's own, and its default."""
        return _server(self.url.split("/")[0])

    def error(self, e: Exception, doing: str) -> BucketError:
        """Make the error for a request that raised `e`.

        Args:
          e: an error of TensorStore or boto3.
          doing: what the request was for, such as "reading config.gin".
        """
        text = str(e) or type(e).__name__
        scheme, bucket = self.url.split("/")[0], self.url.split("/")[2]
        code = _CODE.search(text)
        first = text.splitlines()[0]
        if text.startswith(_OUT_OF_RANGE):
            size = _SIZE.search(text)
            beyond = OutOfRange(errno.EINVAL, f"{self.url}: {doing}: it is shorter", self.url)
            beyond.size = int(next(filter(None, size.groups()))) if size else None
            return beyond
        short = code[1] if code else first[:200]
        if _DENIED.search(text):
            why, number = f"access is denied ({short}); check or renew the credentials ({_WHERE[scheme]})", errno.EACCES
        elif "retry attempts failed" in text or isinstance(e, TimeoutError):
            why, number = f"the server does not answer ({short})", errno.EIO
        elif _MISSING_BUCKET.search(text):
            why, number = f"there is no bucket {scheme}//{bucket}; create it first", errno.ENOENT
        else:
            why, number = short, errno.EIO
        return BucketError(number, f"{self.url}: {doing}: {why}", self.url)


_WHERE = {
    "s3:": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs:": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
}

E = TypeVar("E", bound=JaxscaleError)


def failure(kind: type[E], e: BucketError, message: str | None = None, *, running: bool = False) -> E:
    """Make the error of a command or run that cannot go on; its exit code says whether another start may succeed.

    Args:
      kind: the class of the error.
      e: the failed request.
      message: the message; by default that of `e`.
      running: whether the bucket could be used before, so that refused credentials have expired and may be renewed.
    """
    error = kind(message or e.strerror)
    if e.errno == errno.EIO or running and e.errno == errno.EACCES:
        error.code = LOST
    return error


_environment = threading.Lock()


def server(scheme: str) -> str:
    """Return the server that the environment names in place of Amazon's or Google's, as part of a folder's name.

    Args:
      scheme: "s3" or "gs".

    Returns:
      such as "localhost-9000" for AWS_ENDPOINT_URL=http://localhost:9000; empty for the provider's own server.
    """
    url = _server(f"{scheme}:")[0] or ""
    return re.sub(r"[^A-Za-z0-9.]+", "-", url.partition("://")[2] or url).strip("-.").lower()


def _server(scheme: str) -> tuple[str | None, str | None]:
    """Return the server and the region in the environment."""
    if scheme == "gs:":
        return os.environ.get("STORAGE_EMULATOR_HOST") or None, None
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    return endpoint, os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


@functools.cache
def _open(scheme: str, bucket: str, endpoint: str | None, region: str | None) -> Any:
    """Open TensorStore's key-value store of a bucket.

    All of the bucket: TensorStore aborts the process if a server lists keys outside of the folder it was asked for.
    """
    with _environment:
        # a server that sends nothing for a minute counts as lost, and the request is repeated
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
        if scheme == "gs:" and endpoint is not None:
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    import tensorstore as ts

    driver = {"s3:": "s3", "gs:": "gcs"}[scheme]
    spec: dict[str, Any] = {"driver": driver, "bucket": bucket}
    if driver == "s3":
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"} if endpoint else {}
        spec |= {"aws_region": region} if region else {}
        # asked for by name, since the default chain prints an error for each file in ~/.aws that is missing
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            spec["aws_credentials"] = {"type": "environment"}
    spec["context"] = {f"{driver}_request_retries": RETRIES}
    try:
        return ts.KvStore.open(spec).result()
    except (ValueError, RuntimeError) as e:
        why = str(e).splitlines()[0][:200]
        raise BucketError(errno.EINVAL, f"{scheme}//{bucket} cannot be opened: {why}", bucket) from None
