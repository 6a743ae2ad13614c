"""Work of the slowest device with packed rows in the seeded order, and with `train.even_rows`; trains nothing.

python experiments/layouts_per_step/even.py      # half a minute: writes even.json and prints the table
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from simulate import measured, published, read_costs

from jaxscale.data import Loader
from jaxscale.data.packing import Documents, Fit, pack

HERE = Path(__file__).parent
SEQ, STEPS = 32768, 40
SHAPES = ((8, 1, 1), (8, 4, 1), (8, 1, 4), (32, 1, 8), (8, 4, 4))
"""Devices, rows of a device in a micro-batch, micro-batches."""


def source(corpus: str) -> Fit:
    """Return rows of documents of a corpus's lengths, packed by best fit; their tokens are not read."""
    draws = {"Wikipedia": 400_000, "LongAlpaca-Chinese": 20_000}
    lengths = published(corpus, draws[corpus], 0) if corpus in draws else measured()
    starts = 1 + np.cumsum(lengths) - lengths
    rows = pack(Documents(corpus, corpus, 256, 0, np.zeros(0, np.int32), starts, lengths), "fit", SEQ)
    assert isinstance(rows, Fit)
    return rows


def slowest(loader: Loader, rows: Fit, devices: int, parts: int) -> tuple[float, float]:
    """Return the seconds of the slowest device over the mean, if devices wait after each micro-batch, or each step."""
    costs = read_costs()["attention_only"]
    every, once = [], []
    for step in range(STEPS):
        pairs = rows.pairs(loader.ids_at(step)).astype(np.float64)
        seconds = costs.linear * SEQ + 2 * costs.quadratic * pairs  # `quadratic` is of a token squared
        each = seconds.reshape(-1, parts).T.reshape(parts, devices, -1).sum(axis=2)
        every.append(each.max(axis=1).sum() / each.sum() * devices)
        once.append(each.sum(axis=0).max() / each.sum() * devices)
    return float(np.mean(every)), float(np.mean(once))


def main() -> None:
    """Simulate all corpora and shapes."""
    table = []
    for corpus in ("Wikipedia", "LongAlpaca-Chinese", "standard library"):
        rows = source(corpus)
        for devices, each, parts in SHAPES:
            batch = devices * each * parts
            row: dict[str, object] = {"corpus": corpus, "devices": devices, "rows": each, "micro_batches": parts}
            for name, even in (("seeded", None), ("even", (parts, 1))):
                row[name], row[f"{name}, once a step"] = slowest(Loader(rows, batch, even=even), rows, devices, parts)
            table.append(row)
            waits = [f"{row[k]:.3f}" for k in ("seeded", "even", "seeded, once a step", "even, once a step")]
            print(f"| {corpus} | {devices} | {each} | {parts} | {' | '.join(waits)} |", flush=True)
    (HERE / "even.json").write_text("[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n")


if __name__ == "__main__":
    main()
