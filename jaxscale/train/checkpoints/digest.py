"""Digests of what is in a checkpoint: fast ones for chunks, a cryptographic one for what lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxscale.errors import CheckpointError, near
from jaxscale.seals import DIGESTS, NEW, sealed, unsealed

__all__ = ["DIGESTS", "NEW", "digest_named", "sealed", "unsealed"]


def digest_named(name: str) -> Callable[[Any], str]:
    """One of `DIGESTS`.

    Raises:
      CheckpointError: it is not installed, or unknown.
    """
    if name not in DIGESTS:
        raise CheckpointError(f"this checkpoint has {name} digests{near(name, DIGESTS)}; pip install xxhash")
    return DIGESTS[name]
