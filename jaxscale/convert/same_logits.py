"""Compare the logits of an imported model with those of `transformers`."""

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
from jaxscale.interop.companions import CONFIG
from jaxscale.interop.fields import read_json
from jaxscale.interop.gguf import is_gguf
from jaxscale.interop.stored import method_of
from jaxscale.layout import Layout
from jaxscale.step.state import describe_model

WITHIN = 1e-3
"""Tolerance, relative to the largest logit: float32 rounding in a deep model, far below the effect of a wrong map."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """Differences between the logits of `transformers` and ours, for the same token ids.

    Args:
      error: the largest absolute difference.
      largest: the largest absolute logit of `transformers`.
      same: number of positions at which the most likely token is the same.
      places: number of positions.
    """

    error: float
    largest: float
    same: int
    places: int

    def __str__(self) -> str:
        return (
            f"logits are within {self.error:.1e} of those of transformers (the largest is {self.largest:.1f}), and "
            f"the most likely token is the same at {self.same} of {self.places} positions"
        )


def packages() -> tuple[Any, Any]:
    """Import `torch` and `transformers`.

    Raises:
      CheckpointError: one of them is not installed.
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
    """Compute float32 logits of random token ids with `transformers` and here; both need the whole model in memory.

    Args:
      source: a Hugging Face folder, or a name on the Hub.
      layout: layout for our model; `None` is one device.
      rows: number of sequences.
      length: tokens of each, at most what the model supports.
      revision: a branch, tag or commit of a name on the Hub.

    Raises:
      CheckpointError: the logits differ by more than `WITHIN`, or `transformers` is not installed or lacks a package
        that reads the folder.
    """
    torch, transformers = packages()
    folder = local_folder(source, revision)
    opened = open_pretrained(folder, dtype="float32", widen=True, say=lambda _: None)
    ids = np.random.default_rng(0).integers(0, opened.config.vocab, (rows, min(length, opened.length)))
    which: dict[str, Any]
    where, which = (folder.parent, {"gguf_file": folder.name}) if is_gguf(folder) else (folder, {})
    quantised = None if is_gguf(folder) else method_of(read_json(folder / CONFIG))
    if quantised == "compressed-tensors":  # packed zero points are not loaded as they are
        which["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **which).eval()
    except ImportError as e:
        raise CheckpointError(f"{folder} was not checked: transformers does not load it here: {e}") from None
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.float().numpy()
    del theirs
    graphdef, _ = describe_model(opened.config)
    with layout if layout is not None else contextlib.nullcontext():
        params = read_pretrained(opened, layout)
        got = np.asarray(jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, ids))
    largest = float(np.abs(expected).max())
    same = int((got.argmax(-1) == expected.argmax(-1)).sum())
    compared = Compared(float(np.abs(got - expected).max()), largest, same, ids.size)
    if not compared.error <= WITHIN * max(largest, 1.0):
        raise CheckpointError(f"{folder}: {compared}")
    return compared
