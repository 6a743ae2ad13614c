"""A corpus of the `.bin` files of nanoGPT and llm.c."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from jaxscale.config import register
from jaxscale.data.files import File, check_sizes, head_of, matching, size_of
from jaxscale.data.scan import Scan, TokenArray
from jaxscale.data.token_arrays import Patterns, TokenArrays, check_distinct, patterns_of
from jaxscale.errors import DataError, near

log = logging.getLogger("jaxscale")

HEADER = 1024
"""Bytes of the header of llm.c: 256 int32."""
MAGICS: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""The first number of llm.c's header -> version and dtype: GPT-2's ids and Llama 3's."""
FORMATS = ("auto", "nanogpt", "llm.c")
DTYPES = ("uint16", "uint32")


@register(name="bin_tokens")
@dataclass(frozen=True)
class BinTokens(TokenArrays):
    """Token ids in `.bin` files, as nanoGPT and llm.c write them; they are memory-mapped and not copied.

    Of files in a bucket, chunks are fetched as they are needed.

    nanoGPT's files (`data/*/prepare.py`) are uint16 ids and nothing else. llm.c's (`dev/data/data_common.py`) begin
    with 256 int32: 20240520 (uint16 ids) or 20240801 (uint32 ids), the version, and the number of ids.

    A document ends with its eos; if documents begin with an eos, as llm.c writes them, that is the end of the one
    before. A document never crosses files: one that a shard's end cuts is two. An eos without a document is left out.
    Every other id is a target once. The split of a document is chosen by its file and its number in the file.

    Args:
      glob: pattern of the files, with `~`, `*` and `**`, also in a bucket; or several patterns.
      heldout: fraction of documents held out, or a pattern of the held-out files, which are then not trained on.
      format: "nanogpt", "llm.c", or "auto", which is llm.c where files begin with its header.
      dtype: dtype of the ids of files without a header, "uint16" or "uint32".
      vocab_size: number of ids; `None` is the tokenizer's.
      eos: the token that ends documents (50256 for GPT-2, 128000 in llm.c's files for Llama 3); `None` is the
        tokenizer's.

    Raises:
      DataError: a setting is invalid.
    """

    glob: Patterns
    heldout: float | Patterns = 0.05
    format: str = "auto"
    dtype: str = "uint16"
    vocab_size: int | None = None
    eos: int | None = None
    name: ClassVar[str] = "bin_tokens"
    files_setting: ClassVar[str] = "glob"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, known in (("format", FORMATS), ("dtype", DTYPES)):
            value = getattr(self, field)
            if value not in known:
                raise DataError(f"bin_tokens.{field} = {value!r} does not exist{near(str(value), known)}")

    def arrays(self, files: Patterns) -> list[TokenArray]:
        """Return the array of each file that matches; the formats must be the same for all."""
        matches = [match for pattern in patterns_of(files) for match in matching(pattern, ".bin")]
        check_sizes(matches)
        with_header = {path: _magic(path) in MAGICS for _, path in matches}
        if self.format == "nanogpt":
            return check_distinct([self._raw(*match) for match in matches])
        if self.format == "llm.c" or any(with_header.values()):
            return check_distinct([_shard(*match) for match in matches])
        for _, path in matches:
            if 20240000 < _magic(path) < 20500000:  # a date, as all headers of llm.c begin with one
                _shard(path.name, path)  # raises
        return check_distinct([self._raw(*match) for match in matches])

    def documents_of(self, array: TokenArray, scan: Scan) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return the documents between the eos."""
        if not len(scan.ends):
            log.warning("%s has no eos and is one document; if that is wrong, set bin_tokens.eos", array.path)
        bounds = np.unique(np.concatenate([[0], scan.ends + 1, [array.count]]))
        start, length = bounds[:-1], np.diff(bounds)
        empty = (length == 1) & np.isin(start, scan.ends)
        return start[~empty], length[~empty]

    def _raw(self, name: str, path: File) -> TokenArray:
        dtype, size = np.dtype(self.dtype).newbyteorder("<"), size_of(path)
        if size % dtype.itemsize:
            raise DataError(
                f"{path} is not a whole number of {self.dtype} ids (it has {size} bytes); copy it again, or set "
                "bin_tokens.dtype"
            )
        return TokenArray(name, path, dtype, 0, size // dtype.itemsize)


def _magic(path: File) -> int:
    return int.from_bytes(head_of(path, 4), "little", signed=True) if size_of(path) >= HEADER else -1


def _shard(name: str, path: File) -> TokenArray:
    size, magic = size_of(path), _magic(path)
    if magic not in MAGICS:
        known = " or ".join(map(str, MAGICS))
        begins = f"begins with {magic}" if size >= HEADER else f"has only {size} bytes"
        raise DataError(
            f"{path} is not a token shard of llm.c: it {begins}, where a header begins with {known}; name other files, "
            "or set bin_tokens.format = 'nanogpt' if it has ids only"
        )
    version, dtype = MAGICS[magic]
    header = np.frombuffer(head_of(path, 12), "<i4")
    if header[1] != version:
        raise DataError(f"{path} has version {header[1]}, but this reads version {version} of {magic}; write it again")
    expected = HEADER + int(header[2]) * dtype.itemsize
    if size != expected or header[2] < 1:
        raise DataError(
            f"{path} has {size} bytes, but its header counts {header[2]} ids, which take {expected}; copy or download "
            "it again"
        )
    return TokenArray(name, path, dtype, HEADER, int(header[2]))
