"""A checkpoint of an older schema, rewritten as one of this: with chunks, and digests that guard them from then on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jaxscale.errors import DamagedCheckpoint
from jaxscale.train.checkpoints import digest, places
from jaxscale.train.checkpoints.chunks import as_bytes, chunk_shape, chunks_in, whole, zarr_json
from jaxscale.train.checkpoints.manifest import FILE, read_manifest
from jaxscale.train.checkpoints.read import FOLDER, dtype_named, open_arrays
from jaxscale.train.checkpoints.write import write_file

_OLD = ("arrays", "manifest", "_CHECKPOINT_METADATA", "commit_success.txt")
"""What schema 1 had in a checkpoint's folder."""


def convert(path: Path) -> bool:
    """Converts a checkpoint's folder in place, a chunk in memory at a time.

    The new manifest is what makes it a checkpoint of the new schema, and appears whole; what is old is deleted after
    the new has been read back and checked. A kill on the way leaves the one or the other.

    Returns:
      whether there was something to convert.

    Raises:
      DamagedCheckpoint: it cannot be read; it is left as it is.
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
            raise DamagedCheckpoint(f"{fault}, right after it was converted; the old form is as it was")
        places.sync_folders(path)
        write_file(path / f"{FILE}.writing", digest.sealed(new).encode())
        os.replace(path / f"{FILE}.writing", path / FILE)
        places.sync(path)
    for name in _OLD:  # also when a kill came in between
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)
    return todo
