"""Convert a checkpoint of an older schema to the current one, which has chunks and digests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jaxscale.errors import DamagedCheckpoint
from jaxscale.train.checkpoints import digest, places
from jaxscale.train.checkpoints.chunks import as_bytes, chunk_shape, chunks_in, whole, zarr_json
from jaxscale.train.checkpoints.manifest import read_manifest
from jaxscale.train.checkpoints.places import MANIFEST, write_file
from jaxscale.train.checkpoints.read import FOLDER, dtype_named, open_arrays

_OLD = ("arrays", "manifest", "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files of a checkpoint of schema 1."""


def convert(path: Path) -> bool:
    """Convert a checkpoint's folder in place, with one chunk in memory at a time.

    The new manifest is written atomically, and old files are deleted after the new ones have been read back and
    checked, so that a killed process leaves a valid checkpoint of one schema or the other.

    Args:
      path: the checkpoint's folder.

    Returns:
      whether it was of an older schema.

    Raises:
      DamagedCheckpoint: it cannot be read; it stays as it is.
    """
    old = read_manifest(path)
    todo = old["arrays"] != "chunks"
    if todo:
        new = {**{k: v for k, v in old.items() if k != "written"}, "arrays": "chunks", "digest": digest.NEW}
        arrays = open_arrays(path, old)
        new["leaves"] = {}
        for name, leaf in old["leaves"].items():
            folder = path / FOLDER / name
            folder.mkdir(parents=True, exist_ok=True)
            shape = tuple(leaf["shape"])
            chunk = chunk_shape(shape, dtype_named(leaf["dtype"]).itemsize)
            files = {}
            for key, region in chunks_in(whole(shape), chunk):
                data = as_bytes(arrays.read(name, [region])[region])
                files[key] = digest.DIGESTS[digest.NEW](data)
                write_file(folder / key, data)
            new["leaves"][name] = {**leaf, "chunk": list(chunk), "files": files}
            write_file(folder / "zarr.json", zarr_json(new["leaves"][name]).encode())
        for fault in open_arrays(path, new).faults():
            raise DamagedCheckpoint(f"{fault}, right after it was converted; the old files are unchanged")
        places.sync_folders(path)
        write_file(path / f"{MANIFEST}.writing", digest.sealed(new).encode())
        os.replace(path / f"{MANIFEST}.writing", path / MANIFEST)
        places.sync(path)
    for name in _OLD:  # also if an earlier conversion was killed before this
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)
    return todo
