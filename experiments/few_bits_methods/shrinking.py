"""Smaller models inside a model, trained from the first step or from half-way: held-out loss of each width.

python experiments/few_bits_methods/shrinking.py     # writes shrinking.json beside this file
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from jaxscale.step import Shrinking, TrainConfig, describe_model, subnet

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import MODEL, SAME, SEEDS, STEPS, base, heldout, trained, write  # noqa: E402

WIDTHS = (0.25, 0.5, 0.75, 1.0)


def main() -> None:
    """Measure and write the results."""
    lines: dict[str, Any] = {}
    infos = describe_model(MODEL)[1]
    for seed in SEEDS[:2]:
        runs = {"whole model only": base(seed)}
        for name, algorithm in {
            "at once": Shrinking(),
            "half-way": Shrinking(after=STEPS // 2, ramp=STEPS // 10),
        }.items():
            config = TrainConfig(model=MODEL, seed=seed, algorithm=algorithm, **SAME)
            runs[name] = trained(f"shrinking-{name.replace(' ', '-')}-{seed}", config)
            for width in WIDTHS:
                lines[f"{name}, width {width}, seed {seed}"] = heldout(
                    runs[name].config, subnet(runs[name].params(), infos, width)
                )
            write("shrinking", lines)
        for width in WIDTHS:
            params = subnet(runs["whole model only"].params(), infos, width)
            lines[f"whole model only, width {width}, seed {seed}"] = heldout(runs["whole model only"].config, params)
        write("shrinking", lines)


if __name__ == "__main__":
    main()
