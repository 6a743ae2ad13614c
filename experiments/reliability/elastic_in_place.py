"""Lose machines of two devices during a run; the run continues in the same process with the same losses.

    python experiments/reliability/elastic_in_place.py            # writes results/ after each layout

Eight simulated devices are four machines; each layout has slices of its `data` axis on different machines. One machine
is lost at step 10, another at step 20: their shards of the state are overwritten with NaN bits, and the run continues
on the others. The losses of 40 steps are compared with those of a run that lost nothing, and, for scale, with those of
a run that differs only in its dropout seed. Seed 0; AdamW, dropout 0.1.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import json
import os
import time
from pathlib import Path

import jax
import numpy as np

import jaxscale as js

RESULTS = Path(__file__).parent / "results" / "elastic_in_place.json"
STEPS, LOST_AT = 40, (10, 20)
LAYOUTS = {
    "data=4,tensor=2": {},
    "data=8": {},
    "data=4,tensor=2, two micro-batches": {"accumulate": 2},
    "data=4,context=2": {},
}


def destroy(state: js.step.TrainState, devices: set[jax.Device]) -> None:
    """Overwrite the shards of a state on some devices."""
    for x in jax.tree.leaves((state.params, state.opt_state)):
        for shard in x.addressable_shards:
            if shard.device in devices:
                ctypes.memset(shard.data.unsafe_buffer_pointer(), 0xFF, shard.data.nbytes)


def config(name: str) -> js.TrainConfig:
    """Return the config of a run; its 16 rows a step are not divisible by three slices of `data`."""
    from jaxscale.nn import RingAttention

    mesh, changes = name.partition(", ")[0], LAYOUTS[name]
    model = js.models.Transformer.Config(vocab=256, depth=2, width=64, heads=4, hidden=128, dropout=0.1)
    if "context" in mesh:
        model = dataclasses.replace(model, attention=RingAttention())
    data = js.data.synthetic(256, documents=256, length=128)
    more = {"lr": 3e-3, "steps": STEPS, "batch_size": 16, "seq_len": 32, "eval_batches": 0, **changes}
    return js.TrainConfig(model=model, data=data, layout=js.Layout(mesh), **more)  # type: ignore[arg-type]


def run(name: str, lost_at: tuple[int, ...], dropout_seed: int | None = None) -> dict[str, object]:
    """Train and lose a machine at some steps; return the losses and how the batch was distributed each time."""
    from jaxscale.train.elastic import Elastic

    elastic = Elastic(config(name))
    if dropout_seed is not None:
        elastic.state = dataclasses.replace(elastic.state, rng=jax.device_put(
            jax.random.key(dropout_seed), elastic.state.rng.sharding))  # fmt: skip
    machines = [set(elastic.alive[i : i + 2]) for i in range(0, 8, 2)]
    losses, dealt = [], [f"{elastic.layout}: {dataclasses.asdict(elastic.deal)}"]
    for step in range(STEPS):
        if step in lost_at:
            lost = machines.pop(1)
            destroy(jax.block_until_ready(elastic.state), lost)
            begun = time.perf_counter()
            elastic.lose(lost)
            batch = (
                f"{elastic.layout}: {dataclasses.asdict(elastic.deal)}, moved in {time.perf_counter() - begun:.2f} s"
            )
            dealt.append(batch)
        losses.append(elastic.step()["loss"])
    return {"losses": losses, "dealt": dealt}


def main() -> None:
    """Run every layout that results/elastic_in_place.json lacks, and write it."""
    js.simulate_devices(8)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in LAYOUTS:
        if name not in results:
            whole, lost, other = run(name, ()), run(name, LOST_AT), run(name, (), dropout_seed=1)
            a, b, c = (np.asarray(r["losses"]) for r in (whole, lost, other))
            results[name] = {
                "dealt": lost["dealt"],
                "largest_relative_difference": float(np.max(np.abs(a - b) / a)),
                "of_another_dropout_seed": float(np.max(np.abs(a - c) / a)),
                "first_loss": a[0],
                "last_loss": a[-1],
                "last_loss_of_the_run_with_losses": b[-1],
                "date": time.strftime("%Y-%m-%d"),
                "jax": importlib.metadata.version("jax"),
                "cores": os.cpu_count(),
            }
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results[name]), flush=True)


if __name__ == "__main__":
    main()
