"""Held-out loss of algorithms for slow links beside synchronous training, at equal tokens; wrong replicas.

python experiments/slow_links/train.py          # some minutes on two cores; resumes where it stopped
python experiments/slow_links/train.py --table  # train nothing; tables and picture from results/curves.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.parallel import Float32Wire, IntegerWire
from jaxscale.step import CO2, Algorithm, Backprop, DiLoCo, LocalSteps, OneBitAdam, RobustGradients, blueprint_of
from jaxscale.step.algorithms import Aggregate, Flag, Mean, Median

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "curves.json"
STEPS, ROWS, SEQ, EVERY, WRONG = 300, 32, 64, 20, 2


@dataclasses.dataclass(frozen=True)
class Corrupted(Aggregate):
    """An aggregation of gradients of which the first `WRONG` replicas send -10 times theirs."""

    inner: Aggregate

    def __call__(self, grads: Any) -> Any:
        """Return the inner aggregation of the corrupted gradients."""
        return self.inner(jax.tree.map(lambda g: g.at[:WRONG].multiply(-10.0), grads))


FOUR = dict(replicas=4, every=EVERY)
ALGORITHMS: dict[str, Algorithm] = {
    "synchronous": Backprop(),
    "synchronous, no clipping": Backprop(),
    "LocalSteps": LocalSteps(**FOUR),
    "DiLoCo": DiLoCo(**FOUR),
    "DiLoCo, 8 bits": DiLoCo(**FOUR, wire=IntegerWire()),
    "DiLoCo, 4 bits": DiLoCo(**FOUR, wire=IntegerWire(bits=4)),
    "DiLoCo, 4 bits, no feedback": DiLoCo(**FOUR, wire=IntegerWire(bits=4, feedback=False)),
    "DiLoCo, 2 fragments, delay 2": DiLoCo(**FOUR, fragments=2, delay=2, mix=0.5),
    "CO2": CO2(**FOUR),
    "OneBitAdam, b2 = 0.95, 60 exact steps": OneBitAdam(replicas=4, exact_steps=60),
    "OneBitAdam, b2 = 0.99, 60 exact steps": OneBitAdam(replicas=4, exact_steps=60, b2=0.99),
    "OneBitAdam, b2 = 0.99, 120 exact steps": OneBitAdam(replicas=4, exact_steps=120, b2=0.99),
    "frozen variance alone, 60 exact steps": OneBitAdam(replicas=4, exact_steps=60, wire=Float32Wire()),
}
ROBUST: dict[str, Algorithm] = {
    "8 honest, mean": RobustGradients(8, Mean()),
    "2 of 8 wrong, mean": RobustGradients(8, Corrupted(Mean())),
    "2 of 8 wrong, median": RobustGradients(8, Corrupted(Median())),
    "2 of 8 wrong, Flag": RobustGradients(8, Corrupted(Flag())),
}


def settings(name: str, algorithm: Algorithm, mesh: str) -> js.TrainConfig:
    """Return the settings of a run; only the algorithm and the mesh differ, and in one run clipping."""
    return js.TrainConfig(
        model=js.models.Transformer.Config(depth=2, width=64, heads=4, vocab=256),
        algorithm=algorithm,
        layout=js.Layout(mesh),
        steps=STEPS,
        batch_size=ROWS,
        seq_len=SEQ,
        lr=3e-3,
        eval_every=EVERY,
        eval_batches=8,
        clip_norm=None if name.endswith("no clipping") else 1.0,
    )


def measure() -> None:
    """Train every run that the results lack."""
    js.simulate_devices(8)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, algorithm in {**ALGORITHMS, **ROBUST}.items():
        if name in results:
            continue
        config = settings(name, algorithm, f"replica={getattr(algorithm, 'replicas', 4)}")
        with tempfile.TemporaryDirectory() as folder:
            rows = js.fit(config, run=Path(folder) / "run", quiet=True).metrics()
        blueprint, _ = blueprint_of(config)
        devices = config.layout.sizes["replica"]
        every_step = Float32Wire().sent(blueprint.infos, devices, config.layout)
        sent = algorithm.wire_bytes(blueprint)
        curve = [(r["step"], round(r["eval_loss"], 4)) for r in rows if "eval_loss" in r]
        results[name] = {"heldout": curve, "bytes": every_step if sent is None else sent}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, curve[-1], results[name]["bytes"], flush=True)  # noqa: T201


def table() -> None:
    """Print the README's tables and draw its picture."""
    results = json.loads(RESULTS.read_text())
    first = results["synchronous"]
    print("| algorithm | held-out nats per byte | against synchronous | bytes a step | fewer by |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    for name in ALGORITHMS:
        loss, sent = results[name]["heldout"][-1][1], results[name]["bytes"]
        apart = loss - first["heldout"][-1][1]
        print(f"| {name} | {loss:.3f} | {apart:+.3f} | {sent:,.0f} | {first['bytes'] / sent:.1f} |")  # noqa: T201
    print("\n| gradients | held-out nats per byte |\n|---|---|")  # noqa: T201
    for name in ROBUST:
        print(f"| {name} | {results[name]['heldout'][-1][1]:.3f} |")  # noqa: T201
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, names, title in zip(
        figure.subplots(1, 2), (ALGORITHMS, ROBUST), ("four replicas", "eight replicas, two of them wrong"), strict=True
    ):
        for name in names:
            steps, losses = zip(*results[name]["heldout"], strict=True)
            black = name.startswith("synchronous") or name.startswith("8 honest")
            style = dict(color="black", linestyle=":" if "clip" in name else "-", linewidth=2) if black else {}
            axes.plot([s * ROWS * SEQ / 1e3 for s in steps], losses, label=name, **style)
        axes.set(xlabel="thousand tokens", ylabel="held-out nats per byte", title=title, ylim=(1.8, 4.2))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "results" / "curves.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="do not train")
    if not parser.parse_args().table:
        measure()
    table()
