"""Arrays that a model computed once for every row of a corpus, such as a teacher's log-probabilities.

    meta.json              format, seq_len, origin, and for each split the source's fingerprint, the number of rows and
                           dtype, shape and digests' SHA-256 of each array; sealed, written last
    SPLIT.NAME.bin         the array, rows one after the other, little-endian
    SPLIT.NAME.digests     the digest of every 64 KiB of it, uint64

`jaxscale annotate` writes such a folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from jaxscale.bucket_files import copied_folder
from jaxscale.buckets import Bucket, BucketError, failure, is_url
from jaxscale.config import register
from jaxscale.data.batch import Batch, Corpus, Ordered, Source
from jaxscale.data.cache import cache_folder
from jaxscale.data.checked import Checked, digests_of
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DamagedFile, DataError, near
from jaxscale.large_objects import upload
from jaxscale.seals import DIGESTS, NEW, open_json, seal_json

FORMAT = 1
META = "meta.json"
ADVICE = "write it with jaxscale annotate"
EXISTS = "already exists; remove it, or write another with --out"


@register(name="annotated")
@dataclass(frozen=True)
class Annotated:
    """A corpus with arrays that a model computed for each of its rows (`jaxscale annotate CONFIG --by RUN`).

    Args:
      data: the corpus.
      folder: the folder of the arrays, or its URL in a bucket, which is copied to this machine's cache.

    Raises:
      DataError: `data` is not a corpus.
    """

    data: Corpus
    folder: str
    name: ClassVar[str] = "annotated"

    def __post_init__(self) -> None:
        if isinstance(self.data, type) or not hasattr(self.data, "source"):
            raise DataError(f"annotated.data must be a corpus such as preference_files(), not {self.data!r}")

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return the rows of the corpus with the arrays."""
        rows = self.data.source(tokenizer, seq_len=seq_len, split=split, packing=packing, cache=cache)
        return AnnotatedRows(rows, on_disk(self.folder), split)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the corpus's `token_ids`, if it has them.

        Args:
          tokenizer: the tokenizer.
        """
        return self.data.token_ids(tokenizer) if hasattr(self.data, "token_ids") else None


def on_disk(folder: str | Path) -> Path:
    """Return a folder of arrays, or of one in a bucket a copy on this machine, made at the first call.

    Args:
      folder: the folder, or its URL.

    Raises:
      DataError: the bucket has no such folder, or cannot be read.
    """
    if not is_url(folder):
        return Path(folder).expanduser()
    try:
        return copied_folder(folder, ("*.bin", "*.digests", META))
    except BucketError as e:
        raise failure(DataError, e) from None
    except OSError as e:
        raise DataError(f"{folder} cannot be read ({e.strerror or e}); {ADVICE}") from None


def annotated_by(corpus: object) -> dict[str, Any] | None:
    """Return what computed the arrays of an annotated corpus: "run" (its id), "path" and "step"; else `None`.

    Args:
      corpus: any corpus.

    Raises:
      DataError: the folder is missing or damaged.
    """
    return read_meta(on_disk(corpus.folder))["by"] if isinstance(corpus, Annotated) else None


class AnnotatedRows:
    """A source with further arrays.

    Args:
      rows: the source that was annotated.
      folder: the folder of the arrays.
      split: "train" or "heldout".

    Raises:
      DataError: the folder is missing, damaged, or of other rows; or `rows` is a mixture.
    """

    def __init__(self, rows: Source, folder: Path, split: str):
        if isinstance(rows, Ordered):
            raise DataError(f"'{rows.name}' orders its rows itself; annotate the corpora that it consists of")
        self._rows, self.folder = rows, folder
        self.name, self.vocab_size, self.seq_len = rows.name, rows.vocab_size, rows.seq_len
        self.grouping = getattr(rows, "grouping", None)
        meta = read_meta(folder)
        if split not in meta["splits"]:
            raise DataError(f"{folder} has no {split} rows{near(split, meta['splits'])}; {ADVICE}")
        own = meta["splits"][split]
        if own["fingerprint"] != rows.fingerprint or own["rows"] != len(rows):
            raise DataError(
                f"{folder} was computed for other rows of '{rows.name}' (another corpus, tokenizer, seq_len or "
                f"packing); {ADVICE}"
            )
        self.fingerprint = hashlib.sha256(f"{rows.fingerprint} {meta['digest']}".encode()).hexdigest()
        self._arrays = {
            n: (_open(folder, f"{split}.{n}", x, len(rows)), tuple(x["shape"])) for n, x in own["arrays"].items()
        }

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, ids: Int64[np.ndarray, " b"]) -> Batch:
        """Return rows by number; see `Source`."""
        batch = self._rows.rows(ids)
        for name, (flat, shape) in self._arrays.items():
            size = int(np.prod(shape))
            index = np.asarray(ids, np.int64)[:, None] * size + np.arange(size)
            batch[name] = flat[index.reshape(-1)].reshape(-1, *shape)
        return batch


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what `meta.json` says, and as "digest" the SHA-256 of it.

    Args:
      folder: the folder.

    Raises:
      DataError: it is missing, damaged or of another format.
    """
    try:
        text = (folder / META).read_bytes()
        meta, _ = open_json(text)
    except OSError:
        raise DataError(f"{folder} has no {META}; {ADVICE}") from None
    except DamagedFile as e:
        raise DataError(f"{folder / META} is damaged ({e}); {ADVICE}") from None
    if meta.get("format") != FORMAT:
        raise DataError(f"{folder} has format {meta.get('format')!r}, and this version reads {FORMAT}; {ADVICE}")
    return {**meta, "digest": hashlib.sha256(text).hexdigest()}


def _open(folder: Path, stem: str, about: Mapping[str, Any], rows: int) -> Checked:
    count = rows * int(np.prod(about["shape"]))
    try:
        values = np.memmap(folder / f"{stem}.bin", about["dtype"], "r", shape=(count,))
        digests = np.fromfile(folder / f"{stem}.digests", "<u8")
    except (OSError, ValueError) as e:
        raise DataError(f"{folder}/{stem}.bin cannot be read ({e}); {ADVICE}") from None
    if values.nbytes != (folder / f"{stem}.bin").stat().st_size or _sha256(digests) != about["digests"]:
        raise DataError(f"{folder}/{stem}.digests is not what was written; {ADVICE}")
    return Checked(name=f"{folder}/{stem}.bin", values=values, digests=digests, digest=NEW)


def write_annotations(
    folder: str | Path,
    sources: Mapping[str, Source],
    arrays: Mapping[str, tuple[tuple[int, ...], str]],
    compute: Callable[[Source], Iterable[Batch]],
    about: Mapping[str, Any],
) -> str | Path:
    """Compute arrays for all rows of sources, and write them; a folder that was not finished is not read.

    Args:
      folder: the folder to write, or its URL in a bucket; it must not exist.
      sources: rows by split.
      arrays: shape of a row and dtype, by name.
      compute: yields the arrays of consecutive rows of a source, (rows, ...), until all were computed.
      about: what computed them, for `meta.json`.

    Raises:
      DataError: the folder exists.
      OSError: it cannot be written.
    """
    if is_url(folder):
        return _written_to_bucket(folder, sources, arrays, compute, about)
    folder = Path(folder).expanduser()
    if folder.exists():
        raise DataError(f"{folder} {EXISTS}")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        splits = {}
        for split, source in sources.items():
            files = {n: (partial / f"{split}.{n}.bin").open("wb") for n in arrays}
            count = 0
            try:
                for batch in compute(source):
                    for name, file in files.items():
                        file.write(np.ascontiguousarray(batch[name], arrays[name][1]).data)
                    count += len(batch[next(iter(arrays))])
            finally:
                for file in files.values():
                    file.close()
            assert count == len(source), f"{count} rows of {len(source)} were computed"
            entries = {n: _sealed(partial / f"{split}.{n}.bin", shape, dtype) for n, (shape, dtype) in arrays.items()}
            splits[split] = {"fingerprint": source.fingerprint, "rows": count, "arrays": entries}
        meta = {"format": FORMAT, "digests": NEW, **about, "splits": splits}
        (partial / META).write_text(seal_json(meta, indent=2))
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _written_to_bucket(url: str | Path, *args: Any) -> str:
    """Write a folder in this machine's cache, and copy it into a bucket, `meta.json` last."""
    bucket = Bucket(url)
    try:
        bucket.check()
        if bucket.exists(META):
            raise DataError(f"{bucket} {EXISTS}")
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".upload-") as temporary:
            made = Path(write_annotations(Path(temporary) / "arrays", *args))
            for file in made.iterdir():
                if file.name != META:
                    upload(bucket, file.name, file)
            bucket.write(META, (made / META).read_bytes(), new=True)
    except FileExistsError:
        raise DataError(f"{bucket} {EXISTS}") from None
    except BucketError as e:
        raise failure(DataError, e) from None
    return str(url)


def _sealed(file: Path, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Write an array's digests beside it; return its entry."""
    assert NEW in DIGESTS
    digests = digests_of(np.memmap(file, "u1", "r"), NEW)
    digests.tofile(file.with_suffix(".digests"))
    return {"shape": list(shape), "dtype": np.dtype(dtype).newbyteorder("<").str, "digests": _sha256(digests)}


def _sha256(digests: np.ndarray) -> str:
    return hashlib.sha256(digests.tobytes()).hexdigest()
