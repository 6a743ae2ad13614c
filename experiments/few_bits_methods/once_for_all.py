"""One run of adapters for 2, 3 and 4 bits (LLM-QFA) beside a run for 2 bits alone: held-out loss of each format.

python experiments/few_bits_methods/once_for_all.py     # writes once_for_all.json beside this file
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import jax

import jaxscale as js
from jaxscale.nn import Stored
from jaxscale.step import Backprop, BitAdapters, OnceForAll, TrainConfig, describe_model

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from common import MODEL, SAME, SEEDS, base, heldout, trained, write  # noqa: E402

FORMATS = tuple(Stored(f"int{b}", group=32, scale="bfloat16") for b in (2, 3, 4))
SERVED: dict[str, Any] = {"2 bits": 0, "3 bits": 1, "4 bits": 2, "2 then 4 bits": (0, 2), "4 then 2 bits": (2, 0)}
ADAPTERS = BitAdapters(FORMATS, rank=8, served=0)
STEPS = 60


def main() -> None:
    """Measure and write the results."""
    lines: dict[str, Any] = {}
    infos = describe_model(MODEL)[1]
    for seed in SEEDS:
        start = base(seed)
        lines[f"float32, seed {seed}"] = heldout(start.config, start.params())
        for bits, weights in zip((2, 3, 4), FORMATS, strict=True):
            rounded = weights.encoded(jax.tree.map(lambda x: x + 0, start.params()), infos, None)
            lines[f"rounded, {bits} bits, seed {seed}"] = heldout(start.config, rounded)
        for name, algorithm in {
            "balanced": OnceForAll(),
            "independent": OnceForAll(balanced=False),
            "2 bits alone": Backprop(),
        }.items():
            more = {**SAME, "steps": STEPS, "lr": 2e-3}
            config = TrainConfig(
                model=MODEL, seed=seed, start=js.train.FromRun(str(start.path)), adapters=ADAPTERS,
                algorithm=algorithm, **more,
            )  # fmt: skip
            run = trained(f"once-for-all-{name.replace(' ', '-')}-{seed}", config)
            for bits, served in SERVED.items() if algorithm != Backprop() else [("2 bits", 0)]:
                own = js.Run(
                    run.path, dataclasses.replace(run.config, adapters=dataclasses.replace(ADAPTERS, served=served))
                )
                lines[f"{name}, {bits}, seed {seed}"] = heldout(start.config, own.params())
            write("once_for_all", lines)


if __name__ == "__main__":
    main()
