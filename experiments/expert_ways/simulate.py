"""Steps of runs whose batches and loads of experts vary: the way that the planner chooses against each fixed way.

python experiments/expert_ways/simulate.py         # some minutes of one core; writes ways.json; nothing runs (SIM)
"""

from __future__ import annotations

import itertools
import json
import pathlib

from jaxscale.layout import Layout
from jaxscale.models.presets import mixtral_8x7b
from jaxscale.nn import MixtureOfExperts, flash_attention
from jaxscale.plan.expert_loads import loads_of
from jaxscale.plan.expert_ways import ExpertChooser
from jaxscale.step import TrainConfig

HERE = pathlib.Path(__file__).parent
TOPOLOGY, MESH = "v5e:4x2", "expert=8"
EXPERTS, TOP, SEQ = 32, 4, 256
BATCHES = (8, 32, 128)
LOADS = ("even", "zipf:0.5", "zipf:1", "zipf:1.5")


def config(rows: int) -> TrainConfig:
    """Return a run of two layers of Mixtral's kind, with many small experts."""
    mlp = MixtureOfExperts(EXPERTS, TOP, hidden=512)
    model = mixtral_8x7b(
        depth=2, vocab=512, width=1024, heads=8, kv_heads=8, hidden=512, mlp=mlp, attention=flash_attention
    )
    return TrainConfig(model=model, layout=Layout(MESH), batch_size=rows, seq_len=SEQ)


def main() -> None:
    """Time every way of every batch and load, and write the table."""
    table = []
    for rows in BATCHES:
        chooser = ExpertChooser(config(rows), TOPOLOGY)
        for load in LOADS:
            ways = {way.name: way.step.total for way in chooser(loads_of(load, EXPERTS))}
            table.append({"tokens": rows * SEQ, "loads": load, "seconds": ways})
            print(json.dumps(table[-1]), flush=True)
    names = list(table[0]["seconds"])
    total = {name: sum(row["seconds"][name] for row in table) for name in sorted(names)}
    chosen = sum(min(row["seconds"].values()) for row in table)
    switches = sum(
        min(a["seconds"], key=a["seconds"].get) != min(b["seconds"], key=b["seconds"].get)
        for a, b in itertools.pairwise(table)
    )
    result = {"table": table, "all": total, "chosen": chosen, "switches": switches}
    print(json.dumps({"all": total, "chosen": chosen, "best fixed": min(total.values()) / chosen}))
    (HERE / "ways.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
