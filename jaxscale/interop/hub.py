"""Find a checkpoint's folder, downloading it from the Hugging Face Hub if necessary."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from jaxscale.bucket_files import copied_folder
from jaxscale.buckets import BucketError, failure, is_url, normalized
from jaxscale.errors import CheckpointError
from jaxscale.interop.companions import FILES
from jaxscale.interop.gguf import is_gguf
from jaxscale.interop.peft import ADAPTER_CONFIG
from jaxscale.working_copy import copy_of

PATTERNS = ["*.safetensors", "*.safetensors.index.json", ADAPTER_CONFIG, *FILES]
"""Files of a checkpoint that are downloaded or copied."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, or its GGUF file; a name "owner/model" is downloaded from the Hub once.

    Only safetensors files and their companions (tokenizer, configs) are downloaded.

    Of a folder in a bucket the same files are copied to this machine's working copy, block by block.

    Args:
      source: a folder, or its URL in a bucket; a name on the Hub; or a GGUF file of this machine.
      revision: a branch, tag or commit on the Hub.

    Raises:
      CheckpointError: there is no such folder or name, no network, or `huggingface_hub` is not installed.
    """
    if is_url(source):
        return _from_bucket(normalized(source))
    path = Path(source).expanduser()
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; name its folder, which has a config.json")
    if not isinstance(source, str) or not _NAME.fullmatch(source):
        raise CheckpointError(
            f"there is no folder {path}, and it is not a name on the Hub, such as Qwen/Qwen3-0.6B{_near(path)}"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no folder {path}; downloading '{source}' from the Hugging Face Hub needs the package "
            "huggingface_hub: pip install 'jaxscale[hf]'"
        ) from None
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
    except Exception as e:  # its errors and those of its HTTP library have no common class
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CheckpointError(
            f"there is no folder {path}, and '{source}' could not be downloaded from the Hugging Face Hub: {first}"
            f"{_near(path)}"
        ) from None


def _near(path: Path) -> str:
    """Return the end of a message: the folder beside a missing one whose name is nearest, if one is near."""
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _from_bucket(url: str) -> Path:
    try:
        folder = copied_folder(url, PATTERNS)
    except FileNotFoundError:
        raise CheckpointError(f"there is no folder {url}; name one with config.json and safetensors") from None
    except BucketError as e:
        raise failure(CheckpointError, e) from None
    except OSError as e:
        copy = copy_of(url)
        raise CheckpointError(f"cannot write {copy}, the copy of {url}: {e.strerror}; set JAXSCALE_CACHE") from None
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{url} has no file *.safetensors; of pickled weights make them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
        )
    return folder
