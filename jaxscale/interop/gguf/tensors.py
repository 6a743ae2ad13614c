"""The tensors of a GGUF file by the names of a Hugging Face folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.gguf.architectures import ROPE_FREQS, Architecture, Config
from jaxscale.interop.gguf.file import GGUFFile
from jaxscale.interop.gguf.types import PLAIN
from jaxscale.interop.safetensors import Stored, Tensors


class GGUFTensors(Tensors):
    """The tensors of a GGUF file, decoded to float32, by the names of a Hugging Face folder.

    One is decoded at a time, and kept until the next one is read.

    Args:
      file: the file.
      architecture: its architecture.
      config: the fields of config.json that it stands for.
    """

    def __init__(self, file: GGUFFile, architecture: Architecture, config: Config):
        self.folder, self._file, self._architecture, self._config = file.path, file, architecture, config
        self._lock, self._last = threading.RLock(), ("", np.zeros(0, np.float32))
        self._entries: dict[str, Stored] = {}
        self._places: dict[str, tuple[str, int | None]] = {}
        for name, entry in file.tensors.items():
            if name == ROPE_FREQS:
                continue  # part of the config
            experts = entry.shape[0] if len(entry.shape) == 3 else 1
            names = architecture.ours(name, experts)
            several = len(entry.shape) == 3
            dtype = entry.type.name if entry.type.name in PLAIN and not architecture.offset(name) else "F32"
            for i, ours in enumerate(names or [name]):  # an unknown one keeps its name, and is refused by it
                shape = entry.shape[1:] if several and names else entry.shape
                self._entries[ours] = Stored(file.path, dtype, shape, entry.start, entry.start + entry.size)
                self._places[ours] = name, i if several and names else None

    @property
    def quantised(self) -> list[str]:
        """The types of quantised tensors, in order."""
        return sorted({t.type.name for t in self._file.tensors.values() if t.type.name not in PLAIN})

    def __getitem__(self, name: str) -> Stored:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def reading(self, name: str) -> Iterator[np.ndarray]:
        """See `Tensors.reading`."""
        with self._lock:
            if self._last[0] != name:
                self._last = ("", np.zeros(0, np.float32))  # free it before the next one is decoded
                self._last = (name, self._read(name))
            yield self._last[1]

    def _read(self, name: str) -> np.ndarray:
        theirs, index = self._places[name]
        values = self._file.read(theirs, index)
        if self._architecture.offset(theirs):
            values -= 1
        heads = self._architecture.heads(theirs, self._config)
        if heads is not None:
            if len(values) % (2 * heads):
                raise CheckpointError(
                    f"{theirs} of {self.folder} has {len(values)} rows, which {heads} heads cannot have"
                )
            pairs = values.reshape(heads, -1, 2, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        values.flags.writeable = False
        return values

    def fingerprint(self) -> list[list[Any]]:
        """See `Tensors.fingerprint`."""
        return self._file.fingerprint()


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of queries or keys as llama.cpp has them: dimension i of a head beside i + n/2.

    Args:
      values: (heads · width, ...).
      heads: number of heads.
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
