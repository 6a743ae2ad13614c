"""Objects of any size: they are read in ranges, and written to S3 in parts, so that none is held in memory whole.

TensorStore writes an object in one request, which S3 takes up to 5 GiB. In parts it is written by boto3, where that is
installed, with the credentials and the server that boto3 finds, which are those that TensorStore finds.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
from pathlib import Path
from typing import Any

from jaxscale.buckets import Bucket, BucketError, OutOfRange

PART = 16 * 2**20
"""Bytes of a range."""

LARGE = 64 * 2**20
"""Bytes above which an object is written in parts."""

MOST = 5 * 2**30
"""Bytes that S3 takes in one request."""


def download(bucket: Bucket, key: str, generation: str | None, file: Path) -> str | None:
    """Write an object into a file; returns its generation, or `None` if it has `generation` or does not exist.

    Args:
      bucket: the folder.
      key: the object.
      generation: the generation that is known already.
      file: the file to write.

    Raises:
      BucketError: a request failed, or the object changes again and again while it is read.
      OSError: the file cannot be written.
    """
    for _ in range(3):
        try:
            beyond = bucket.changed(key, generation, PART, PART + 1)
        except OutOfRange:  # most are small, and come in one piece
            whole = bucket.changed(key, generation)
            if whole is not None:
                file.write_bytes(whole[0])
            return None if whole is None else whole[1]
        if beyond is None:
            return None
        try:
            _in_ranges(bucket, key, beyond[1], file)
        except (FileNotFoundError, BucketError) as e:
            if isinstance(e, BucketError) and e.errno != errno.ESTALE:
                raise
            continue
        return beyond[1]
    raise BucketError(errno.EIO, f"{bucket}/{key} changes while it is read; try again when nobody writes it", key)


def _in_ranges(bucket: Bucket, key: str, generation: str, file: Path) -> None:
    """Write the object of this generation into a file, range by range."""
    with file.open("wb") as out:
        for start in itertools.count(0, PART):
            try:
                out.write(bucket.read(key, start, start + PART, generation=generation))
            except OutOfRange:
                break
        with contextlib.suppress(OutOfRange):  # nothing is left
            out.write(bucket.read(key, start, generation=generation))


def upload(bucket: Bucket, key: str, file: Path) -> str:
    """Write a file into an object; returns the object's generation.

    Args:
      bucket: the folder.
      key: the object.
      file: the file.

    Raises:
      BucketError: a request failed; `errno.EFBIG`: boto3 is needed, and is not installed.
      OSError: the file cannot be read.
    """
    size = file.stat().st_size
    if size <= LARGE or not bucket.url.startswith("s3:"):
        return bucket.write(key, file.read_bytes())
    try:
        boto3 = importlib.import_module("boto3")
    except ImportError:
        if size <= MOST:
            return bucket.write(key, file.read_bytes())
        why = f"has {size:,} bytes, and S3 takes more than 5 GiB in parts only: pip install 'jaxscale[s3]'"
        raise BucketError(errno.EFBIG, f"{bucket}/{key} {why}", key) from None
    _in_parts(boto3, bucket, key, file)
    return bucket.generation(key)


def _in_parts(boto3: Any, bucket: Bucket, key: str, file: Path) -> None:
    from boto3.exceptions import Boto3Error
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    endpoint, region = bucket.server()
    plain = {"addressing_style": "path"} if endpoint else {}  # as TensorStore does
    settings = Config(retries={"mode": "standard", "total_max_attempts": 8}, s3=plain)
    name, _, prefix = bucket.url.removeprefix("s3://").partition("/")
    try:
        region = region or ("us-east-1" if endpoint else None)
        client = boto3.session.Session().client("s3", endpoint_url=endpoint, region_name=region, config=settings)
        parts = TransferConfig(multipart_threshold=LARGE, max_concurrency=4)
        client.upload_file(os.fspath(file), name, f"{prefix}/{key}" if prefix else key, Config=parts)
    except (BotoCoreError, ClientError, Boto3Error) as e:
        raise bucket.error(e, f"writing {key}") from None
