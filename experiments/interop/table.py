"""Print the tables of README.md from results/*.jsonl.

python -m experiments.interop.table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "results"


def _lines(name: str) -> list[dict[str, Any]]:
    file = HERE / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    """Print both tables."""
    proof = _lines("proof.jsonl")
    layouts = list(dict.fromkeys(x["layout"] for x in proof))
    print("| family | " + " | ".join(f"{w}: error, tokens" for w in layouts) + " |\n|---|" + "---|" * len(layouts))
    for family in dict.fromkeys(x["family"] for x in proof):
        cells = []
        for where in layouts:
            rows = [x for x in proof if (x["family"], x["layout"]) == (family, where)]
            new = rows[0].get("new", 64) if rows else 0
            cells += [f"{x['error']:.1e}, {x['without cache']} and {x['with cache']} of {new}" for x in rows] or ["-"]
        print(f"| {family} | " + " | ".join(cells) + " |")
    print("\n| checkpoint | largest tensor | case | more than before | allowed | seconds |\n|---|---|---|---|---|---|")
    for x in _lines("memory.jsonl"):
        sizes = (f"{x[name] / 1e6:,.0f} MB" for name in ("bytes", "largest"))
        more, allowed = (f"{x[name] / 1e6:,.0f} MB" for name in ("more", "allowed"))
        print("| " + " | ".join((*sizes, x["case"], more, allowed, str(x["seconds"]))) + " |")


if __name__ == "__main__":
    main()
