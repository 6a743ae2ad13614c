"""Held-out loss of one model whose operations are quantised by blocks: python experiments/quantize/blockwise.py RUN.

Writes blockwise.jsonl beside this script: weights alone, and with the operations.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from compare import batches_of, bytes_of, loss_of

import jaxscale as js
from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import BCT, Recipe, RoundToNearest
from jaxscale.nn.formats import Stored


def recipes() -> list[Recipe]:
    """Return what is compared."""
    whole = Stored("int4", group=None, outputs=None, scale="e8m0")
    weights = [RoundToNearest(weights=BCT(bits).format) for bits in (8, 4)]
    both = [BCT(8), BCT(4), BCT(4, softmax=False), BCT(4, activations=6), BCT(4, activations=4)]
    return [RoundToNearest(weights=whole), *weights, *both]


def main(path: str) -> None:
    """Measure every recipe."""
    base = js.load(path)
    batches = batches_of(base)
    rows = [{"recipe": "none", "loss": loss_of(base, batches), "bytes": bytes_of(base)}]
    with tempfile.TemporaryDirectory() as folder:
        for n, recipe in enumerate(recipes()):
            run = quantize(base, Path(folder) / str(n), recipe, say=lambda _: None)
            rows.append({"recipe": repr(recipe), "loss": loss_of(run, batches), "bytes": bytes_of(run)})
            print(rows[-1], flush=True)
    out = Path(__file__).parent / "blockwise.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
