"""Digests of what is on disk: fast ones for chunks, a cryptographic one for what lists them."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

from jaxscale.errors import CheckpointError, near

DIGESTS: dict[str, Callable[[Any], str]] = {"crc32": lambda data: f"{zlib.crc32(data):08x}"}
"""By name, the hex digest of a chunk's bytes (a uint8 array or anything else with a buffer)."""

try:
    import xxhash

    DIGESTS["xxh3_64"] = xxhash.xxh3_64_hexdigest
except ImportError:  # the standard library's is slower; a manifest says which was used
    pass

NEW = "xxh3_64" if "xxh3_64" in DIGESTS else "crc32"
"""Of chunks that are written now."""


def digest_named(name: str) -> Callable[[Any], str]:
    """One of `DIGESTS`.

    Raises:
      CheckpointError: it is not installed, or unknown.
    """
    if name not in DIGESTS:
        raise CheckpointError(f"this checkpoint has {name} digests{near(name, DIGESTS)}; pip install xxhash")
    return DIGESTS[name]


def sealed(body: dict[str, Any]) -> str:
    """A JSON text that holds `body` and its SHA-256."""
    return json.dumps({"sha256": _sha256(body), "body": body}, indent=1) + "\n"


def unsealed(text: str) -> dict[str, Any]:
    """What `sealed` was given.

    Raises:
      ValueError: the text is not JSON, or not what was written.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("body"), dict):
        raise ValueError("it is not a sealed text")
    if found.get("sha256") != _sha256(found["body"]):
        raise ValueError("its SHA-256 is not that of its text")
    return found["body"]


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
