"""Check symbolic links in a model's folder: they may only lead to files of the same model."""

from __future__ import annotations

from pathlib import Path

from jaxscale.errors import CheckpointError

_READ = (".json", ".safetensors", ".txt", ".model", ".jinja")


def check_links(folder: Path) -> None:
    """Check that no file which an import may read or copy is a link out of the model's folder.

    In a cache of the Hugging Face Hub, `models--OWNER--NAME/snapshots/REVISION/FILE` is a link into
    `models--OWNER--NAME/blobs`, which is part of the same model.

    Args:
      folder: the model's folder.

    Raises:
      CheckpointError: a file is such a link; the message names it and its target.
    """
    root = folder.resolve()
    own = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        own.append(root.parent.parent / "blobs")
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.name.endswith(_READ) or not path.is_symlink():
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError):
            raise CheckpointError(f"{path} is a link that leads to itself; replace it by the file") from None
        if not any(target.is_relative_to(place) for place in own):
            raise CheckpointError(
                f"{path} is a link out of its folder, to {target}, which is not followed; copy the file into {folder}"
            )
