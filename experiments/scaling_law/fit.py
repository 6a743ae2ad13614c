"""Fit Chinchilla's and Farseer's laws to the sweep's table, and evaluate them on held-out sizes and budgets.

python experiments/scaling_law/fit.py [SWEEP]

With SWEEP, its table is saved as results/runs.csv; without, the saved table is fitted again. Writes fits.json and the
pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.plan.laws import (
    BODY,
    Chinchilla,
    Farseer,
    IsoFLOP,
    OutOfDistribution,
    held_out,
    optimum,
    read_rows,
    read_table,
    write_rows,
)
from jaxscale.train.run import read_config

RESULTS = Path(__file__).parent / "results"
JUDGED = (("parameters", 1), ("tokens", 1), ("flops", 5))
"""Columns, and how many of their largest values are held out."""


def fitted(law: Any, table: Any) -> dict[str, Any]:
    """Fit one law; return its parameters, errors and predictions."""
    fit = law.fit(table)
    out: dict[str, Any] = {
        "parameters": {k: [i.value, i.low, i.high] for k, i in fit.parameters.items()},
        "error": {k: float(abs(e).mean()) for k, e in fit.errors(table).items()},
    }
    for column, count in JUDGED:
        try:
            score = held_out(law, table, column, count)
            out[f"held out: {count} largest {column}"] = {"runs": score.judged, **score.mean}
        except ConfigError as e:
            out[f"held out: {count} largest {column}"] = str(e)
    if hasattr(law, "losses"):
        try:
            best = optimum(fit, 2 * table["flops"].max())
            out["best of twice the largest budget"] = {
                k: [getattr(best, k).value, getattr(best, k).low, getattr(best, k).high]
                for k in ("parameters", "tokens", "loss")
            }
        except ConfigError as e:
            out["best of twice the largest budget"] = str(e)
    return out


def main() -> None:
    """Fit every law, and write the results."""
    if len(sys.argv) > 1:
        write_rows(read_rows(sys.argv[1], body=read_config), RESULTS / "runs.csv")
    table = read_table(RESULTS / "runs.csv")
    results: dict[str, Any] = {}
    for counted in ("parameters", BODY):
        for law in (Chinchilla(parameters=counted), Farseer(parameters=counted)):
            results[f"{law.name}, N = {counted}"] = fitted(law, table)
    for law in (Chinchilla(delta=1e-2), IsoFLOP(within=0.35)):
        try:
            results[f"{law!r}"] = fitted(law, table)
        except ConfigError as e:
            results[f"{law!r}"] = str(e)
    for law in (Chinchilla(), Farseer()):
        fit = law.fit(table, samples=0)
        fit.law.picture(fit, table).savefig(RESULTS / f"{law.name}.png")
    for of in ("parameters", "tokens", "flops"):
        exponents = OutOfDistribution(of=of).fit(table)
        results[f"ood, of {of}"] = {k: [i.value, i.low, i.high] for k, i in exponents.parameters.items()}
    (RESULTS / "fits.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
