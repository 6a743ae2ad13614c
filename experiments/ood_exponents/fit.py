"""Fit exponents in and out of distribution, for a decoder and an encoder.

python experiments/ood_exponents/fit.py [SWEEP]

With SWEEP, its table is saved as results/runs.csv; without, the saved table is fitted again. Writes fits.json and
pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import experiments.ood_exponents.series  # noqa: F401  (the runs' configs refer to it)
from jaxscale.plan.laws import BODY, OutOfDistribution, read_rows, read_table, write_rows
from jaxscale.train.run import read_config

RESULTS = Path(__file__).parent / "results"
TASKS = {"decoder": "next_value", "encoder": "masked_horizon"}


def main() -> None:
    """Fit both tasks, and write the results."""
    RESULTS.mkdir(exist_ok=True)
    if len(sys.argv) > 1:
        write_rows(read_rows(sys.argv[1], body=read_config), RESULTS / "runs.csv")
    rows = read_rows(RESULTS / "runs.csv")
    results = {}
    for name, task in TASKS.items():
        table = read_table([row for row in rows if row["Series.task"].endswith(task)])
        law = OutOfDistribution(parameters=BODY)
        fit = law.fit(table)
        fit.law.picture(fit, table).savefig(RESULTS / f"{name}.png")
        results[name] = {
            "parameters": {k: [i.value, i.low, i.high] for k, i in fit.parameters.items()},
            "error": {k: float(abs(e).mean()) for k, e in fit.errors(table).items()},
        }
    (RESULTS / "fits.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
