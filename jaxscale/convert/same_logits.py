"""Whether `transformers` says the same of a folder as we do."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.convert.pretrained import read_pretrained
from jaxscale.errors import CheckpointError
from jaxscale.interop import local_folder, open_pretrained
from jaxscale.layout import Layout
from jaxscale.step.state import describe_model

WITHIN = 1e-3
"""Of the largest logit: what float32 leaves of a deep model's logits, and far below what a wrong map makes of them."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """Logits of the same ids, by both.

    Args:
      error: the largest difference.
      largest: the largest logit.
      same: at how many places the likeliest token is the same.
      places: of how many.
    """

    error: float
    largest: float
    same: int
    places: int

    def __str__(self) -> str:
        return (
            f"logits are within {self.error:.1e} of those of transformers (the largest is {self.largest:.1f}), and "
            f"the likeliest token is the same at {self.same} of {self.places} places"
        )


def packages() -> tuple[Any, Any]:
    """`torch` and `transformers`.

    Raises:
      CheckpointError: one is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as e:
        raise CheckpointError(f"--check needs {e.name}: pip install transformers torch, or leave it out") from None
    return torch, transformers


def compare(
    source: str | Path, *, layout: Layout | None = None, rows: int = 2, length: int = 32, revision: str | None = None
) -> Compared:
    """Computes logits of random ids in float32 by `transformers` and here; both have the whole model in memory.

    Args:
      source: a folder, or a name on the Hub.
      layout: ours runs on.
      rows, length: of the ids.
      revision: of a name on the Hub.

    Raises:
      CheckpointError: they differ, or `transformers` is not installed.
    """
    torch, transformers = packages()
    folder = local_folder(source, revision)
    found = open_pretrained(folder, dtype="float32", say=lambda _: None)
    ids = np.random.default_rng(0).integers(0, found.config.vocab, (rows, min(length, found.length)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids)).logits.float().numpy()
    del theirs
    graphdef, _ = describe_model(found.config)
    with layout if layout is not None else contextlib.nullcontext():
        params = read_pretrained(found, layout)
        got = np.asarray(jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, ids))
    largest = float(np.abs(wanted).max())
    same = int((got.argmax(-1) == wanted.argmax(-1)).sum())
    compared = Compared(float(np.abs(got - wanted).max()), largest, same, ids.size)
    if not compared.error <= WITHIN * max(largest, 1.0):
        raise CheckpointError(f"{folder}: {compared}")
    return compared
