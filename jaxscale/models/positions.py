"""Positions of a transformer: learned embeddings, or rotary."""

from __future__ import annotations

import dataclasses

from jaxscale.config import register
from jaxscale.nn import Rotary


@dataclasses.dataclass(frozen=True)
class Learned:
    """Learned absolute positions: a table of vectors that are added to the token embedding (GPT-2).

    Args:
      length: number of positions.
    """

    length: int = 1024


register(Learned, name="LearnedPositions")


def rotary_of(positions: Rotary | Learned | None) -> Rotary | None:
    """Return the rotary positions, or `None` if positions are learned or absent."""
    return None if isinstance(positions, Learned) else positions
