"""Random pipeline schedules."""

from __future__ import annotations

import numpy as np

from jaxscale.layout import Table
from jaxscale.layout.schedules import place


def random_table(stages: int, microbatches: int, *, chunks: int = 1, phases: int = 2, seed: int = 0) -> Table:
    """Return a valid table: at every tick each stage runs a random one of the possible ops of each phase."""
    random = np.random.default_rng(seed)
    return place(
        "random", stages, microbatches, chunks, phases, lambda *_: random.random(),
        several=True,
    )  # fmt: skip
