"""Write the table of results.jsonl into the README: python experiments/quantize/make_table.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->"

DEFAULTS = (
    r", (weights|power|steps|strength|damping|widths)=.*?(?=, \w+=|\))", r", (clip|beta|growth|iterations)=[\w.]+",
    r", activations=6(?=\))", r", by_activation=False", r", dtype='bfloat16'", r", activations=4(?=, recipe)",
)  # fmt: skip
"""Settings that are as they come."""


def table() -> str:
    """Return the table of all rows, in Markdown."""
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    weights = rows[0]["bytes"] / 4  # float32
    lines = ["| recipe | bits of a weight, scales included | held-out loss | gap |", "|---|---|---|---|"]
    for row in rows:
        name = row["recipe"].replace(", widths=(2, 3, 4, 5, 6, 8)", "")
        for default in DEFAULTS:
            name = re.sub(default, "", name)
        name = name.replace("EoRA(bits=4, group=128, ", "EoRA(").replace(
            "group=128, recipe=GPTQ(bits=4, ", "recipe=GPTQ("
        )
        name = name.replace("BitStack(bits=4, group=128, ", "BitStack(").replace(
            "=RoundToNearest(bits=4, group=128)", ""
        )
        name = name.replace(", recipe)", ")")
        name, with_, part = name.partition(" with ")
        name = "none (float32)" if name == "none" else f"`{name}`{with_}{part}"
        gap = row["loss"] - rows[0]["loss"]
        lines.append(f"| {name} | {8 * row['bytes'] / weights:.2f} | {row['loss']:.4f} | {gap:+.4f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = HERE / "README.md"
    text = page.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}{table()}{END}{after}")
