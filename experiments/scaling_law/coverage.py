"""Coverage of intervals: fit laws to synthetic tables of runs, and count how often an interval has the true value.

python experiments/scaling_law/coverage.py [LAW ...]    # two minutes; continues where it stopped
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxscale.plan.laws import Chinchilla, Farseer, Fit, IsoFLOP, Law, OutOfDistribution, StepLaw, read_table
from tests.truth import planted

TABLES, SAMPLES, LEVEL = 40, 100, 0.9
OUT = Path(__file__).parent / "results" / "coverage.json"

SHARE = planted.CHINCHILLA["alpha"] + planted.CHINCHILLA["beta"]
FAR = (6.4e8, 4e12), (1e10, 5e10)
"""(parameters, tokens) at or beyond the tables' largest, 2.6e9 and 5e10, where the loss is predicted."""


def parameters_of(truth: dict[str, float]) -> Callable[[Fit], dict[str, bool]]:
    """Return a check: is each true parameter in its interval?"""
    return lambda fit: {name: x in fit.parameters[name] for name, x in truth.items()}


def losses_of(loss: Callable[[float, float], float]) -> Callable[[Fit], dict[str, bool]]:
    """Return a check: is the true loss in the interval of the prediction?"""
    return lambda fit: {
        f"L({n:.1e}, {d:.1e})": loss(n, d) in fit.predict(parameters=n, tokens=d)["eval_loss"] for n, d in FAR
    }


def both(*looks: Callable[[Fit], dict[str, bool]]) -> Callable[[Fit], dict[str, bool]]:
    """Combine checks."""
    return lambda fit: {name: held for look in looks for name, held in look(fit).items()}


ood = {f"alpha({k})": alpha for k, (_, alpha) in planted.OOD.items()}
ood |= {f"alpha({k}) - alpha(eval_loss)": a - planted.OOD["eval_loss"][1] for k, (_, a) in planted.OOD.items()}
ood.pop("alpha(eval_loss) - alpha(eval_loss)")

CASES: dict[str, tuple[Law, Callable[[int], planted.Rows], Callable[[Fit], dict[str, bool]]]] = {
    "chinchilla": (
        Chinchilla(),
        lambda seed: planted.surface_runs(planted.chinchilla_loss, seed),
        both(parameters_of(planted.CHINCHILLA), losses_of(planted.chinchilla_loss)),
    ),
    "farseer": (
        Farseer(),
        lambda seed: planted.surface_runs(planted.farseer_loss, seed, noise=1e-3, sizes=6, budgets=6),
        losses_of(planted.farseer_loss),
    ),
    "isoflop": (
        IsoFLOP(),
        planted.isoflop_runs,
        parameters_of({"a": planted.CHINCHILLA["beta"] / SHARE, "b": planted.CHINCHILLA["alpha"] / SHARE}),
    ),
    "steplaw": (StepLaw(), planted.steplaw_runs, parameters_of(planted.STEPLAW)),
    "ood": (OutOfDistribution(), planted.ood_runs, parameters_of(ood)),
}


def main() -> None:
    """Measure the laws that the results lack."""
    done = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, (law, make, look) in CASES.items():
        if name in done or (len(sys.argv) > 1 and name not in sys.argv[1:]):
            continue
        began, hits = time.perf_counter(), []
        for seed in range(TABLES):
            hits.append(look(law.fit(read_table(make(seed)), samples=SAMPLES, level=LEVEL)))
        done[name] = {
            "tables": TABLES,
            "samples": SAMPLES,
            "level": LEVEL,
            "held": {k: round(float(np.mean([h[k] for h in hits])), 3) for k in hits[0]},
            "seconds": round(time.perf_counter() - began, 1),
        }
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
