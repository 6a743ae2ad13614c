"""Digests in a checkpoint: a fast one for chunks, a cryptographic one for the manifest that lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.seals import DIGESTS, NEW, sealed, unsealed

__all__ = ["DIGESTS", "NEW", "digest_named", "sealed", "unsealed"]


def digest_named(name: str) -> Callable[[Any], str]:
    """Return the digest function of `DIGESTS` with this name.

    Raises:
      CheckpointError: it is unknown, or its package is not installed.
    """
    if name not in DIGESTS:
        raise CheckpointError(f"this checkpoint has {name} digests{near(name, DIGESTS)}; pip install xxhash")
    return DIGESTS[name]
