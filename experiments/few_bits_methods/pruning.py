"""Block pruning by Taylor scores (LPViT) beside pruning by size: held-out loss of what is left.

python experiments/few_bits_methods/pruning.py     # writes pruning.json beside this file
"""

from __future__ import annotations

import pathlib
import shutil
import sys
from typing import Any

from jaxscale.convert.quantize import quantize
from jaxscale.convert.recipes import BlockPruning

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import RUNS, SEEDS, base, heldout, write  # noqa: E402

BLOCKS = ((1, 1, 0.5), (8, 8, 0.25), (8, 8, 0.5))
"""Inputs and outputs of a block, and the share of blocks that are left out."""


def main() -> None:
    """Measure and write the results."""
    lines: dict[str, Any] = {}
    for seed in SEEDS[:2]:
        start = base(seed)
        lines[f"float32, seed {seed}"] = heldout(start.config, start.params())
        for group, outputs, share in BLOCKS:
            for name, taylor in (("taylor", True), ("size", False)):
                out = RUNS / f"pruned-{name}-{share}-{group}x{outputs}-{seed}"
                shutil.rmtree(out, ignore_errors=True)
                recipe = BlockPruning(group=group, share=share, outputs=outputs, taylor=taylor, dtype="float32")
                run = quantize(start, out, recipe, rows=64, batch=64, say=lambda _: None)
                key = f"{share:.0%} of blocks of {group} x {outputs}, by {name}, seed {seed}"
                lines[key] = heldout(start.config, run.weights())
                write("pruning", lines)


if __name__ == "__main__":
    main()
