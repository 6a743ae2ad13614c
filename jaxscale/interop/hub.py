"""Find a checkpoint's folder, downloading it from the Hugging Face Hub if necessary."""

from __future__ import annotations

import re
from pathlib import Path

from jaxscale.buckets import BucketError, on_disk
from jaxscale.errors import CheckpointError
from jaxscale.interop.companions import FILES
from jaxscale.interop.peft import ADAPTER_CONFIG

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint; a name "owner/model" is downloaded from the Hub once.

    Only safetensors files and their companions (tokenizer, configs) are downloaded.

    Args:
      source: a folder, or a name on the Hub.
      revision: a branch, tag or commit on the Hub.

    Raises:
      CheckpointError: there is no such folder or name, no network, or `huggingface_hub` is not installed.
    """
    try:
        path = on_disk(source, "checkpoints of other programs are")
    except BucketError as e:
        raise CheckpointError(f"{e.strerror}") from None
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; name its folder, which has a config.json")
    if not isinstance(source, str) or not _NAME.fullmatch(source):
        raise CheckpointError(f"there is no folder {path}, and it is not a name on the Hub, such as Qwen/Qwen3-0.6B")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no folder {path}; downloading '{source}' from the Hugging Face Hub needs the package "
            "huggingface_hub: pip install 'jaxscale[hf]'"
        ) from None
    patterns = ["*.safetensors", "*.safetensors.index.json", ADAPTER_CONFIG, *FILES]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as e:  # its errors and those of its HTTP library have no common class
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CheckpointError(
            f"there is no folder {path}, and '{source}' could not be downloaded from the Hugging Face Hub: {first}"
        ) from None
