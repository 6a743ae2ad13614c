"""Rank training plans on Frontier with the planner, and compare with Dash et al. 2023 (arXiv:2312.12705), who measured.

    python experiments/frontier_sweep/sweep.py         # prints the tables, writes sweep.json

Nothing is compiled and nothing is fitted: times assume the hardware's peak, and only their order is meaningful.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "planner_accuracy"))

import megatron  # noqa: E402

from jaxscale.hardware import topology  # noqa: E402
from jaxscale.layout import Layout  # noqa: E402
from jaxscale.models import Learned, TransformerConfig  # noqa: E402
from jaxscale.nn import GELU, LayerNorm, flash_attention  # noqa: E402
from jaxscale.plan.roofline import StepTime, step_time  # noqa: E402
from jaxscale.step import TrainConfig  # noqa: E402

SEQ = 2048
MODELS = {"22b": (48, 6144, 48), "175b": (96, 12288, 96), "1t": (128, 25600, 128)}
"""Layers, width, heads: Megatron-LM's models of these sizes (Korthikanti et al. 2022), since the paper's own table was
not available."""
MACHINES = {"22b": (64, 512), "175b": (1024, 2048), "1t": (3072, 3072)}
"""Dies and batch rows. 1024 and 3072 dies are the paper's for the larger two models; the rest is our choice."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan to train a model: tensor size, pipeline stages, rows of a micro-batch, replicas, rows of the batch."""

    model: str
    tensor: int
    stages: int
    rows: int
    replicas: int
    batch: int

    @property
    def dies(self) -> int:
        """Return the number of dies."""
        return self.tensor * self.stages * self.replicas

    @property
    def parts(self) -> int:
        """Return the number of micro-batches of each replica."""
        return self.batch // (self.replicas * self.rows)

    def config(self) -> TrainConfig:
        """Return the run's config."""
        depth, width, heads = MODELS[self.model]
        model = TransformerConfig(
            depth=depth,
            vocab=51200,
            width=width,
            heads=heads,
            hidden=4 * width,
            norm=LayerNorm,
            mlp=GELU,
            positions=Learned(SEQ),
            bias=True,
            tied=True,
            attention=flash_attention,
            memory="full",
            dtype="bfloat16",
        )
        pipeline = f"1f1b:{self.parts}" if self.stages > 1 else None
        mesh = f"data={self.replicas},pipeline={self.stages},tensor={self.tensor}"
        return TrainConfig(
            model=model,
            layout=Layout(mesh, "tensor", pipeline=pipeline),
            batch_size=self.batch,
            seq_len=SEQ,
            accumulate=1 if self.stages > 1 else self.parts,
        )

    def time(self) -> StepTime:
        """Return the estimated time of a step."""
        frontier = topology(f"{HERE / 'mi250x.json'}:2x{self.dies // 2}")
        return step_time(megatron.work_of_stage(self.config(), frontier, overlap=False), frontier)

    def bytes(self) -> float:
        """Return the bytes on a device of the first stage.

        They are weights, float32 gradients, its share of optimizer state, and saved layer inputs.
        """
        depth, width, _ = MODELS[self.model]
        layers = depth // self.stages
        params = (12 * layers * width**2 + 51200 * width) / self.tensor
        stream = 2 * self.rows * SEQ * width
        return params * (2 + 4 + 12 / self.replicas) + stream * (layers * min(self.stages, self.parts) + 17)


def plans(model: str, dies: int, batch: int) -> Iterator[Plan]:
    """Yield every plan whose sizes divide the model and batch, and that fits into memory."""
    depth, _, heads = MODELS[model]
    for tensor, stages, rows in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)):
        if dies % (tensor * stages) or depth % stages or heads % tensor:
            continue
        replicas = dies // (tensor * stages)
        if batch % (replicas * rows):
            continue
        plan = Plan(model, tensor, stages, rows, replicas, batch)
        if plan.bytes() <= 64e9:
            yield plan


def line(plan: Plan, time: StepTime) -> dict[str, Any]:
    """Return a plan and its estimates as a row."""
    return dataclasses.asdict(plan) | {
        "seconds": round(time.total, 3),
        "mfu": round(time.mfu, 4),
        "exposed": round(time.exposed / time.total, 3),
        "bubble": round(time.bubble / time.total, 3),
        "gb": round(plan.bytes() / 1e9, 1),
    }


def main() -> None:
    """Rank the plans, print tables and write sweep.json."""
    ranked: dict[str, list[dict[str, Any]]] = {}
    for model, (dies, batch) in MACHINES.items():
        rows = [line(plan, plan.time()) for plan in plans(model, dies, batch)]
        ranked[model] = sorted(rows, key=lambda row: row["seconds"])
        print(f"\n{model} on {dies} dies, {batch} rows: {len(rows)} plans fit")
        print("| tensor | stages | rows | replicas | MFU at peak | exposed | bubble | GB |\n" + "|---" * 8 + "|")
        for row in (*ranked[model][:4], ranked[model][-1]):
            names = ("tensor", "stages", "rows", "replicas", "mfu", "exposed", "bubble", "gb")
            print("| " + " | ".join(str(row[n]) for n in names) + " |")
    fields = [f.name for f in dataclasses.fields(Plan)]
    best = {model: Plan(**{name: rows[0][name] for name in fields}) for model, rows in ranked.items()}
    scaling = {}
    for model in ("175b", "1t"):
        half = dataclasses.replace(best[model], replicas=best[model].replicas // 2)
        weak = dataclasses.replace(half, batch=best[model].batch // 2)
        whole = best[model].time().total
        scaling[model] = {
            "weak": round(weak.time().total / whole, 3),
            "strong": round(half.time().total / (2 * whole), 3),
        }
        print(model, scaling[model])
    tensor = {}
    for size in (2, 4, 8, 16):
        plan = Plan("22b", size, 1, 4, 64 // size, 512)
        tensor[size] = line(plan, plan.time())
        print("tensor", tensor[size])
    text = json.dumps({"plans": ranked, "scaling": scaling, "tensor": tensor}, indent=1)
    (HERE / "sweep.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
