"""Export a checkpoint to Orbax's format, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxscale.errors import CheckpointError
from jaxscale.train.checkpoints.chunks import whole
from jaxscale.train.checkpoints.manifest import read_manifest
from jaxscale.train.checkpoints.places import Files
from jaxscale.train.checkpoints.read import open_arrays
from jaxscale.working_copy import local, upload


def to_orbax(files: Files, out: str | Path) -> int:
    """Write a checkpoint as a nested dict of arrays with Orbax's `StandardCheckpointer`, all of it in host memory.

    Every chunk's digest is checked. Names are split at slashes: `params/embed/weight` becomes
    `{"params": {"embed": {"weight": ...}}}`.

    Args:
      files: the checkpoint's files.
      out: a folder that does not exist yet; or its URL in a bucket, to which the files are uploaded.

    Returns:
      how many arrays were written.

    Raises:
      CheckpointError: `out` exists already, or cannot be written.
      DamagedCheckpoint: the checkpoint is not what was written.
    """
    import orbax.checkpoint as ocp

    place, out = out, local(out)
    if out.exists():
        raise CheckpointError(f"{place} already exists; name another folder")
    manifest = read_manifest(files)
    arrays = open_arrays(files, manifest)
    tree: dict[str, Any] = {}
    for name, leaf in manifest["leaves"].items():
        *folders, last = name.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        region = whole(tuple(leaf["shape"]))
        inner[last] = arrays.read(name, [region])[region]
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(out.absolute(), tree)
        upload(out)
    except (OSError, ValueError, RuntimeError) as e:
        raise CheckpointError(
            f"{place} could not be written: {(str(e).strip() or type(e).__name__).splitlines()[0]}"
        ) from e
    return len(manifest["leaves"])
