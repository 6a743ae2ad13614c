"""Loss against FLOPs of models that grow from 2 to 8 layers, beside training 8 layers from scratch.

python experiments/growth/growth.py            # train; runs/growth keeps what is finished
python experiments/growth/growth.py --draw     # the figure and the table of results/results.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import jaxscale as js
from jaxscale.convert.grow import grow
from jaxscale.optim import Constant

HERE = Path(__file__).parent
RUNS = Path("runs/growth")
SMALL, LARGE = 2, 8
STEPS = 500
"""Steps of the model from scratch; all others have its FLOPs."""
TIMINGS = (50, 100, 200, 400)
"""Steps of the small model before it grows."""
AT = 200
METHODS = ("stack", "interpolate", "identity")
SETTINGS: dict[str, Any] = dict(
    layout=None, data=js.data.python_stdlib(), batch_size=8, seq_len=128, eval_every=25, eval_batches=24,
    schedule=Constant(), lr=2e-3,
)  # fmt: skip


def model(layers: int) -> js.models.TransformerConfig:
    """Return the model of this many layers: width 64, heads of 32, bytes as tokens."""
    return js.models.TransformerConfig(depth=layers, vocab=256, width=64, heads=2, hidden=192)


def flops(layers: int) -> int:
    """Return the FLOPs of a training step."""
    return model(layers).flops(SETTINGS["batch_size"], SETTINGS["seq_len"])


def trained(path: Path, **settings: Any) -> js.Run:
    """Train a run, or continue or load it."""
    resume = True if settings.pop("grown", False) else "newest"
    if (path / "checkpoints" / str(settings["steps"])).exists():
        return js.load(path)
    return js.fit(run=path, resume=resume, quiet=True, **settings)


def curve(run: js.Run, layers: int, before: float = 0.0, first: int = 0) -> list[tuple[float, float]]:
    """Return (FLOPs, held-out loss) of every evaluation."""
    rows = [r for r in run.metrics() if "eval_loss" in r]
    return [(before + (r["step"] - first) * flops(layers), r["eval_loss"]) for r in rows]


def of_seed(seed: int, timings: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train the small model, the large one from scratch, and every grown one; return their curves."""
    root, settings = RUNS / str(seed), SETTINGS | {"seed": seed}
    small = trained(
        root / "small", model=model(SMALL), steps=max(timings), checkpoint_every=50, keep_every=50, **settings
    )
    scratch = trained(root / "scratch", model=model(LARGE), steps=STEPS, **settings)
    curves = [dict(seed=seed, name="scratch", at=0, curve=curve(scratch, LARGE))]
    curves += [dict(seed=seed, name="small", at=0, curve=curve(small, SMALL))]
    others = [*((AT, m) for m in METHODS[1:]), (AT, "new optimizer")] if len(timings) > 1 else []
    for at, method in [*((t, "stack") for t in timings), *others]:
        path, spent = root / f"{method} {at}".replace(" ", "-"), at * flops(SMALL)
        more = round((STEPS * flops(LARGE) - spent) / flops(LARGE))
        if method == "new optimizer":
            base = root / f"stack-{at}-weights"
            if not base.exists():
                grow(small, base, layers=LARGE, step=at, weights_only=True)
            run = trained(path, model=model(LARGE), steps=more, start=js.train.FromRun(str(base)), **settings)
            curves.append(dict(seed=seed, name=method, at=at, curve=curve(run, LARGE, spent)))
            continue
        if not path.exists():
            grow(small, path, layers=LARGE, method=method, step=at)
        run = trained(path, grown=True, steps=at + more)
        curves.append(dict(seed=seed, name=method, at=at, curve=curve(run, LARGE, spent, at)))
    return curves


def reached(points: list[tuple[float, float]], loss: float) -> float | None:
    """Return the FLOPs at which a curve first has this loss, interpolated, or `None`."""
    for (a, x), (b, y) in zip(points, points[1:], strict=False):
        if y <= loss <= x:
            return a + (b - a) * (x - loss) / (x - y)
    return None


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """Draw loss over FLOPs, and the loss at the end over the step of growth."""
    figure = Figure(figsize=(12, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(("scratch", "small", "stack", "interpolate", "identity", "new optimizer"),
                       ("#222222", "#9bb8d8", "#d1495b", "#edae49", "#66a182", "#8d6a9f"), strict=True))  # fmt: skip
    for one in curves:
        if one["at"] in (0, AT):
            label = one["name"] if one["seed"] == 0 else None
            left.plot(*zip(*one["curve"], strict=True), color=colours[one["name"]], label=label, linewidth=1.2)
    end = STEPS * flops(LARGE)
    for seed in sorted({one["seed"] for one in curves}):
        some = sorted((c["at"], c["curve"][-1][1]) for c in curves if c["seed"] == seed and c["name"] == "stack")
        right.plot(*zip(*some, strict=True), "o-", color=colours["stack"], label="stack" if seed == 0 else None)
        last = next(c["curve"][-1][1] for c in curves if c["seed"] == seed and c["name"] == "scratch")
        right.axhline(last, color=colours["scratch"], label="scratch" if seed == 0 else None)
    left.set(xlabel="FLOPs of all training", ylabel="held-out nats per byte", title=f"growth after {AT} small steps")
    left.set(ylim=(None, 3.2), xlim=(0, end * 1.02))
    right.set(xlabel="steps of the small model before growth", title=f"loss after {end:.1e} FLOPs")
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
    figure.savefig(path)


def table(curves: list[dict[str, Any]]) -> None:
    """Print a row per way to train: the loss at the end, and the FLOPs to reach the loss of training from scratch."""
    seeds = sorted({c["seed"] for c in curves})
    scratch = {c["seed"]: c["curve"][-1] for c in curves if c["name"] == "scratch"}
    print("| | grown at step | held-out nats per byte | FLOPs to the loss of scratch |")
    print("|---" * 4 + "|")
    for name, at in dict.fromkeys((c["name"], c["at"]) for c in curves if c["name"] != "small"):
        some = [c for s in seeds for c in curves if (c["name"], c["at"], c["seed"]) == (name, at, s)]
        losses = " / ".join(f"{c['curve'][-1][1]:.3f}" for c in some)
        shares = [reached(c["curve"], scratch[c["seed"]][1]) for c in some]
        text = [f"{f / scratch[c['seed']][0]:.0%}" if f else "not reached" for f, c in zip(shares, some, strict=True)]
        print(f"| {name} | {at or ''} | {losses} | {' / '.join(text)} |")


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what is measured")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="forget the finished runs")
    args = parser.parse_args()
    results = HERE / "results/results.json"
    if not args.draw:
        if args.again:
            shutil.rmtree(RUNS, ignore_errors=True)
        curves = [c for seed in range(args.seeds) for c in of_seed(seed, TIMINGS if seed == 0 else (AT,))]
        results.write_text(json.dumps({"flops": {n: flops(n) for n in (SMALL, LARGE)}, "curves": curves}) + "\n")
    curves = json.loads(results.read_text())["curves"]
    draw(curves, HERE / "results/growth.png")
    table(curves)


if __name__ == "__main__":
    main()
