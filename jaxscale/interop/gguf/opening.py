"""Open a GGUF file as if it were a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.interop.companions import CONFIG, copy_companions
from jaxscale.interop.gguf.architectures import architecture_of
from jaxscale.interop.gguf.file import GGUFFile
from jaxscale.interop.gguf.tensors import GGUFTensors
from jaxscale.interop.gguf.tokenizer import tokenizer_files

SUFFIX = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return str(path).endswith(SUFFIX)


def open_gguf(path: Path, widen: bool) -> tuple[GGUFTensors, dict[str, Any]]:
    """Open a GGUF file.

    Args:
      path: the file.
      widen: decode quantised tensors.

    Returns:
      its tensors by the names of a Hugging Face folder, and the content of the config.json that it would have.

    Raises:
      CheckpointError: it is no whole GGUF file, its architecture is unknown, or it is quantised, without `widen`.
    """
    file = GGUFFile(path)
    architecture = architecture_of(file)
    values = architecture.config(file)
    tensors = GGUFTensors(file, architecture, values)
    if tensors.quantised and not widen:
        raise CheckpointError(
            f"{path} is quantised ({', '.join(tensors.quantised)}); --widen (in Python: widen=True) imports the values "
            "that its weights stand for"
        )
    return tensors, values


def write_companions(path: Path, values: dict[str, Any], out: Path, say: Callable[[str], None]) -> None:
    """Write the config.json and the tokenizer of a GGUF file into a folder; a tokenizer.json beside the file is copied.

    Args:
      path: the file.
      values: the content of config.json.
      out: the folder.
      say: prints why there is no tokenizer.
    """
    beside = (path.parent / "tokenizer.json").is_file()
    if beside:
        copy_companions(path.parent, out, but=(CONFIG,))
    files = {} if beside else tokenizer_files(GGUFFile(path).metadata, say, str(path))
    for name, content in {**files, CONFIG: values}.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
