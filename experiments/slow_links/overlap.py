"""Simulated waiting for exchanges over slow links: an all-reduce in every step, blocking rounds, and rounds one late.

python experiments/slow_links/overlap.py   # half a minute; trains nothing
"""

from __future__ import annotations

import json
from pathlib import Path

import jaxscale as js
from jaxscale.layout import Layout
from jaxscale.parallel import Float32Wire, IntegerWire
from jaxscale.plan import plan_for
from jaxscale.plan.slow_links import link_seconds, waiting
from jaxscale.step import CO2, Algorithm, Backprop, DiLoCo, LocalSteps, TrainConfig, blueprint_of
from jaxscale.step.rounds import Exchange, Round

RESULTS = Path(__file__).parent / "results" / "overlap.json"
SPEEDS = (0.1e9, 1e9, 10e9, 80e9, 400e9)
REPLICAS, DEVICES, ROWS, SEQ, EVERY = 16, 8, 32, 2048, 16

ALGORITHMS: dict[str, Algorithm | None] = {
    "all-reduce in every step": None,
    "LocalSteps or DiLoCo": LocalSteps(REPLICAS, every=EVERY),
    "DiLoCo, delay 4": DiLoCo(REPLICAS, every=EVERY, delay=4, mix=0.5),
    "DiLoCo, 4 fragments, delay 4": DiLoCo(REPLICAS, every=EVERY, fragments=4, delay=4, mix=0.5),
    "CO2": CO2(REPLICAS, every=EVERY),
    "DiLoCo, 4 bits": DiLoCo(REPLICAS, every=EVERY, wire=IntegerWire(bits=4)),
    "CO2, 4 bits": CO2(REPLICAS, every=EVERY, wire=IntegerWire(bits=4)),
}


def settings(algorithm: Algorithm, mesh: str, rows: int) -> TrainConfig:
    """Return the settings of Llama 3 8B."""
    model = js.models.llama3_8b(memory="attention_only")
    return TrainConfig(model=model, algorithm=algorithm, layout=Layout(mesh), batch_size=rows, seq_len=SEQ)


def main() -> None:
    """Simulate, and print the README's table."""
    plan = plan_for(settings(Backprop(), f"fsdp={DEVICES}", ROWS), f"a100:{DEVICES}", compile="never")
    step = plan.best.total
    layout = Layout(f"replica={REPLICAS},fsdp={DEVICES}").abstract()
    rows: dict[str, list[float]] = {}
    for name, algorithm in ALGORITHMS.items():
        config = settings(algorithm or Backprop(), f"replica={REPLICAS},fsdp={DEVICES}", REPLICAS * ROWS)
        blueprint = blueprint_of(config)[0]
        every_step = Round(1, (Exchange(0, 0, Float32Wire().sent(blueprint.infos, REPLICAS, layout)),))
        of = every_step if algorithm is None else algorithm.round(blueprint)
        assert of is not None
        # all rows are of rounds of the same length
        rows[name] = [waiting(of, step, link_seconds(blueprint, s)) * EVERY / of.steps for s in SPEEDS]
    RESULTS.write_text(json.dumps({"step_seconds": step, "speeds": SPEEDS, "waiting": rows}, indent=1) + "\n")
    print(f"a step takes {step:.2f} s, a round {EVERY * step:.1f} s\n")  # noqa: T201
    print("| | " + " | ".join(f"{s / 1e9:g} Gbit/s" for s in SPEEDS) + " |")  # noqa: T201
    print("|---" * (1 + len(SPEEDS)) + "|")  # noqa: T201
    for name, waits in rows.items():
        cells = [f"{w:,.1f} s ({w / (w + EVERY * step):.0%})" for w in waits]
        print(f"| {name} | " + " | ".join(cells) + " |")  # noqa: T201


if __name__ == "__main__":
    main()
