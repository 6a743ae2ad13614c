"""Device memory of a training step whose layers are in host memory, by the window of layers on the device.

    python experiments/stream_layers/window.py           # compiles cell by cell; continues where it stopped
    python experiments/stream_layers/window.py --table   # the README's table from cells.jsonl

Needs `make install EXTRAS=tpu` on Python 3.12; one to three minutes a compilation on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from pathlib import Path
from typing import Any

import jax

from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.optim import OnHost
from jaxscale.plan.compile import compile_step
from jaxscale.step import Backprop, StreamLayers, TrainConfig

CELLS = Path(__file__).parent / "cells.jsonl"
WINDOWS = (8, 4, 2, 1, None)
MODEL = TransformerConfig(
    depth=16, width=1024, heads=8, hidden=4096, vocab=512, memory="full", param_dtype="bfloat16", dtype="bfloat16"
)
TOPOLOGY = "v5e:2x2"
MIB = 2**20


def products_during_copies(text: str) -> list[int]:
    """Return for each copy of a matrix of a layer to the device, in a loop, the products that run before it ends.

    Args:
      text: the scheduled program, in which operations run in the order of the lines.
    """
    counts: list[int] = []
    running: dict[str, int] = {}
    products, entry = 0, True
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.endswith("{"):
            running, products, entry = {}, 0, line.startswith("ENTRY")
        name = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
        if name is None or entry or "transpose(jvp" not in line and "/jvp(" not in line and "kOutput" not in line:
            continue
        if "kind=kOutput" in line:
            products += 1
        elif " dynamic-slice-start(" in line and "S(5)" in line:
            running[name[1]] = products
        elif (done := re.search(r" dynamic-slice-done\(%(\S+?)\)", line)) and done[1] in running:
            counts.append(products - running[done[1]])
    return counts


def cell(window: int | None) -> dict[str, Any]:
    """Compile a step and return its bytes.

    Args:
      window: the window; `None` is the step with all layers on the device.
    """
    algorithm = Backprop() if window is None else StreamLayers(window)
    config = TrainConfig(
        model=MODEL, layout=Layout("data=1"), optimizer=OnHost(), algorithm=algorithm, batch_size=1, seq_len=1024
    )
    compiled = compile_step(config, TOPOLOGY)
    m = compiled.memory_analysis()
    device = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    of_host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
    during = products_during_copies(compiled.as_text())
    return {"window": window, "device": device, "temporaries": m.temp_size_in_bytes, "host": of_host,
            "copies": len(during), "copies_beside_products": sum(n > 0 for n in during)}  # fmt: skip


def table() -> str:
    """Return the README's table."""
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()]
    rows.sort(key=lambda r: (r["window"] is None, r["window"]))
    lines = ["| window | device, MiB | host, MiB | copies in loops beside products |", "|---|---|---|---|"]
    for r in rows:
        beside = "" if r["window"] is None else f"{r['copies_beside_products']} of {r['copies']}"
        window = "all on the device" if r["window"] is None else r["window"]
        lines.append(f"| {window} | {r['device'] / MIB:,.0f} | {r['host'] / MIB:,.0f} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    """Compile the missing cells, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the README's table")
    if not parser.parse_args().table:
        known = [json.loads(line)["window"] for line in CELLS.read_text().splitlines()] if CELLS.exists() else []
        for window in WINDOWS:
            if window not in known:
                about = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
                line = json.dumps(cell(window) | about)
                with CELLS.open("a") as file:
                    file.write(line + "\n")
    print(table())


if __name__ == "__main__":
    main()
