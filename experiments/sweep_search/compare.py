"""Compare searches by the steps until a good configuration, on curves from formulas or from a measured table.

    python experiments/sweep_search/compare.py formulas
    python experiments/sweep_search/compare.py table

Every search and seed is a line of `results/<problem>.jsonl`; existing lines are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from jaxscale.sweep.axes import Integers, LogUniform, Values  # noqa: E402
from jaxscale.sweep.base import Axis, Search  # noqa: E402
from jaxscale.sweep.search import (  # noqa: E402
    ASHA,
    BOHB,
    KDE,
    Extrapolated,
    Hyperband,
    OptunaSearch,
    QuasiRandom,
    Random,
)
from tests.truth.carried import carry_out  # noqa: E402

SEEDS = 20
WORKERS = 4
BUDGET = 150  # full runs, after which a search has failed to reach the target


class Problem(NamedTuple):
    """A search problem: space, learning curves, steps, target."""

    space: Mapping[str, Axis]
    curve: Callable[[Mapping[str, Any], int], float]
    steps: int
    every: int
    target: float
    rungs: int = 4
    most: int | None = None  # number of combinations, where it is finite


SEARCHES: dict[str, Callable[[int, int], Search]] = {
    "Random": lambda s, rungs: Random(seed=s),
    "QuasiRandom": lambda s, rungs: QuasiRandom(seed=s),
    "KDE": lambda s, rungs: KDE(seed=s),
    "OptunaSearch (TPE)": lambda s, rungs: OptunaSearch(seed=s),
    "Random + Extrapolated": lambda s, rungs: Random(seed=s, stopper=Extrapolated()),
    "KDE + Extrapolated": lambda s, rungs: KDE(seed=s, stopper=Extrapolated()),
    "TPE + Median pruner": lambda s, rungs: OptunaSearch(seed=s, pruner="Median"),
    "Hyperband": lambda s, rungs: Hyperband(rounds=12, rungs=rungs, sampler=Random(seed=s)),
    "BOHB": lambda s, rungs: BOHB(rounds=12, rungs=rungs, sampler=KDE(seed=s)),
    "BOHB + Extrapolated": lambda s, rungs: BOHB(rounds=12, rungs=rungs, sampler=KDE(seed=s), stopper=Extrapolated()),
    "ASHA": lambda s, rungs: ASHA(rungs=rungs, sampler=Random(seed=s)),
    "ASHA (KDE)": lambda s, rungs: ASHA(rungs=rungs, sampler=KDE(seed=s)),
}


def formulas(seed: int) -> Problem:
    """Return synthetic learning curves: power laws whose height, slope and exponent depend on four settings.

    High learning rates are ahead early and end higher, so that curves cross; the highest diverge. Losses have noise of
    about the size that seeds of a small language model cause. The best 1% of random configurations reach the target.
    """
    random = np.random.default_rng([seed, 99])
    centre = random.uniform([-3.5, -2.5, 0.2], [-2.0, -1.0, 0.8])
    kinds = random.uniform(0, 0.3, 3)
    space = {
        "lr": LogUniform(1e-5, 1e-1),
        "decay": LogUniform(1e-4, 1.0),
        "depth": Integers(2, 12),
        "optimizer": Values(("a", "b", "c")),
    }
    steps = 81

    def curve(b: Mapping[str, Any], step: int) -> float:
        lr, decay = math.log10(b["lr"]), math.log10(b["decay"])
        depth, kind = (b["depth"] - 2) / 10, kinds["abc".index(b["optimizer"])]
        if lr > centre[0] + 1.3:
            return 8.0  # diverged
        off = 0.25 * (lr - centre[0]) ** 2 + 0.05 * (decay - centre[1]) ** 2 + 0.4 * (depth - centre[2]) ** 2
        exponent = 0.35 + 0.3 / (1 + math.exp(-2 * (lr - centre[0])))
        noise = np.random.default_rng([seed, step, int(abs(lr) * 1e6), int(depth * 10)]).normal() * 0.004
        return 2 + off + kind + 3 * (1 + step) ** -exponent + noise

    ends = []
    for i in range(2000):
        u = np.random.default_rng([seed, i, 7]).random(4)
        ends.append(curve({n: a.at(x) for (n, a), x in zip(space.items(), u, strict=True)}, steps))
    return Problem(space, curve, steps, 3, float(np.quantile(ends, 0.01)))


def table(seed: int) -> Problem:
    """Return the problem of the measured curves in `results/curves.csv`."""
    rows = list(csv.DictReader((HERE / "results" / "curves.csv").open()))
    names = [n for n in rows[0] if not n.startswith("step ")]
    marks = [int(n.removeprefix("step ")) for n in rows[0] if n.startswith("step ")]
    values = {n: sorted({float(r[n]) for r in rows}) for n in names}
    curves = {tuple(float(r[n]) for n in names): {m: float(r[f"step {m}"]) for m in marks} for r in rows}
    ends = sorted(c[marks[-1]] for c in curves.values() if math.isfinite(c[marks[-1]]))

    def curve(b: Mapping[str, Any], step: int) -> float:
        return curves[tuple(b[n] for n in names)][max(m for m in marks if m <= step)]

    space = {n: Values(tuple(v)) for n, v in values.items()}
    return Problem(space, curve, marks[-1], marks[0], ends[len(rows) // 100 - 1], 3, len(rows))


def come_to_target(problem: Problem, search: Search, seed: int) -> dict[str, float | None]:
    """Search; return the steps until a trial finished at or below the target, in full runs, and how many trials ran."""
    out = carry_out(
        search,
        problem.space,
        problem.curve,
        problem.steps,
        workers=WORKERS,
        every=problem.every,
        until=problem.target,
        budget=BUDGET * problem.steps,
        seed=seed,
    )
    came = out.best <= problem.target
    return {"full_runs": round(out.spent / problem.steps, 2) if came else None, "trials": len(out.records)}


def main() -> None:
    """Run the searches that the results lack, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("problem", choices=["formulas", "table"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time; the next call continues")
    args = parser.parse_args()
    file, begun = HERE / "results" / f"{args.problem}.jsonl", time.monotonic()
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(d["search"], d["seed"]) for d in done}
    make = {"formulas": formulas, "table": table}[args.problem]
    for seed in range(SEEDS):
        problem = make(seed)
        for name, search in SEARCHES.items():
            if (name, seed) in known or time.monotonic() - begun > args.seconds:
                continue
            if name in ("Hyperband", "BOHB", "BOHB + Extrapolated") and problem.most is not None:
                continue  # brackets need more trials than the table has
            done.append({"search": name, "seed": seed, **come_to_target(problem, search(seed, problem.rungs), seed)})
            with file.open("a") as f:
                f.write(json.dumps(done[-1]) + "\n")
    print(summary(done))


def summary(done: list[dict[str, Any]]) -> str:
    """Return the table: median, quartiles, how many reached the target, and the ratio to random search's median."""
    lines = [
        "| search | full runs to the target: median | quartiles | reached it | Random's median / this |",
        "|---|---|---|---|---|",
    ]
    medians = {}
    for name in SEARCHES:
        runs = [math.inf if d["full_runs"] is None else d["full_runs"] for d in done if d["search"] == name]
        if not runs:
            continue
        low, middle, high = (float(np.quantile(runs, q, method="nearest")) for q in (0.25, 0.5, 0.75))
        medians[name] = statistics.median_low(runs)
        came = sum(math.isfinite(r) for r in runs)
        lines.append(
            f"| {name} | {medians[name]:.1f} | {low:.1f} to {high:.1f} | {came} of {len(runs)} | "
            f"{medians['Random'] / medians[name]:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
