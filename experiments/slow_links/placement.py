"""Which mesh axis should cross a slow link between two clusters: step times by the planner's clock; nothing runs.

python experiments/slow_links/placement.py      # ten minutes: writes results/placement.json, a row at a time
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jaxscale as js
from jaxscale.layout import Layout, Pipeline
from jaxscale.models.presets import llama3_8b, llama3_70b
from jaxscale.nn import flash_attention
from jaxscale.plan import plan_for

HERE = Path(__file__).parent
CHIP = Path(js.__file__).parent / "hardware" / "chips" / "a100.json"
GPUS = 8
ETHERNET = {
    "name": "ethernet",
    "shape": "switch",
    "bandwidth": 25e9 / 8 / GPUS,
    "latency": 5e-5,
    "reach": None,
}
"""25 Gb/s for each host, of which each of its GPUs has an eighth."""

RUNS = (("Llama 3 8B", 64), ("Llama 3 8B", 512), ("Llama 3 70B", 512))
"""Models, and rows of 4,096 tokens in a step."""
MODELS = {"Llama 3 8B": llama3_8b, "Llama 3 70B": llama3_70b}
WHOLE = Pipeline("lockstep", vocabulary="whole")
LAYOUTS: dict[str, tuple[str, str | None, Pipeline | None]] = {
    "FSDP": ("fsdp=64", "fsdp", None),
    "data": ("data=2,fsdp=32", "data", None),
    "pipeline": ("pipeline=2,fsdp=32", "pipeline", Pipeline("lockstep")),
    "pipeline, whole vocabulary": ("pipeline=2,fsdp=32", "pipeline", WHOLE),
}
"""What crosses the link: mesh, axis, pipeline."""


def chips(folder: Path) -> dict[str, str]:
    """Write descriptions of the three networks; return their topologies."""
    a100 = json.loads(CHIP.read_text())
    nvlink, infiniband = a100["links"]
    links = {"two clusters": [nvlink, infiniband, ETHERNET], "Ethernet": [nvlink, ETHERNET]}
    for name, of in links.items():
        (folder / f"{name.split()[0]}.json").write_text(json.dumps(a100 | {"name": "a100", "links": of}))
    return {
        "InfiniBand": "a100:8x8",
        "two clusters": f"{folder / 'two.json'}:8x4*2",
        "Ethernet": f"{folder / 'Ethernet.json'}:8x8",
    }


def row(model: str, batch: int, network: str, topology: str, crosses: str) -> dict[str, Any]:
    """Return the planned seconds of a step."""
    mesh, axis, pipeline = LAYOUTS[crosses]
    across = axis if network == "two clusters" else None
    config = js.TrainConfig(
        model=MODELS[model](attention=flash_attention, memory="full"),
        layout=Layout(mesh, across=across, pipeline=pipeline),
        batch_size=batch,
        seq_len=4096,
        segments=False,
    )
    plan = plan_for(config, topology, compile="never")
    exposed = sum(t for name, t in plan.terms.items() if name.startswith("exposed"))
    seconds = {"seconds": plan.step.total, "exposed": exposed, "gib": plan.bytes / 2**30}
    return {"model": model, "rows": batch, "network": network, "layout": crosses, **seconds}


def main() -> None:
    """Plan the rows that are missing."""
    data = HERE / "results" / "placement.json"
    rows = json.loads(data.read_text()) if data.exists() else []
    known = {(r["model"], r["rows"], r["network"], r["layout"]) for r in rows}
    with tempfile.TemporaryDirectory() as folder:
        for model, batch in RUNS:
            for network, topology in chips(Path(folder)).items():
                for crosses in LAYOUTS:
                    if (model, batch, network, crosses) in known:
                        continue
                    rows.append(r := row(model, batch, network, topology, crosses))
                    cells = (f"{r['seconds']:.1f}", f"{r['exposed']:.1f}", f"{r['gib']:.1f}")
                    print(f"| {model} | {batch} | {network} | {crosses} | {' | '.join(cells)} |", flush=True)
                    data.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
