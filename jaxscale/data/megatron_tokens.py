"""A corpus of Megatron-LM's indexed datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from jaxscale.config import register
from jaxscale.data.files import File, beside, check_sizes, local_copy, matching, size_of
from jaxscale.data.scan import Scan, TokenArray
from jaxscale.data.token_arrays import Patterns, TokenArrays, check_distinct, patterns_of
from jaxscale.errors import DataError, near

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34
"""Bytes of an index before its arrays: magic (9), version (8), dtype (1), and the counts of its arrays (8 each)."""
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Codes of dtypes in an index -> NumPy's dtypes."""
UNITS = ("document", "sequence")


@register(name="megatron_tokens")
@dataclass(frozen=True)
class MegatronTokens(TokenArrays):
    """Token ids in Megatron-LM's indexed datasets, pairs of `.bin` and `.idx`; they are memory-mapped and not copied.

    Of a dataset in a bucket the index is copied, and chunks of the ids are fetched as they are needed.

    Megatron's `preprocess_data.py` ends documents with an eos (its eod) if it has `--append-eod`. With `append_eos`
    every document has one last target eos: its own if it ends with one, otherwise an inserted one. Without it documents
    are what the files have. Either way each id of the files is a target once. Empty documents are left out. The split
    of a document is chosen by its file and its number in the file. The format is that of
    `megatron/core/datasets/indexed_dataset.py`, version 1, without modes.

    Args:
      path: path of a dataset without `.bin` or `.idx` ("data/web_text_document"), or a pattern with `~`, `*` and `**`;
        or several of them.
      heldout: fraction of documents held out, or a path or pattern of held-out datasets, which are then not trained on.
      append_eos: whether a document that does not end with an eos gets one.
      unit: what a document is: Megatron's "document", or "sequence" (`--split-sentences` makes several in a document).
      vocab_size: number of ids; `None` is the tokenizer's.
      eos: the token that ends documents; `None` is the tokenizer's.

    Raises:
      DataError: a setting is invalid.
    """

    path: Patterns
    heldout: float | Patterns = 0.05
    append_eos: bool = True
    unit: str = "document"
    vocab_size: int | None = None
    eos: int | None = None
    name: ClassVar[str] = "megatron_tokens"
    files_setting: ClassVar[str] = "path"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit not in UNITS:
            raise DataError(f"megatron_tokens.unit = {self.unit!r} does not exist{near(str(self.unit), UNITS)}")

    def arrays(self, files: Patterns) -> list[TokenArray]:
        """Return the array of each dataset that matches, after comparing its index with the sizes of both files."""
        arrays = []
        for pattern in patterns_of(files):
            stem = pattern[:-4] if pattern.endswith((".idx", ".bin")) else pattern
            matches = matching(f"{stem}.idx", ".idx")
            check_sizes(matches)
            arrays += [_Index(path).array(name) for name, path in matches]
        return check_distinct(arrays)

    def documents_of(self, array: TokenArray, scan: Scan) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return the documents or the sequences."""
        file = beside(array.path, ".idx")
        if file is None:
            raise DataError(f"the index of {array.path} does not exist any more; restore it")
        index = _Index(file)
        bounds = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
        if self.unit == "document":
            bounds = bounds[index.documents]
        start, length = bounds[:-1], np.diff(bounds)
        return start[length > 0], length[length > 0]


class _Index:
    """An index, memory-mapped and checked: `lengths` of sequences int32, `documents` int64 (their first sequences)."""

    def __init__(self, path: File):
        self.path, copy = path, local_copy(path)
        size = copy.stat().st_size
        with copy.open("rb") as file:
            head = file.read(HEADER)
        if head[:9] != MAGIC or len(head) < HEADER:
            raise DataError(
                f"{path} is not an index of Megatron-LM: it does not begin with MMIDIDX and a header of {HEADER} "
                "bytes; name the .idx that Megatron's preprocess_data.py wrote"
            )
        version, code = int.from_bytes(head[9:17], "little"), head[17]
        if version != 1:
            raise DataError(f"{path} has version {version}, but this reads version 1; write it again with Megatron-LM")
        if code not in DTYPES:
            raise DataError(f"{path} has the dtype code {code}, but codes are 1 to 8; write it again with Megatron-LM")
        self.dtype = np.dtype(DTYPES[code])
        sequences, documents = (int(n) for n in np.frombuffer(head, "<u8", 2, 18))
        expected = HEADER + 12 * sequences + 8 * documents
        if size == expected + sequences and sequences:
            raise DataError(f"{path} has modes of sequences (multimodal data), but only token ids can be read here")
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, but {sequences} sequences and {documents} document bounds take {expected}; "
                "copy it again"
            )
        if not sequences:
            raise DataError(f"{path} has no sequence; write it again, or remove it")
        self.lengths = np.memmap(copy, "<i4", "r", HEADER, (sequences,)).view(np.ndarray)
        pointers = np.memmap(copy, "<i8", "r", HEADER + 4 * sequences, (sequences,)).view(np.ndarray)
        self.documents = np.memmap(copy, "<i8", "r", HEADER + 12 * sequences, (documents,)).view(np.ndarray)
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        consistent = (self.lengths >= 0).all() and pointers[0] == 0 and np.array_equal(pointers[1:], ends[:-1])
        bounds = self.documents
        consistent &= bool(len(bounds)) and bounds[0] == 0 and bounds[-1] == sequences and (np.diff(bounds) >= 0).all()
        if not consistent:
            raise DataError(f"{path} contradicts itself (lengths, offsets or document bounds); copy or write it again")
        self.bytes = int(ends[-1])

    def array(self, name: str) -> TokenArray:
        """Return the ids; `name` is that of the index."""
        data = beside(self.path, ".bin")
        if data is None:
            name = f"{str(self.path)[:-4]}.bin"
            raise DataError(f"{name} does not exist beside {self.path}; copy both files of the dataset")
        size = size_of(data)
        if not size and not self.bytes:
            raise DataError(f"{data} has no token; write it again, or remove it")
        if size != self.bytes:
            raise DataError(f"{data} has {size} bytes, but {self.path} counts {self.bytes}; copy both files again")
        return TokenArray(name, data, self.dtype, 0, size // self.dtype.itemsize)
