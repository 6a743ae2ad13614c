"""Names of checkpoints on the Hugging Face Hub, made folders on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from jaxscale.errors import CheckpointError
from jaxscale.interop.companions import FILES
from jaxscale.interop.peft import ADAPTER_CONFIG

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: itself, or for a name "owner/model" the Hub's, downloaded once.

    Only safetensors and the files that travel with them are downloaded.

    Args:
      source: a folder, or a name on the Hub.
      revision: a branch, tag or commit of the Hub's.

    Raises:
      CheckpointError: neither is there, the network is not, or `huggingface_hub` is not installed.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; name the folder that holds it, with its config.json")
    if not isinstance(source, str) or not _NAME.fullmatch(source):
        raise CheckpointError(f"there is no folder {path}, and it is no name on the Hub, such as Qwen/Qwen3-0.6B")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no folder {path}, and to look for '{source}' on the Hugging Face Hub needs the package "
            "huggingface_hub: pip install 'jaxscale[hf]'"
        ) from None
    wanted = ["*.safetensors", "*.safetensors.index.json", ADAPTER_CONFIG, *FILES]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except Exception as e:  # its errors and those of what it downloads with share no class
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CheckpointError(
            f"there is no folder {path}, and '{source}' could not be had from the Hugging Face Hub: {first}"
        ) from None
