"""The interface of `Layout.sums`: how devices add their terms of a tensor-parallel product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Array, Float

Term = Callable[[int, int], Float[Array, "b s e"]]
"""(First token, last token) -> this device's term for these tokens, whose dimension is the argument `dim` of `Sums`."""


class Sums(Protocol):
    """Adds the terms of devices, inside a `shard_map`."""

    def __call__(self, term: Term, tokens: int, over: tuple[str, ...], dim: int) -> Float[Array, "b s e"]:
        """Return the sum of all devices' terms.

        Args:
          term: see `Term`.
          tokens: the number of tokens.
          over: the mesh axes to sum over.
          dim: the dimension of the tokens.
        """
        ...
