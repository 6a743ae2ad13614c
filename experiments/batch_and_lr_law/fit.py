"""Fit the Step Law to the sweep's table, and measure its error on the largest runs when they are held out.

python experiments/batch_and_lr_law/fit.py [SWEEP]

With SWEEP, its table is saved as results/runs.csv; without, the saved table is fitted again. Writes fits.json and a
picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.plan.laws import BODY, StepLaw, read_rows, read_table, write_rows
from jaxscale.train.run import read_config

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Fit the law for both ways to count parameters, and write the results."""
    if len(sys.argv) > 1:
        write_rows(read_rows(sys.argv[1], body=read_config), RESULTS / "runs.csv")
    table = read_table(RESULTS / "runs.csv")
    results: dict[str, Any] = {}
    for counted in (BODY, "parameters"):
        law = StepLaw(parameters=counted)
        fit = law.fit(table)
        bowls = law.bowls(table, np.ones(len(table)))
        results[f"N = {counted}"] = {
            "parameters": {k: [i.value, i.low, i.high] for k, i in fit.parameters.items()},
            "lowest": [
                {"N": b.parameters, "D": b.tokens, "lr": b.lr, "batch": b.batch, "inside": b.inside, "edge": b.edge}
                for b in bowls
            ],
            "errors": {k: e.tolist() for k, e in fit.errors(table).items()},
        }
        largest = (table[counted] == table[counted].max()) & (table["tokens"] == table["tokens"].max())
        small = law.fit(table.where(~largest), samples=0)
        results[f"N = {counted}"]["largest held out"] = {
            k: e.tolist() for k, e in small.errors(table.where(largest)).items()
        }
        if counted == BODY:
            law.picture(fit, table).savefig(RESULTS / "steplaw.png")
    (RESULTS / "fits.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
