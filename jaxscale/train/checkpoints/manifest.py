"""A checkpoint's manifest: its arrays, its run and step, and the digest of every chunk.

It is written last, with its own SHA-256. It is a dict of

  schema, step, run    version of this format, step, id of the run (or null)
  digest               name of the chunks' digest (`DIGESTS`), null if they have none
  leaves               by name of array: shape, dtype, logical axes, chunk shape, and digest by file name
  layout, data, ...    facts about the run, added by the training loop
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import reading
from jaxscale.buckets import BucketError, failure
from jaxscale.errors import CheckpointError, DamagedCheckpoint, OtherArrays
from jaxscale.layout.tensors import path_name
from jaxscale.optim import is_quantized
from jaxscale.train.checkpoints.check import check_manifest
from jaxscale.train.checkpoints.chunks import HostArray
from jaxscale.train.checkpoints.digest import unsealed
from jaxscale.train.checkpoints.migrate import SCHEMA, migrated
from jaxscale.train.checkpoints.places import MANIFEST, OLD_MANIFEST, DiskFiles, Files

Tree = Any
Manifest = dict[str, Any]


def read_manifest(checkpoint: Files | Path) -> Manifest:
    """Read the manifest of a checkpoint, migrated to the newest schema.

    Args:
      checkpoint: the checkpoint's files, or its folder on a disk.

    Raises:
      DamagedCheckpoint: it is missing, not what was written, or of another step.
      CheckpointError: its schema is newer than this version.
    """
    files = DiskFiles(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    what = f"checkpoint {files.step} in {files.folder}"
    try:
        old = not files.has(MANIFEST) and files.has(OLD_MANIFEST)
        file = OLD_MANIFEST if old else MANIFEST
        text = reading.decoded(files.read(file).tobytes())
        manifest = reading.parse_json(text) if old else unsealed(text)
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
        reading.check_depth(manifest)
        schema = manifest.get("schema")
        if not reading.is_whole(schema, 1):
            raise ValueError(f"schema is {reading.clipped(repr(schema))}")
    except BucketError as e:  # nothing is known about the checkpoint
        raise failure(CheckpointError, e) from None
    except (OSError, ValueError, RecursionError) as e:
        raise DamagedCheckpoint(f"{what} has no readable manifest: {files.step}/{file}: {e}") from None
    if schema > SCHEMA:
        raise CheckpointError(f"{what} has schema {schema}, but this version reads up to {SCHEMA}; update jaxscale")
    manifest = migrated({**manifest, "step": int(files.step)} if old else manifest)
    if manifest.get("step") != int(files.step):
        step = reading.clipped(repr(manifest.get("step")))
        raise DamagedCheckpoint(f"{what} is of step {step} according to {files.step}/{file}")
    try:
        check_manifest(manifest)
    except ValueError as e:
        raise DamagedCheckpoint(f"{what} has no readable manifest: {files.step}/{file}: {e}") from None
    return manifest


def flatten(state: Tree) -> dict[str, Any]:
    """Flatten a state (of arrays, shapes or shardings) to a dict by name; the random key becomes its uint32 data."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        elif isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        out[path_name(path)] = leaf
    return out


def leaves_of(
    state: Tree, arrays: dict[str, HostArray], infos: Tree, extra: Mapping[str, Tree] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the manifest's "leaves": shape, dtype, axes, chunk and 8-bit encoding per array, without digests yet.

    "positive" in an encoding says that positive second moments were not rounded to 0, which older versions did.

    Args:
      state: the tree of arrays, in which 8-bit state is found; `{}` if there is none.
      arrays: the arrays to write, by name.
      infos: a `TensorInfo` per parameter.
      extra: a `TensorInfo` per other array of the algorithm's state (see `jaxscale.step.algorithm`).
    """
    axes = {f"params/{i.path}": i.axes for i in jax.tree.leaves(infos)}
    axes |= {f"extra/{path_name(p)}": i.axes for p, i in jax.tree_util.tree_leaves_with_path(dict(extra))}
    leaves: dict[str, dict[str, Any]] = {
        name: {
            "shape": list(x.shape),
            "dtype": x.dtype.name,
            "axes": list(axes.get(name, ())) or None,
            "chunk": list(x.chunk),
        }
        for name, x in arrays.items()
    }
    for path, q in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantized):
        if is_quantized(q):
            encoding = {"tile": list(q.tile), "format": q.format, "signed": q.signed, "positive": True}
            leaves[f"{path_name(path)}/codes"]["quantized"] = encoding
    return leaves


def check_same(saved: dict[str, Any], want: dict[str, Any], what: str) -> None:
    """Check that a manifest's leaves are the expected arrays.

    Args:
      saved: leaves of a manifest.
      want: expected shapes and dtypes, by name.
      what: the checkpoint, for the message.

    Raises:
      OtherArrays: arrays are missing, extra, or of another shape or dtype; the message lists them.
    """
    wrong = [f"{k} is missing" for k in want if k not in saved]
    wrong += [f"{k} is not in the model" for k in saved if k not in want]
    for k in want:
        if k in saved:
            a, b = (tuple(saved[k]["shape"]), saved[k]["dtype"]), (tuple(want[k].shape), np.dtype(want[k].dtype).name)
            if a != b:
                wrong.append(f"{k} is {a[1]}{list(a[0])}, the model has {b[1]}{list(b[0])}")
    if wrong:
        more = f", and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise OtherArrays(f"{what} does not fit this model and optimizer: {'; '.join(wrong[:12])}{more}")
