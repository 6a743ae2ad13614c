"""Chinchilla's and Farseer's laws on the sweep's table, judged on the sizes and budgets that were held out.

python experiments/scaling_law/fit.py [SWEEP]

The table of SWEEP is kept as results/runs.csv; without one, what was kept is fitted anew.
Writes fits.json and the pictures.
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
"""Columns whose largest values are kept from a fit."""


def fitted(law: Any, table: Any) -> dict[str, Any]:
    """Everything about one law."""
    fit = law.fit(table)
    out: dict[str, Any] = {
        "parameters": {k: [i.value, i.low, i.high] for k, i in fit.parameters.items()},
        "error": {k: float(abs(e).mean()) for k, e in fit.errors(table).items()},
    }
    for column, count in JUDGED:
        try:
            found = held_out(law, table, column, count)
            out[f"held out: {count} largest {column}"] = {"runs": found.judged, **found.mean}
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
    """Fits, and writes."""
    if len(sys.argv) > 1:
        write_rows(read_rows(sys.argv[1], body=read_config), RESULTS / "runs.csv")
    table = read_table(RESULTS / "runs.csv")
    found: dict[str, Any] = {}
    for counted in ("parameters", BODY):
        for law in (Chinchilla(parameters=counted), Farseer(parameters=counted)):
            found[f"{law.name}, N = {counted}"] = fitted(law, table)
    for law in (Chinchilla(delta=1e-2), IsoFLOP(within=0.35)):
        try:
            found[f"{law!r}"] = fitted(law, table)
        except ConfigError as e:
            found[f"{law!r}"] = str(e)
    for law in (Chinchilla(), Farseer()):
        fit = law.fit(table, samples=0)
        fit.law.picture(fit, table).savefig(RESULTS / f"{law.name}.png")
    for of in ("parameters", "tokens", "flops"):
        exponents = OutOfDistribution(of=of).fit(table)
        found[f"ood, of {of}"] = {k: [i.value, i.low, i.high] for k, i in exponents.parameters.items()}
    (RESULTS / "fits.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
