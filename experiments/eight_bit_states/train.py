"""Train with 8-bit and with 32-bit optimizer states, three seeds each, and compare the held-out losses.

    python experiments/eight_bit_states/train.py             # about an hour on two cores; resumes where it stopped
    python experiments/eight_bit_states/train.py --models experts --steps 40 --seeds 0 1    # minutes
    python experiments/eight_bit_states/train.py --table     # from existing runs: results.json and loss.png

Every run is a folder under `runs/eight_bit_states/`; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import jax

import jaxscale as js
from jaxscale.optim import AdamW, AdamW8bit

HERE = Path(__file__).parent
RUNS = Path("runs/eight_bit_states")
DEMO = js.models.Transformer.Config(depth=4, width=128, heads=4)
WIDE = js.models.Transformer.Config(depth=4, width=256, heads=4)
EXPERTS = js.models.Transformer.Config(
    depth=2, width=64, heads=2, hidden=128, mlp=js.nn.MixtureOfExperts(experts=8, top_k=1), tied=False
)
MODELS = {"demo": (DEMO, 4e-3), "4x": (WIDE, 2e-3), "4x-high-lr": (WIDE, 4e-3), "experts": (EXPERTS, 4e-3)}
"""Name -> model and peak learning rate. `4x-high-lr` has twice the best rate of the wider model, to show which states
become unstable first; `experts` has sparse gradients: each of eight experts gets an eighth of the tokens, and rows of
the output head for rare bytes get few."""
STATES = {"32-bit": AdamW(), "8-bit": AdamW8bit()}
SEEDS = (0, 1, 2)


def config(model: str, states: str, seed: int, steps: int) -> js.TrainConfig:
    """Return the demo's config on one device; the seed determines initial weights and the order of the data."""
    return js.TrainConfig(
        model=MODELS[model][0],
        optimizer=STATES[states],
        layout=None,
        data=js.data.python_stdlib(),
        steps=steps,
        seed=seed,
        batch_size=16,
        seq_len=128,
        lr=MODELS[model][1],
        eval_every=100,
        eval_batches=8 if model == "experts" else 64,
    )


def folder(model: str, states: str, seed: int) -> Path:
    """Return the folder of a run."""
    return RUNS / f"{model}-{states}-{seed}"


def train(models: list[str], seeds: list[int], steps: int) -> None:
    """Train every run of these models that is not finished."""
    for model in models:
        for seed in seeds:
            for states in STATES:
                path = folder(model, states, seed)
                if heldout(path).get(steps) is None:
                    js.fit(config(model, states, seed, steps), run=path, resume=(path / "config.gin").exists())


def heldout(path: Path) -> dict[int, float]:
    """Return step -> held-out loss (nats per byte) of a run."""
    if not (path / "metrics.jsonl").exists():
        return {}
    return {r["step"]: r["eval_loss"] for r in js.Run(path).metrics() if "eval_loss" in r}


def table(models: list[str], seeds: list[int], steps: int) -> list[dict[str, Any]]:
    """Return a row per model: final losses, differences between states, and spread over seeds."""
    rows = []
    for model in models:
        final = {s: [heldout(folder(model, s, seed))[steps] for seed in seeds] for s in STATES}
        apart = [b - a for a, b in zip(final["32-bit"], final["8-bit"], strict=True)]
        rows.append(
            {
                "model": model,
                "parameters": MODELS[model][0].param_count(),
                "lr": MODELS[model][1],
                "steps": steps,
                "heldout": final,
                "mean_difference": statistics.mean(apart),
                "differences": apart,
                "seed_standard_deviation": statistics.stdev(final["32-bit"]),
                "seed_range": max(final["32-bit"]) - min(final["32-bit"]),
            }
        )
    return rows


def draw(path: Path, models: list[str]) -> None:
    """Draw the held-out loss of every run over steps."""
    from matplotlib.figure import Figure  # from the extra `plot`, which training does not need

    figure = Figure(figsize=(13, 3.6), dpi=110, layout="constrained")
    for ax, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for states, style in (("32-bit", dict(color="#9bb8d8", linewidth=3)), ("8-bit", dict(color="#d1495b"))):
            for seed in SEEDS:
                curve = heldout(folder(model, states, seed))
                ax.plot(curve.keys(), curve.values(), label=states if seed == 0 else None, **style)
        size = MODELS[model][0].param_count() / 1e6
        ax.set(title=f"{model}: {size:.2f}M parameters, lr {MODELS[model][1]:g}", xlabel="step")
        ax.set_ylabel("held-out nats per byte")
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, title="optimizer states")
    figure.savefig(path)


def main() -> None:
    """Train what is missing, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["demo", "4x", "4x-high-lr"])
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="at least two")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not args.table:
        train(args.models, args.seeds, args.steps)
    rows = table(args.models, args.seeds, args.steps)
    result = {
        "what": "final held-out loss, nats per byte, AdamW with 32-bit and with 8-bit states",
        "steps": args.steps,
        "seeds": args.seeds,
        "date": datetime.date.today().isoformat(),
        "jaxscale": js.__version__,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "rows": rows,
    }
    name = "experts" if args.models == ["experts"] else "results"
    (HERE / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if name == "results":
        draw(HERE / "loss.png", args.models)
    for r in rows:
        print(
            f"{r['model']:10s} {r['parameters']:>9,} parameters: 32-bit {r['heldout']['32-bit']}, 8-bit "
            f"{r['heldout']['8-bit']}; mean difference {r['mean_difference']:+.4f}, seeds' standard deviation "
            f"{r['seed_standard_deviation']:.4f}, range {r['seed_range']:.4f}"
        )


if __name__ == "__main__":
    main()
