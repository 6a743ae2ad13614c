"""Fine-tune a small model with MeZO, QZO and backpropagation: held-out loss by step, and memory of the compiled step.

    python experiments/zeroth_order/fine_tune.py          # writes fine_tune.json beside this file

The base model is trained here, on the Python standard library's own source; the task is that of
`experiments/finetune/make_data.py`, the type of a Python literal. Runs are in runs/zeroth_order, and a second call only
reads them.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import jax

import jaxscale as js
from jaxscale.nn import GroupedIntegers
from jaxscale.plan.compile import compile_step
from jaxscale.step import QZO, Backprop, LoRA, MeZO, Scales, TrainConfig

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/zeroth_order")
MODEL = js.models.Transformer.Config(depth=2, width=64, heads=2)
SAME: dict[str, Any] = dict(model=MODEL, layout=None, batch_size=16, seq_len=64, eval_batches=8, lr=4e-3)
STEPS = 600


def methods(start: js.train.FromRun) -> dict[str, TrainConfig]:
    """Return the fine-tuning runs by name."""
    data = js.data.chat_files(str(RUNS / "types.jsonl"))
    task = TrainConfig(**SAME | dict(start=start, data=data, packing="fit", schedule=js.optim.Constant()))
    long = dataclasses.replace(task, steps=STEPS, eval_every=STEPS // 6)
    lora = LoRA(rank=4, alpha=8.0)
    scales = Scales(GroupedIntegers(bits=4, group=16))
    return {
        "backpropagation (AdamW)": dataclasses.replace(task, steps=60, eval_every=10, lr=1e-3),
        "MeZO": dataclasses.replace(long, algorithm=MeZO(perturbations=4), lr=1e-3),
        "MeZO, adapters": dataclasses.replace(long, algorithm=MeZO(perturbations=4), adapters=lora, lr=1e-3),
        "QZO, 4 bits": dataclasses.replace(long, algorithm=QZO(eps=1e-3, perturbations=4), adapters=scales, lr=1e-4),
        "backpropagation of the scales": dataclasses.replace(
            task, steps=60, eval_every=10, lr=1e-3, adapters=scales, algorithm=Backprop()
        ),
    }


def run(name: str, config: TrainConfig) -> js.Run:
    """Return the finished run of this name; train what is missing of it."""
    folder = RUNS / name.replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")
    if folder.exists():
        done = js.load(str(folder))
        return done if done.metrics()[-1]["step"] == config.steps else js.fit(run=folder, resume=True, quiet=True)
    return js.fit(config, run=folder, quiet=True)


def main() -> None:
    """Train everything and write the results."""
    RUNS.mkdir(parents=True, exist_ok=True)
    maker = HERE.parent / "finetune" / "make_data.py"
    subprocess.run([sys.executable, str(maker), str(RUNS / "types.jsonl")], check=True)
    base = run("base", TrainConfig(**SAME, steps=300))
    results: dict[str, Any] = {}
    for name, config in methods(js.train.FromRun(str(base.path))).items():
        rows = run(name, config).metrics()
        memory = compile_step(config, None).memory_analysis()
        blueprint = js.step.blueprint_of(config)[0]
        results[name] = {
            "trained": sum(i.size for i in jax.tree.leaves(blueprint.infos)),
            "temporaries": memory.temp_size_in_bytes,
            "state": memory.argument_size_in_bytes,
            "heldout": {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row},
            "loss": [row["loss"] for row in rows],
        }
        (HERE / "fine_tune.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
