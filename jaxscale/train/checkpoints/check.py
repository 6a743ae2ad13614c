"""Validate a manifest. Its digest shows damage, but not that the content is valid: anybody may have written it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from jaxscale import reading
from jaxscale.train.checkpoints.read import ARRAYS, dtype_named

DIMENSIONS = 32


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check a manifest of the newest schema: types, shapes and names are valid, and sizes agree with its files.

    Args:
      manifest: the manifest.

    Raises:
      ValueError: the manifest is invalid; the message completes "CHECKPOINT has no readable manifest: ...".
    """
    for name, kinds in _FACTS.items():
        if name not in manifest:
            raise ValueError(f"{name} is missing")
        if not isinstance(manifest[name], kinds):
            raise ValueError(f"{name} is {_short(manifest[name])}")
    if manifest["arrays"] not in ARRAYS:
        raise ValueError(f"arrays is {_short(manifest['arrays'])}, and is one of {', '.join(sorted(ARRAYS))}")
    chunked = manifest["arrays"] == "chunks"
    if chunked != (manifest["digest"] is not None):
        raise ValueError(f"digest is {_short(manifest['digest'])} of {manifest['arrays']}")
    folder = manifest.get("folder", "")
    if not isinstance(folder, str) or not re.fullmatch("([0-9a-f]{8}/)?", folder):
        raise ValueError(f"folder is {_short(folder)}, and is a session's id with a slash")
    leaves = manifest["leaves"]
    for name, leaf in leaves.items():
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"it names an array {_short(name)}, which would lie outside of it")
        above = next((up for n in range(1, len(parts)) if (up := "/".join(parts[:n])) in leaves), None)
        if above is not None:
            raise ValueError(f"it has an array {_short(above)} and another one below it, {_short(name)}")
        if not isinstance(leaf, dict):
            raise ValueError(f"the array {_short(name)} is {_short(leaf)}")
        try:
            _check_leaf(leaf, chunked)
        except ValueError as e:
            raise ValueError(f"the array {_short(name)} has {e}") from None
        if (leaf.get("quantized") is not None) and f"{name.removesuffix('/codes')}/scales" not in leaves:
            raise ValueError(f"the array {_short(name)} has no scales")


def _check_leaf(leaf: dict[str, Any], chunked: bool) -> None:
    shape, dtype, axes = (leaf.get(name) for name in ("shape", "dtype", "axes"))
    if not _is_shape(shape) or math.prod(shape) > reading.LARGEST:
        raise ValueError(f"the shape {_short(shape)}")
    try:
        known = isinstance(dtype, str) and dtype_named(dtype).name == dtype and dtype_named(dtype).itemsize <= 16
    except (TypeError, ValueError):
        known = False
    if not known or dtype == "object":
        raise ValueError(f"the dtype {_short(dtype)}")
    names = isinstance(axes, list) and len(axes) == len(shape) and all(isinstance(a, str | None) for a in axes)
    if axes is not None and not names:
        raise ValueError(f"the axes {_short(axes)}")
    encoding = leaf.get("quantized")
    if encoding is not None and not (
        isinstance(encoding, dict)
        and _is_shape(encoding.get("tile"), 1)
        and isinstance(encoding.get("format"), str)
        and isinstance(encoding.get("signed"), bool)
        and isinstance(encoding.get("positive", False), bool)
    ):
        raise ValueError(f"the 8-bit encoding {_short(encoding)}")
    if not chunked:
        return
    chunk, files = leaf.get("chunk"), leaf.get("files")
    if not _is_shape(chunk, 1) or len(chunk) != len(shape):
        raise ValueError(f"the chunks {_short(chunk)} of the shape {shape}")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError(f"the files {_short(files)}")
    count = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    if count != len(files):
        raise ValueError(f"{len(files)} files, but its shape {shape} has {count} chunks")


_FACTS: dict[str, Any] = {
    "step": int,
    "run": (str, type(None)),
    "arrays": str,
    "digest": (str, type(None)),
    "leaves": dict,
}


def _is_shape(value: object, least: int = 0) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= DIMENSIONS and all(reading.is_whole(n, least) for n in value)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
